"""The fused engine against the reference: results, traces and gradients of any configuration, in
float64 to 1e-10. What can be configured is in one list, `tools.cases.OPTIONS`."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tools import run_case
from tools.cases import Case, drawn, settled

TOLERANCE = 1e-10


def case_of(seed: int) -> Case:
    """Options by chance; sizes of any number, not only those of the list."""
    generator = random.Random(seed)
    case = drawn(generator, model=generator.choice(("rnn", "lm")), autocast=False)
    sizes = {"rows": 9, "time": 6, "hidden": 40, "vocab": generator.choice((3, 40, 400))}
    sizes = {name: generator.randint(1, most) for name, most in sizes.items()}
    return settled(replace(case, dtype="float64", **sizes))


def describe(seed: int) -> str:
    """The case in words."""
    case = case_of(seed)
    return f"{case.name} (rows={case.rows} time={case.time} {case.hidden}x{case.vocab})"


def outcome(case: Case, *, oracle: bool) -> dict[str, torch.Tensor | None] | str:
    """Results by name, or the error."""
    torch.manual_seed(0)  # of what a gate sees before it is judged
    try:
        return run_case.run(case, oracle=oracle)
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def disagreement(results: dict, truth: dict) -> dict[str, float]:
    """Relative errors above the tolerance, by name. No gradient is one of zeros."""
    wrong = {}
    for name in results.keys() | truth.keys():
        got, expected = results.get(name), truth.get(name)
        if got is None and expected is None:
            continue
        got = torch.zeros_like(expected) if got is None else got.double()
        expected = torch.zeros_like(got) if expected is None else expected.double()
        if got.shape != expected.shape:
            wrong[name] = float("inf")
            continue
        scale = expected.abs().max().clamp_min(1e-3)
        error = ((got - expected).abs().max() / scale).item()
        if not error <= TOLERANCE:
            wrong[name] = error
    return wrong


def check(seed: int) -> None:
    """Both agree, or both refuse."""
    case = case_of(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(random.Random(seed).choice((1, 2)))
    results, truth = outcome(case, oracle=False), outcome(case, oracle=True)
    torch.set_num_threads(threads)
    if isinstance(results, str) or isinstance(truth, str):
        same = isinstance(results, str) and isinstance(truth, str)
        assert same, f"{describe(seed)}: fused: {results!s:.300}; reference: {truth!s:.300}"
        return
    wrong = disagreement(results, truth)
    assert not wrong, f"{describe(seed)}: relative errors above {TOLERANCE}: {wrong}"
