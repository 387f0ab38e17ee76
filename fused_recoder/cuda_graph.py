"""A training step as one CUDA graph: captured once, replayed without Python or launch overhead."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .language_model import RecodingLanguageModel


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

    Every replay draws new masks. Gradients are overwritten, not accumulated. What the graph has
    seen stays as it was: make a new one after changing the mode (`train()`, `eval()`), a gate's
    or a recoder's options, or the dtype. `Lipschitz` steps are refused: their bound follows the
    decoder's weights, and computing it needs the host.
    """

    def __init__(self, lm: RecodingLanguageModel, tokens: Tensor, targets: Tensor, hx=None):
        if not tokens.is_cuda:
            raise ValueError(f"tokens must be on a CUDA device, got {tokens.device}")
        rnn = lm.rnn
        if rnn.signal is not None and not rnn.step.capturable:
            kind = type(rnn.step).__name__
            raise ValueError(f"a {kind} step cannot be captured: use another step")
        self._tokens, self._targets = tokens.clone(), targets.clone()
        shape = tokens.shape if not rnn.batch_first else tokens.shape[::-1]
        states = rnn.initial_states(hx, shape[1], tokens.device)
        self._hx = tuple(state.detach().clone() for state in states)
        self._parameters = [p for p in lm.parameters() if p.requires_grad]

        def run() -> StepOutput:
            for p in self._parameters:
                p.grad = None
            out = lm(self._tokens, self._targets, self._hx)
            out.loss.backward()
            return StepOutput(
                out.loss.detach(), out.nll.detach(), tuple(h.detach() for h in out.hx)
            )

        # Libraries set themselves up at their first call, which must not be captured.
        stream = torch.cuda.Stream(tokens.device)
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream(tokens.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = run()

    def __call__(self, tokens: Tensor, targets: Tensor, hx=None) -> StepOutput:
        for name, given, held in (("tokens", tokens, self._tokens),
                                  ("targets", targets, self._targets)):  # fmt: skip
            if given.shape != held.shape:
                raise ValueError(
                    f"{name} must have the shape that was captured, {tuple(held.shape)}, "
                    f"got {tuple(given.shape)}"
                )
            held.copy_(given)
        for i, held in enumerate(self._hx):
            held.copy_(torch.zeros_like(held) if hx is None else hx[i])
        self._graph.replay()
        return self._output
