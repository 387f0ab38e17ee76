"""Means, deviations and tests of a few runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Sample:
    mean: float
    deviation: float | None  # of the sample (n - 1); None for a single run
    count: int

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ± {self.deviation:.2f}"


def describe(values: Sequence[float]) -> Sample:
    values = np.asarray(values, float)
    deviation = float(values.std(ddof=1)) if len(values) > 1 else None
    return Sample(float(values.mean()), deviation, len(values))


@dataclass(frozen=True)
class Comparison:
    """Of a model with its baseline; perplexities, so less is better."""

    difference: float  # of the means, negative where the model is better
    interval: tuple[float, float] | None  # 95 %, Welch
    effect: float | None  # Hedges' g, positive where the model is better
    p_better: float | None  # Student's one-tailed t-test, as in the thesis
    p_better_welch: float | None  # the same without assuming equal variances


def compare(model: Sequence[float], baseline: Sequence[float]) -> Comparison:
    model, baseline = np.asarray(model, float), np.asarray(baseline, float)
    difference = float(model.mean() - baseline.mean())
    n, m = len(model), len(baseline)
    variances = (model.var(ddof=1), baseline.var(ddof=1)) if min(n, m) > 1 else (0.0, 0.0)
    if not any(variances):  # one run each, or nothing that differs
        return Comparison(difference, None, None, None, None)
    student = stats.ttest_ind(model, baseline, alternative="less")
    welch = stats.ttest_ind(model, baseline, equal_var=False, alternative="less")
    two_sided = stats.ttest_ind(model, baseline, equal_var=False)
    low, high = two_sided.confidence_interval(0.95)
    pooled = math.sqrt(((n - 1) * variances[0] + (m - 1) * variances[1]) / (n + m - 2))
    correction = 1 - 3 / (4 * (n + m) - 9)
    return Comparison(
        difference,
        (float(low), float(high)),
        -difference / pooled * correction,
        float(student.pvalue),
        float(welch.pvalue),
    )


def compare_seeds(model: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison | None:
    """Of the seeds that both have: runs of one seed start alike, and a seed may be a lucky one."""
    seeds = sorted(model.keys() & baseline.keys())
    if not seeds:
        return None
    return compare([model[s] for s in seeds], [baseline[s] for s in seeds])
