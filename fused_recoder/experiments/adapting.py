"""What a trained baseline gains at inference: from a recoder, and from dynamic evaluation.

Step sizes and learning rates are chosen on the validation text; the test text is read once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ..analysis.dynamic import evaluate_dynamically, gradient_sizes
from ..training import Corpus, evaluate, load_model

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3)  # the grid that dynamic evaluation starts with
DECAYS = (2e-4, 1e-3, 5e-3)
EXTENSIONS = 8  # of that grid, at most, where the best point lies on its edge
TUNING_TOKENS = 5_000  # of the validation text, for dynamic evaluation: a batch of one is slow


def recoder_at_inference(
    folders: list[Path], data: Path, *, signal: str, states: str = "hc"
) -> dict:
    """Perplexity over the step size on the validation text, and with the best one on the test."""

    def perplexity(step: float, split: str) -> float:
        loaded = load_model(folders[0], signal=signal, step=step, states=states)
        tokens = Corpus(data, vocabulary=loaded.vocabulary)[split]
        return evaluate(loaded.model, tokens, bptt=loaded.config.bptt).perplexity

    by_step = {step: perplexity(step, "valid") for step in (0.0, *STEPS)}
    best = min(by_step, key=by_step.get)
    return {
        "step": best,
        "valid_perplexity": by_step[best],
        "test_perplexity": perplexity(best, "test"),
        "by_step": list(by_step.items()),
    }


def dynamic_evaluation(folders: list[Path], data: Path, *, tokens: int = TUNING_TOKENS) -> dict:
    """Krause et al. 2018, of the model of the one folder."""
    loaded = load_model(folders[0])
    corpus = Corpus(data, vocabulary=loaded.vocabulary)
    sizes = gradient_sizes(loaded.model, corpus["train"])
    run = functools.partial(evaluate_dynamically, loaded.model, sizes=sizes)
    tuning = corpus["valid"][: tokens + 1]
    choices = search_grid(
        lambda lr, decay: run(tuning, lr=lr, decay=decay).perplexity, LEARNING_RATES, DECAYS
    )
    (lr, decay), tuned = best_choice(choices)
    test = run(corpus["test"], lr=lr, decay=decay)
    return {
        "lr": lr,
        "decay": decay,
        "tuning_perplexity": tuned,
        "tuning_perplexity_static": run(tuning, lr=0.0, decay=0.0).perplexity,
        "choices": choices,
        "bracketed": not edges(choices),
        "test_perplexity": test.perplexity,
        "test_tokens_per_second": test.tokens_per_second,
    }


def search_grid(
    measure: Callable[..., float], *axes: Sequence[float], extensions: int = EXTENSIONS
) -> list[list[float]]:
    """Measures all points of a grid: rows of a point's coordinates and its value.

    Where the best point lies on an edge the grid grows beyond it, in steps of the same ratio, until
    it lies on none; `extensions` times at most.
    """
    axes = tuple(sorted(axis) for axis in axes)
    values: dict[tuple[float, ...], float] = {}
    for remaining in range(extensions, -1, -1):
        for point in itertools.product(*axes):
            if point not in values:
                values[point] = measure(*point)
        choices = [[*point, value] for point, value in values.items()]
        if not remaining or not (beyond := edges(choices)):
            break
        for i, upwards in beyond:
            end, inner = axes[i][::-1][:2] if upwards else axes[i][:2]
            axes[i].append(float(f"{end * end / inner:.6g}"))
            axes[i].sort()
    return choices


def best_choice(choices: list[list[float]]) -> tuple[list[float], float]:
    """The point with the least value, and that; what diverged is no choice."""
    *point, value = min(choices, key=lambda row: math.inf if math.isnan(row[-1]) else row[-1])
    return point, value


def edges(choices: list[list[float]]) -> list[tuple[int, bool]]:
    """The axes at whose end the best point lies, and whether that is the upper one."""
    point, _ = best_choice(choices)
    columns = zip(*(row[:-1] for row in choices), strict=True)
    found = []
    for i, (x, column) in enumerate(zip(point, columns, strict=True)):
        if x in (min(column), max(column)):
            found.append((i, x == max(column)))
    return found
