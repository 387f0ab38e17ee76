"""Which cases `tools.digest` takes: all combinations where they are cheap, pairs of everything, and
sizes beyond every threshold at which the engine does a thing another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

import fused_recoder as fr

from .cases import FUNCTION_SIGNALS, FUSED_SIGNALS, OPTIONS, Case, pairwise, product

MODELS = ("rnn", "lm")
DTYPES = ("float32", "float64")
# One row and two stream through W, some ten go in blocks, many through two products.
ROWS = (1, 2, 5, 20, 70)


def _large() -> list[Case]:
    """Sizes at which something is done in parts (csrc/engine, csrc/kernels/cpu)."""
    lm = {"model": ("lm",), "dtype": ("float32",), "layers": (1,)}
    of_mixtures = ("mc-unit", "mc-shared", "mc-shared-mostly-dropped", "ensemble", "variational")
    return [
        # Gold signals of few rows: blocks of words up to 14k gradients, then two products.
        *product(**lm, signal=("nll", "surprisal"), rows=(40, 60), hidden=(300,), vocab=(1003,)),
        # A vocabulary of many chunks, streamed and in blocks.
        *product(**lm, signal=("nll", "surprisal-argmax", "entropy"), rows=(1, 2, 20),
                 hidden=(65,), vocab=(5003,), step=("number", "backtracking")),
        # More logits than are held at a time, of the loss and of the recoding gradient.
        *product(**lm, signal=("nll", "entropy"), gradient=("detached", "exact"), rows=(70,),
                 reduce=("loss", "nll"), vocab=(30011,)),
        # ... of a mixture: instances in blocks.
        *product(**lm, signal=of_mixtures, rows=(70,), time=(1,), vocab=(45007,)),
        # ... and of mixtures and ensembles with exact gradients.
        *product(**lm, signal=("mc-unit", "ensemble"), gradient=("exact",), rows=(70,), time=(1,),
                 vocab=(25013,)),
        # Products cut into blocks of rows and of columns.
        *product(model=("rnn",), dtype=DTYPES, signal=("nll", "entropy", "mc-shared"), rows=(70,),
                 time=(5,), hidden=(170,), vocab=(1501,)),
        # Readers whose weights are packed once for many steps.
        *product(model=("reader",), dtype=DTYPES, signal=("none", "nll", "entropy", "mc-shared"),
                 rows=(1, 3), hidden=(65,), vocab=(5003,)),
    ]  # fmt: skip


def _unique(cases: list[Case]) -> list[Case]:
    return list({case.name: case for case in cases}.values())


def _is_told(case: Case) -> bool:
    """Whether the result is specified: that of packed variational sequences was not."""
    return not (case.signal == "variational" and case.layout == "packed")


@cache
def cpu_cases() -> list[Case]:
    """All of them, on the CPU's kernels."""
    signals, steps = FUSED_SIGNALS, OPTIONS["step"]
    cases = [
        *product(model=MODELS, signal=signals, step=steps, gradient=OPTIONS["gradient"],
                 dtype=DTYPES),
        *product(model=("reader",), signal=signals, step=steps, dtype=DTYPES, rows=(1, 3)),
        *product(model=("lm",), signal=signals, dtype=DTYPES, rows=ROWS, time=(2, 5), hidden=(33,),
                 vocab=(301,)),
        *product(model=("lm",), signal=signals, rows=(20,), hidden=(33,), vocab=(301,),
                 gradient=("exact",), dtype=DTYPES, reduce=("nll",)),
        *product(model=("function",), signal=FUNCTION_SIGNALS, dtype=DTYPES, rows=ROWS,
                 decoder_bias=(True, False), ignored=(False, True), hidden=(33,), vocab=(301,)),
        *product(model=MODELS, signal=signals, states=OPTIONS["states"], layers=OPTIONS["layers"],
                 bias=(True, False), gradient=OPTIONS["gradient"]),
        *(case for seed in range(4) for case in pairwise(seed)),
        *_large(),
    ]  # fmt: skip
    return _unique([case for case in cases if _is_told(case)])


@cache
def emulator_cases() -> list[Case]:
    """Fewer and smaller ones, for CUDA's kernels run on the CPU."""
    signals, steps = FUSED_SIGNALS, ("number", "predicted", "backtracking")
    small = {"rows": (2,), "time": (2,)}
    cases = [
        *product(model=("lm",), signal=signals, step=steps, **small),
        *product(model=("lm",), signal=signals, gradient=("exact",), reduce=("nll",), **small),
        *product(model=("rnn",), signal=signals, dtype=("float32",), lengths=(True,),
                 ignored=(True,), mask=(True,), gate=("threshold",), step=("learned",)),
        *product(model=("reader",), signal=signals, rows=(1, 3), time=(2,)),
        *product(model=("function",), signal=FUNCTION_SIGNALS, rows=(5,), ignored=(True,)),
        # More columns than one block takes.
        *product(model=("lm",), signal=("nll", "entropy"), layers=(1,), rows=(1,), time=(1,),
                 vocab=(20011,)),
        *[replace(case, rows=2, hidden=7, vocab=13) for case in pairwise(seed=0)],
    ]  # fmt: skip
    return _unique([case for case in cases if _is_told(case) and case.layout != "unbatched"])


# ------------------------------------------------------------------------------------- what raises


def _raising(**change) -> Callable[[], dict[str, Tensor]]:
    """A call of a recoding LSTM with changed options or arguments."""

    def call() -> dict[str, Tensor]:
        options = {"decoder": nn.Linear(7, 13), "num_layers": 2, "signal": "nll"}
        arguments = {"input": torch.zeros(4, 3, 9), "targets": torch.zeros(4, 3).long()}
        for name, value in change.items():
            (arguments if name in _ARGUMENTS else options)[name] = value
        rnn = fr.FusedRecodingLSTM(9, 7, **options)
        return {"output": rnn(arguments.pop("input"), arguments.pop("hx", None), **arguments)[0]}

    return call


_ARGUMENTS = ("input", "hx", "targets", "labels", "lengths", "recode_mask")


def _fed(*tokens: int) -> Callable[[], dict[str, Tensor]]:
    def call() -> dict[str, Tensor]:
        lm = fr.RecodingLanguageModel(13, 9, 7, signal="nll").eval()
        return {"log_probabilities": lm.reader(2).feed(torch.tensor(tokens))}

    return call


ERRORS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "error: unknown signal": _raising(signal="novelty"),
    "error: NaN step": _raising(step=float("nan")),
    "error: step of another shape": _raising(step=torch.ones(3)),
    "error: step of an unknown state": _raising(step={"x": 1.0}),
    "error: unknown states": _raising(states=("h", "x")),
    "error: dropout of 1": _raising(dropout=1.0),
    "error: unknown gradient": _raising(gradient="none"),
    "error: no layers": _raising(num_layers=0),
    "error: decoder of another size": _raising(decoder=nn.Linear(8, 13)),
    "error: probability of 0": _raising(probability=0.0),
    "error: empty input": _raising(input=torch.zeros(0, 3, 9)),
    "error: input of another size": _raising(input=torch.zeros(4, 3, 8)),
    "error: input of another dtype": _raising(input=torch.zeros(4, 3, 9, dtype=torch.float64)),
    "error: states of another size": _raising(hx=(torch.zeros(2, 3, 7), torch.zeros(2, 4, 7))),
    "error: target out of range": _raising(targets=torch.full((4, 3), 13)),
    "error: targets of another shape": _raising(targets=torch.zeros(3, 4).long()),
    "error: labels of no classifier": _raising(labels=torch.zeros(4, 3).long()),
    "error: lengths beyond the end": _raising(lengths=torch.tensor([4, 3, 9])),
    "error: mask of numbers": _raising(recode_mask=torch.ones(4, 3)),
    "error: reader, token out of range": _fed(1, 13),
    "error: reader, too many tokens": _fed(1, 2, 3),
}
