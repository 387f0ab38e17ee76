"""A training step as one CUDA graph: captured once, replayed without Python or launch overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ._language_model import LanguageModelOutput
from .language_model import RecodingLanguageModel

WARM_UPS = 3  # runs before the capture: libraries set themselves up at their first call


class StepOutput(NamedTuple):
    """Overwritten by the next replay: clone what is to be kept."""

    loss: Tensor  # []
    nll: Tensor  # [T, B]
    hx: tuple[Tensor, Tensor]  # each [L, B, H]; may be given to the next call as they are


class GraphedStep:
    """Forward and backward pass of a language model on a GPU, captured in a CUDA graph.

        step = fused_recoder.GraphedStep(lm, tokens, targets)   # of the shape of every batch
        for tokens, targets in batches:
            loss, nll, hx = step(tokens, targets, hx)           # hx: None starts from zeros
            optimizer.step()                                    # p.grad is that of this batch

    Every call leaves the gradients of its batch in `p.grad`, whatever became of the last ones (so
    `zero_grad()` may be called and need not be); `accumulate=True` adds to those that are there.
    Every replay draws new masks. Making a step moves nothing: neither weights nor gradients, gates
    or random numbers. A model whose mode, options or memory have changed since then is refused:
    make a new step. So are `Lipschitz` steps: their bound follows the decoder's weights, and
    computing it needs the host.

    Args:
        lm: the model.
        tokens, targets, hx: an example of what it will be called with, on the model's GPU.
        objective: what is minimised, of the model's output; its `loss` if absent.
    """

    def __init__(
        self,
        lm: RecodingLanguageModel,
        tokens: Tensor,
        targets: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        objective: Callable[[LanguageModelOutput], Tensor] | None = None,
    ):
        if not tokens.is_cuda:
            raise ValueError(f"tokens must be on a CUDA device, got {tokens.device}")
        if why_not := refusal(lm):
            raise ValueError(why_not)
        self._lm, self._objective, self._seen = lm, objective, _what_a_graph_sees(lm)
        self._tokens, self._targets = tokens.clone(), targets.clone()
        self._hx = tuple(state.detach().clone() for state in self._states(hx))
        self._parameters = [p for p in lm.parameters() if p.requires_grad]
        with torch.cuda.device(tokens.device), self._undone():
            self._graph, self._output = _capture(self._run, tokens.device)
            self._gradients = [p.grad for p in self._parameters]

    @property
    def is_current(self) -> bool:
        """Whether the model is still as it was captured: mode, options, and where its memory is."""
        return self._seen == _what_a_graph_sees(self._lm)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        accumulate: bool = False,
    ) -> StepOutput:
        self._check(tokens, targets)
        self._take(tokens, targets, hx)
        before = [p.grad.clone() if accumulate and p.grad is not None else None
                  for p in self._parameters]  # fmt: skip
        self._graph.replay()
        # Somebody may have set p.grad to None, or to another tensor.
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        self._add(before)
        return self._output

    def _check(self, tokens: Tensor, targets: Tensor) -> None:
        for name, given, held in (("tokens", tokens, self._tokens),
                                  ("targets", targets, self._targets)):  # fmt: skip
            if given.shape != held.shape:
                raise ValueError(
                    f"{name} must have the shape that was captured, {tuple(held.shape)}, "
                    f"got {tuple(given.shape)}"
                )
        if not self.is_current:
            raise ValueError(
                "lm has changed since its step was captured (its mode, its options, or where its "
                "weights are): make a new GraphedStep"
            )

    def _states(self, hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        rnn, tokens = self._lm.rnn, self._tokens
        return rnn.initial_states(hx, tokens.shape[0 if rnn.batch_first else 1], tokens.device)

    @torch.no_grad()
    def _take(self, tokens: Tensor, targets: Tensor, hx: tuple[Tensor, Tensor] | None) -> None:
        """Into the memory that the graph reads."""
        self._tokens.copy_(tokens)
        self._targets.copy_(targets)
        for held, state in zip(self._hx, self._states(hx), strict=True):
            held.copy_(state)

    def _run(self) -> StepOutput:
        """What is captured."""
        for p in self._parameters:
            p.grad = None
        out = self._lm(self._tokens, self._targets, self._hx)
        loss = out.loss if self._objective is None else self._objective(out)
        loss.backward()
        return StepOutput(loss.detach(), out.nll.detach(), tuple(h.detach() for h in out.hx))

    def _add(self, gradients: list[Tensor | None]) -> None:
        """Gradients from before, on top of those that were handed out."""
        for p, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Buffers, gradients and random numbers are afterwards what they were."""
        buffers = [(buffer, buffer.clone()) for buffer in self._lm.buffers()]
        gradients = [p.grad for p in self._parameters]
        try:
            with torch.random.fork_rng([self._tokens.device.index]):
                yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
            for p, gradient in zip(self._parameters, gradients, strict=True):
                p.grad = gradient


def refusal(lm: RecodingLanguageModel) -> str | None:
    """Why the steps of a model cannot be captured; None if they can."""
    if lm.rnn.signal is None or lm.rnn.step.capturable:
        return None
    return f"a {type(lm.rnn.step).__name__} step cannot be captured: use another step"


def _what_a_graph_sees(lm: RecodingLanguageModel) -> tuple:
    """Options, and addresses of weights and buffers: all that a graph keeps as it was."""
    rnn = lm.rnn
    options = (lm.training, rnn.training, lm.embedding_dropout, rnn.spec)
    options += (rnn.active_dropout, rnn.active_probability)
    if rnn.gate is not None:
        options += (rnn.gate.quantile, rnn.gate.momentum)
    return (*options, *(t.data_ptr() for t in (*lm.parameters(), *lm.buffers())))


def _capture(
    run: Callable[[], StepOutput], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, StepOutput]:
    """The launches of `run` as a graph, and the results that its replays write."""
    # A stream of this device: torch.cuda.graph has one for all, on the device it saw first.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with _without_autocasts_cache():
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (loaders of data, NCCL) may go on calling CUDA.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = run()
    return graph, output


@contextmanager
def _without_autocasts_cache() -> Iterator[None]:
    """Weights that were rounded before the capture would stay as they are for ever."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
