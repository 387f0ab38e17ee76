"""Independent jobs in folders of their own, shared among processes, resumable.

A job is one training run, or one measurement of trained models. When it is done it has a row in
`rows.jsonl` (rows.py); `work` does what is not done and not claimed by another process, in order.
Kill it at any time and start it again, on as many cores or machines (with a common disk) as there
are.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..training import Config, NonFiniteError, Trainer
from ..training.evaluation import BEST, CHECKPOINT
from ..training.files import atomic_file, errors_naming, fcntl, read_json
from .rows import CONFIG, RESULT, ROWS, gather, result

WAIT = 5.0  # seconds between two looks at what other processes have done


class Interrupted(Exception):
    """A signal asked the work to end; all of it can be resumed."""


@dataclass(frozen=True)
class Training:
    """One run of the trainer; `variant` is what runs of other seeds have in common."""

    variant: str
    config: Config
    needs = ()

    @property
    def name(self) -> str:
        return f"{self.variant}.seed{self.config.seed}"

    @property
    def about(self) -> dict:
        return {"variant": self.variant, "seed": self.config.seed}

    def check(self, out: Path) -> None:
        """That the run in its row or folder is one of these settings."""
        path, row = out / self.name / CONFIG, result(out, self.name) or {}
        found = {out / ROWS: row["config"]} if "config" in row else {}
        if path.exists():
            found[path] = read_json(path)
        for source, settings in found.items():
            with errors_naming(source):
                run = Config.from_dict(settings)
            if run == self.config:
                continue
            raise ValueError(
                f"{str(out)!r} holds a run {self.name!r} with other settings: choose another folder"
            )

    def run(self, out: Path, data: Path) -> dict:
        folder = out / self.name
        if (folder / CHECKPOINT).exists():
            trainer = Trainer.resume(folder, data)
        else:
            trainer = Trainer(self.config, data, folder)
        with open(folder.parent / f"{self.name}.log", "a") as log, contextlib.redirect_stdout(log):
            try:
                summary = trainer.train()
            except NonFiniteError as error:  # a result too: this variant does not train
                return {"status": "diverged", "error": str(error)}
        if not summary["finished"]:
            raise Interrupted
        kept = ("valid_perplexity", "test_perplexity", "best_epoch", "epochs", "parameters")
        return {
            "status": "finished",
            **{name: summary[name] for name in kept},
            "train_seconds": summary["train_seconds"],
            "train_tokens_per_second": summary["train_tokens_per_second"],
            "test_tokens_per_second": summary["test"]["tokens_per_second"],
        }

    def tidy(self, out: Path) -> None:
        """The best model stays; after the result is written, or a kill in between costs a run."""
        (out / self.name / CHECKPOINT).unlink(missing_ok=True)


@dataclass(frozen=True)
class Measurement:
    """A function of trained models: `measure(folders, data)` gives numbers by name."""

    name: str
    about: dict
    needs: tuple[str, ...]  # names of training jobs
    measure: Callable[[list[Path], Path], dict]

    def check(self, out: Path) -> None:
        """Its models are checked as jobs of their own."""

    def run(self, out: Path, data: Path) -> dict:
        return {"status": "finished", **self.measure([out / name for name in self.needs], data)}

    def tidy(self, out: Path) -> None:
        """Leaves nothing behind."""


Job = Training | Measurement


def work(
    jobs: Callable[[], Sequence[Job]],
    out: Path,
    data: Path,
    *,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Does all jobs that `jobs()` names; asked again after each, as later ones may depend on it.

    Returns the results, in the order of the jobs. A job whose models could not be trained, or are
    no longer in their folders, is left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    while True:
        gather(out)
        wanted = list(jobs())
        if len({job.name for job in wanted}) < len(wanted):
            raise ValueError("two jobs have the same name")
        for job in wanted:
            job.check(out)
        open_jobs = [job for job in wanted if result(out, job.name) is None and _can(job, out)]
        if not open_jobs:
            found = [result(out, job.name) for job in wanted]
            return [row for row in found if row is not None]
        if not any(_try(job, out, data, say) for job in open_jobs):
            time.sleep(WAIT)


def _can(job: Job, out: Path) -> bool:
    """False if what it needs has failed, or is gone: results may be kept without their models."""
    needed = {name: row for name in job.needs if (row := result(out, name)) is not None}
    return all(
        row["status"] == "finished" and (out / name / BEST).exists() for name, row in needed.items()
    )


def _try(job: Job, out: Path, data: Path, say) -> bool:
    """Does the job, unless another process has it or what it needs is not done."""
    if any(result(out, name) is None for name in job.needs):
        return False
    folder = out / job.name
    folder.mkdir(exist_ok=True)
    with _claim(folder) as claimed:
        if not claimed or result(out, job.name) is not None or (folder / RESULT).exists():
            return claimed
        say(f"{time.strftime('%H:%M:%S')} {job.name} ...")
        row = {"name": job.name, **job.about, **job.run(out, data)}
        with atomic_file(folder / RESULT) as file:
            file.write(json.dumps(row, indent=1).encode())
        gather(out)
        job.tidy(out)
        numbers = {k: v for k, v in row.items() if k.endswith("perplexity")}
        say(
            f"{time.strftime('%H:%M:%S')} {job.name} {row['status']} "
            + " ".join(f"{name} {value:.2f}" for name, value in numbers.items())
        )
    return True


@contextmanager
def _claim(folder: Path) -> Iterator[bool]:
    """Whether this process may have the job. The claim ends with the process, however it ends."""
    if fcntl is None:  # Windows: one process only
        yield True
        return
    with open(folder / ".claim", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
