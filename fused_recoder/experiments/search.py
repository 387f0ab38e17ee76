"""`fused-recoder search`: random search over the thesis's ranges, with Optuna.

Trials live in a database (an SQLite file, or any URL for several machines) and train in folders of
their own. A search that is stopped goes on where it was; one that looks hopeless beside the others
is pruned after an epoch. Only the validation text is read.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError  # optuna brings it

from ..training import Callback, Config, NonFiniteError, Trainer
from ..training.curves import COLOURS
from ..training.evaluation import BEST, CHECKPOINT
from .jobs import Interrupted
from .plots import STYLE, pyplot
from .report import markdown, write_jsonl, write_text
from .scales import SCALES, first_lines

COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    exponential: bool = False  # cut off at `high`, with a mean of a quarter of the width above low
    integer: bool = False

    def value(self, quantile: float) -> float | int:
        """The value below which this share of the distribution lies."""
        width = self.high - self.low
        if self.exponential:
            offset = -math.log1p(-quantile * -math.expm1(-4.0)) * width / 4
            return self.low + min(offset, width)
        if self.integer:
            return min(int(self.low + quantile * (width + 1)), int(self.high))
        return self.low + quantile * width


# Appendix "Hyperparameter Search" of the thesis; steps of signals other than surprisal went from
# 0.5 up as well, though its best ones lie far below: a wider range is added for them.
THESIS = {
    "step": Range(0.5, 75, exponential=True),
    "num_samples": Range(2, 50, integer=True),
    "prior_scale": Range(0.1, 0.4),
    "weight_decay": Range(1e-4, 1e-2, exponential=True),
    "dropout": Range(0.1, 0.6),
    "mc_dropout": Range(0.1, 0.6),
}
SPACES = {
    "surprisal": ("step", "dropout"),
    "nll": ("nll_step", "dropout"),
    "mc_dropout": ("small_step", "num_samples", "prior_scale", "weight_decay", "dropout",
                   "mc_dropout"),
    "ensemble": ("small_step", "num_samples", "prior_scale", "dropout"),
    "variational": ("small_step", "num_samples", "weight_decay", "mc_dropout"),
}  # fmt: skip
RANGES = THESIS | {
    "nll_step": Range(0.01, 3, exponential=True),
    "small_step": Range(1e-4, 1.0, exponential=True),
}


def settings_of(signal: str, values: dict) -> dict:
    """What the chosen values change in a baseline's settings."""
    step = next(value for name, value in values.items() if name.endswith("step"))
    # A variational RNN has masks of its own and no other dropout.
    settings = {"signal": signal, "step": step, "dropout": values.get("dropout", 0.0)}
    if "weight_decay" in values:
        settings["weight_decay"] = values["weight_decay"]
    if signal == "ensemble":
        settings["decoder_options"] = {
            "num_members": values["num_samples"], "prior_scale": values["prior_scale"],
        }  # fmt: skip
    elif signal in ("mc_dropout", "variational"):
        options = {"num_samples": values["num_samples"], "p": values["mc_dropout"]}
        if "prior_scale" in values:
            options["prior_scale"] = values["prior_scale"]
        settings["signal_options"] = options
    return settings


class Reporting(Callback):
    """Tells a study about every epoch of a trial, and stops what looks hopeless to it."""

    def __init__(self, trial: optuna.Trial):
        self.trial, self.pruned = trial, False

    def on_epoch_end(self, trainer: Trainer, row: dict) -> None:
        """Reports the epoch; the last one is never pruned."""
        self.trial.report(row["valid_perplexity"], row["epoch"])
        if row["epoch"] < trainer.config.epochs and self.trial.should_prune():
            self.pruned = True
            trainer.stop("the pruner")


def objective(trial: optuna.Trial, signal: str, base: Config, data: Path, out: Path) -> float:
    """Validation perplexity of one draw."""
    values = {}
    for name in SPACES[signal]:
        values[name] = RANGES[name].value(trial.suggest_float(name, 0.0, 1.0))
    trial.set_user_attr("values", values)
    config = base.replace(**settings_of(signal, values))
    # By its settings, so that a trial that is tried again finds what it has done.
    digest = hashlib.blake2b(json.dumps(config.to_dict()).encode(), digest_size=8).hexdigest()
    folder = out / "trials" / digest
    folder.mkdir(parents=True, exist_ok=True)
    reporting = Reporting(trial)
    options = {"callbacks": [reporting], "test": False}
    if (folder / CHECKPOINT).exists():
        trainer = Trainer.resume(folder, data, **options)
    else:
        trainer = Trainer(config, data, folder, **options)
    try:
        with open(f"{folder}.log", "a") as log, contextlib.redirect_stdout(log):
            summary = trainer.train()
    except NonFiniteError as error:
        trial.set_user_attr("diverged", str(error))
        raise optuna.TrialPruned from error
    if reporting.pruned:
        raise optuna.TrialPruned
    if not summary["finished"]:
        trial.set_user_attr("interrupted", True)
        raise Interrupted
    for name in (BEST, CHECKPOINT):  # of many trials only the numbers are of use
        (folder / name).unlink()
    return summary["valid_perplexity"]


def open_study(name: str, storage: str, seed: int | None, pruning: bool) -> optuna.Study:
    """The study of this name, made if there is none; interrupted trials are queued again."""
    pruner = (
        optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1)
        if pruning
        else optuna.pruners.NopPruner()
    )
    study = optuna.create_study(
        study_name=name,
        storage=_open_storage(storage),
        sampler=optuna.samplers.RandomSampler(seed=seed),
        pruner=pruner,
        load_if_exists=True,
    )
    trials = study.get_trials(deepcopy=False)
    alive = [_draw_of(trial) for trial in trials if trial.state != TrialState.FAIL]
    for trial in trials:
        if trial.user_attrs.get("interrupted") and trial.params not in alive:
            study.enqueue_trial(trial.params)
            alive.append(trial.params)
    return study


def _open_storage(url: str) -> RDBStorage:
    """The database at a URL, or an error of one line without the password that may be in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # A process that was killed cannot say so: its trial is queued again when its heart stops.
        try:
            return RDBStorage(
                url,
                heartbeat_interval=60,
                grace_period=180,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            )
        except (SQLAlchemyError, ImportError, OSError, LookupError) as error:
            shown, reason = re.sub(r":[^:/@]*@", ":***@", url), str(error).strip().splitlines()[0]
            raise ValueError(
                f"--storage must be the URL of a database that can be opened, got {shown!r}: "
                f"{reason}"
            ) from error


def _draw_of(trial: optuna.trial.FrozenTrial) -> dict:
    """What it has drawn, or will draw if it waits in the queue."""
    return trial.params or trial.system_attrs.get("fixed_params", {})


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "search",
        help="random search for a recoder's settings",
        description="Draws settings from the thesis's ranges, trains a few epochs with each and "
        "keeps the validation perplexities. Start it again to go on; start it several times, or on "
        "several machines with a common --storage and --out, to share the trials.",
    )
    parser.add_argument("data", type=Path, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--signal", choices=list(SPACES), default="nll", help="of the recoder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trials and results")
    parser.add_argument("--scale", choices=list(SCALES), default="smoke", help="size of the models")
    parser.add_argument("--trials", type=int, default=64, help="how many, over all processes")
    parser.add_argument("--epochs", type=int, default=4, help="per trial")
    parser.add_argument("--storage", help="database URL; search.db in --out if absent")
    parser.add_argument("--seed", type=int, help="of the draws of this process")
    parser.add_argument(
        "--pruning", action=argparse.BooleanOptionalAction, default=True,
        help="end trials that are worse than the median of the others after an epoch",
    )  # fmt: skip
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.trials < 1 or arguments.epochs < 1:
        raise ValueError("--trials and --epochs must be at least 1")
    out, scale = arguments.out, SCALES[arguments.scale]
    out.mkdir(parents=True, exist_ok=True)
    data = arguments.data
    if scale.lines is not None:
        data = first_lines(data, scale.lines, out)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = arguments.storage or f"sqlite:///{(out / 'search.db').resolve()}"
    name = f"{arguments.signal}-{arguments.scale}-{arguments.epochs}"
    study = open_study(name, storage, arguments.seed, arguments.pruning)
    base = scale.plain.replace(epochs=arguments.epochs)
    enough = MaxTrialsCallback(arguments.trials, states=COUNTED)

    def say(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        shown = f"{trial.value:.2f}" if trial.state == TrialState.COMPLETE else trial.state.name
        values = trial.user_attrs["values"]
        drawn = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        print(f"trial {trial.number}: {shown} ({drawn})", flush=True)

    done = len(study.get_trials(deepcopy=False, states=COUNTED))
    try:
        if done < arguments.trials:
            study.optimize(
                lambda trial: objective(trial, arguments.signal, base, data, out),
                callbacks=[say, enough],
            )
    except Interrupted:
        print("stopped; start the same command again to go on")
        return 130
    print(report(study, arguments.signal, out))
    return 0


def report(study: optuna.Study, signal: str, out: Path) -> str:
    """Writes `<study>.jsonl`, `.md`, `.toml` (a recipe of the best) and `.png`."""
    trials = [t for t in study.get_trials(deepcopy=False) if t.state in COUNTED]
    complete = sorted(
        (t for t in trials if t.state == TrialState.COMPLETE), key=lambda trial: trial.value
    )
    name = study.study_name
    write_jsonl(
        out / f"{name}.jsonl",
        [
            {
                "trial": t.number,
                "state": t.state.name,
                "valid_perplexity": t.value if t.state == TrialState.COMPLETE else None,
                "after_epoch": t.intermediate_values,
                **t.user_attrs["values"],
            }
            for t in trials
        ],
    )
    if not complete:
        return "No trial is complete yet.\n"
    rows = [
        {
            "validation perplexity": f"{t.value:.2f}",
            **{key: f"{value:.4g}" for key, value in t.user_attrs["values"].items()},
        }
        for t in complete[:10]
    ]
    pruned = len(trials) - len(complete)
    text = f"## Search: {name}, {len(complete)} trials, {pruned} pruned\n\n{markdown(rows)}\n"
    write_text(out / f"{name}.md", text)
    write_text(out / f"{name}.toml", recipe(settings_of(signal, complete[0].user_attrs["values"])))
    _draw(trials, signal, out / f"{name}.png")
    return text


def recipe(settings: dict) -> str:
    """TOML for `fused-recoder train --recipe`."""
    plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, options in settings.items():
        if isinstance(options, dict):
            lines += ["", f"[{key}]", *(f"{k} = {json.dumps(v)}" for k, v in options.items())]
    return "\n".join(lines) + "\n"


def _draw(trials, signal: str, path: Path) -> None:
    """Validation perplexity over every setting; pruned trials with their last value, hollow."""
    from matplotlib.ticker import NullFormatter

    names = SPACES[signal]
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            lines, columns, figsize=(3.2 * columns, 2.8 * lines), squeeze=False, sharey=True,
            layout="constrained",
        )  # fmt: skip
        for axis, name in zip(axes.flat, names, strict=False):
            for state, face in ((TrialState.COMPLETE, COLOURS[0]), (TrialState.PRUNED, "none")):
                shown = [t for t in trials if t.state == state and t.intermediate_values]
                axis.scatter(
                    [t.user_attrs["values"][name] for t in shown],
                    [t.intermediate_values[max(t.intermediate_values)] for t in shown],
                    s=22, facecolors=face, edgecolors=COLOURS[0],
                    label="complete" if state == TrialState.COMPLETE else "pruned",
                )  # fmt: skip
            axis.set_xlabel(name)
            axis.set_xlim(RANGES[name].low, RANGES[name].high)
            if RANGES[name].exponential:
                axis.set_xscale("log")
                axis.xaxis.set_minor_formatter(NullFormatter())
        for axis in list(axes.flat)[len(names) :]:
            axis.set_visible(False)
        values = [t.intermediate_values[max(t.intermediate_values)] for t in trials
                  if t.intermediate_values]  # fmt: skip
        # What diverged would press the others into a line.
        axes[0][0].set_ylim(0.98 * min(values), min(1.02 * max(values), 2 * min(values)))
        for row in axes:
            row[0].set_ylabel("validation perplexity")
        axes[0][0].legend()
        figure.savefig(path)
        plt.close(figure)
