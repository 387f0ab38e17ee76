"""Least squares that is judged by stories it was not fitted to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 0.95  # of confidence intervals


def held_out_log_likelihood(
    predictors: np.ndarray, target: np.ndarray, story: np.ndarray
) -> np.ndarray:
    """Of every word [n], in nats, by a regression on the words of all other stories.

    Args:
        predictors: [n, p]; an intercept is added.
        target: [n]
        story: [n] the word's story
    """
    names = np.unique(story)
    if len(names) < 2:
        raise ValueError(f"at least two stories are needed to leave one out, got {len(names)}")
    found = np.empty(len(target))
    for name in names:
        held_out = story == name
        fitted = _fit(predictors[~held_out], target[~held_out])
        found[held_out] = fitted.log_likelihood(predictors[held_out], target[held_out])
    return found


def varies(predictors: np.ndarray) -> np.ndarray:
    """Which columns of [n, p] are more than a constant and its rounding: bool [p]."""
    return predictors.std(0) > 1e-9 * np.abs(predictors.mean(0))


@dataclass(frozen=True)
class _Fit:
    mean: np.ndarray  # [p]
    coefficients: np.ndarray  # [p] of predictors minus their means
    intercept: float
    variance: float  # of the residuals

    def log_likelihood(self, predictors: np.ndarray, target: np.ndarray) -> np.ndarray:
        residuals = target - self.intercept - (predictors - self.mean) @ self.coefficients
        return -0.5 * (np.log(2 * np.pi * self.variance) + residuals**2 / self.variance)


def _fit(predictors: np.ndarray, target: np.ndarray) -> _Fit:
    mean = predictors.mean(0)
    spread = np.where(varies(predictors), predictors.std(0), np.inf)  # a constant explains nothing
    intercept = target.mean()
    scaled = (predictors - mean) / spread
    coefficients, _, rank, _ = np.linalg.lstsq(scaled, target - intercept, rcond=None)
    residuals = target - intercept - scaled @ coefficients
    freedom = len(target) - rank - 1
    variance = residuals @ residuals / max(freedom, 1)
    if freedom < 1 or not variance > 0:
        raise ValueError(
            f"too few words, or too simple: {len(target)} words leave nothing over to estimate a "
            f"variance from, with {predictors.shape[1]} predictors"
        )
    return _Fit(mean, coefficients / spread, intercept, variance)


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """All of it."""
        return self.low > 0


def bootstrap(
    values: np.ndarray, story: np.ndarray, samples: int, rng: np.random.Generator
) -> list[Interval]:
    """Means over words of every column of values [n, C], with percentile intervals.

    Stories are drawn with replacement, and words within each of them; all columns see the same
    words.
    """
    names, number = np.unique(story, return_inverse=True)
    draws = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=samples)
    sums, words = np.zeros((samples, values.shape[1])), np.zeros(samples)
    for s in range(len(names)):
        of_story = values[number == s]  # [n_s, C]
        count = len(of_story)
        for sample, times in enumerate(draws[:, s]):  # a story may be drawn several times
            drawn = np.bincount(rng.integers(count, size=times * count), minlength=count)
            sums[sample] += drawn @ of_story
            words[sample] += times * count
    means = sums / words[:, None]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return [Interval(*row) for row in zip(values.mean(0).tolist(), low, high, strict=True)]
