"""`fused-recoder reading-times`: do a model's numbers say how long readers look at a word?"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .compare import ModelRuns, load_run, parse_models
from .predictors import (
    BASE,
    CORRECTIONS,
    GRADIENTS,
    SQUARE,
    SURPRISAL,
    Coverage,
    Frequencies,
    Predictors,
    make_predictors,
)
from .reading_report import write_report
from .regression import Interval, bootstrap, held_out_log_likelihood
from .stories import Stories, read_stories
from .word_measures import Measures, measure

# What is added to a regression, and what that holds already.
COMPARISONS = (
    (SURPRISAL, (BASE,)),
    (GRADIENTS, (BASE, SURPRISAL)),
    (GRADIENTS, (BASE, SURPRISAL, SQUARE)),
    (CORRECTIONS, (BASE, SURPRISAL, GRADIENTS)),
)


@dataclass(frozen=True)
class Result:
    """What predictors add to the held-out log-likelihood per word, in nats."""

    model: str
    runs: int
    added: str
    beyond: tuple[str, ...]
    gain: Interval
    log_likelihood: float  # per word, with what was added


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "reading-times",
        help="how well surprisal and recoding predict reading times",
        description="Reads stories with trained models and predicts how long people looked at "
        "their words. Writes a table (Markdown), a figure, and per model all predictors (TSV).",
    )
    parser.add_argument(
        "models", nargs="+", metavar="model",
        help="[name=]run[,run...][@none]: runs of one model with different seeds; @none: without "
        "its recoder",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, required=True,
        help="tab-separated words in reading order: columns story, position, word, and a time",
    )  # fmt: skip
    parser.add_argument("--time", default="geometric_mean_rt", help="the column of times, in ms")
    parser.add_argument(
        "--eos", choices=("sentence", "story"), default="sentence",
        help="where <eos> is read: after every sentence, for models of texts with a sentence per "
        "line (default), or before a story only, for models of texts with longer lines",
    )  # fmt: skip
    parser.add_argument(
        "--counts", type=Path,
        help="text to count words in, for their frequency; if absent, that on which the first "
        "model was trained",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=2000, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=1, help="of bootstrap and signals that sample")
    parser.add_argument(
        "--out", type=Path, default=Path("reading-times"), help="folder for what is written"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {arguments.samples}")
    models = parse_models(arguments.models)
    for model in models:
        if model.recode not in ("all", "none"):
            raise ValueError(f"{model.name!r} must recode all or none of a story, got numbers")
    stories = read_stories(arguments.data, arguments.time)
    try:
        _compare(models, stories, arguments)
    except KeyboardInterrupt:
        print("stopped; no file is half written", file=sys.stderr)
        return 130
    return 0


def _compare(models: list[ModelRuns], stories: Stories, arguments: argparse.Namespace) -> None:
    frequencies = Frequencies.of_text(arguments.counts or _training_text(models[0].paths[0]))
    measures = {
        model.name: [_measure(model, path, stories, arguments) for path in model.paths]
        for model in models
    }
    every = [found for of_runs in measures.values() for found in of_runs]
    coverage = Coverage.of(stories, np.all([found.known for found in every], axis=0))
    if not coverage.used.any():
        raise ValueError(f"no word of {stories.path} can be used: {coverage}")
    log_frequency = frequencies.log(every[0].pieces)
    predictors = {
        name: [make_predictors(stories, log_frequency, found) for found in of_runs]
        for name, of_runs in measures.items()
    }
    results = compare(
        predictors, stories, coverage.used, arguments.samples, arguments.seed, _bar("regressions")
    )
    write_report(arguments.out, results, stories, coverage, predictors, models, frequencies.path)


def _bar(description: str) -> Callable:
    """A progress bar around an iterable, where a terminal shows it."""
    return functools.partial(tqdm, desc=description, leave=False, disable=None)


def _training_text(run: Path) -> Path:
    about = load_run(run).about
    return Path(about["data"])


def _measure(
    model: ModelRuns, path: Path, stories: Stories, arguments: argparse.Namespace
) -> Measures:
    loaded = load_run(path, **({"signal": None} if model.recode == "none" else {}))
    found = measure(
        loaded.model, loaded.vocabulary, stories, eos=arguments.eos, seed=arguments.seed,
        progress=_bar(f"reading, {path}"),
    )  # fmt: skip
    if not found.known.any():
        raise ValueError(f"{path} knows none of the {len(stories):,} words of {stories.path}")
    return found


def compare(
    predictors: dict[str, list[Predictors]],
    stories: Stories,
    used: np.ndarray,
    samples: int,
    seed: int,
    progress: Callable = iter,
) -> list[Result]:
    """All comparisons of all models, on the same words. Runs of a model have regressions of their
    own, of whose log-likelihoods the mean is taken."""
    target, story = np.log(stories.time[used]), stories.story[used]
    chosen = [
        (model, added, beyond)
        for model, of_runs in predictors.items()
        for added, beyond in COMPARISONS
        if any(run.has(added, used) for run in of_runs)
    ]

    if not chosen:
        raise ValueError(f"no predictor varies over the {len(target)} words that can be used")

    @functools.cache
    def log_likelihood(model: str, groups: tuple[str, ...]) -> np.ndarray:
        return np.mean(
            [
                held_out_log_likelihood(run.matrix(groups, used), target, story)
                for run in predictors[model]
            ],
            axis=0,
        )  # [n]

    gains, reached = [], []
    for model, added, beyond in progress(chosen):
        more = log_likelihood(model, (*beyond, added))
        gains.append(more - log_likelihood(model, beyond))
        reached.append(float(more.mean()))
    rng = np.random.default_rng(seed)
    intervals = bootstrap(np.stack(gains, axis=1), story, samples, rng)
    return [
        Result(model, len(predictors[model]), added, beyond, gain, mean)
        for (model, added, beyond), gain, mean in zip(chosen, intervals, reached, strict=True)
    ]
