"""What a run says while it goes on: a progress bar or log lines, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

import fused_recoder as fr

from .config import Config
from .evaluation import BEST


class Metrics:
    """Numbers by step, in `metrics.jsonl` and for TensorBoard.

    A full disk must not end the training: what cannot be written is said once and left out.
    """

    def __init__(self, folder: Path, *, keep_bytes: int | None = None, step: int = 0):
        """A resumed run keeps the bytes its checkpoint knows of and repeats what came after."""
        self.path = folder / "metrics.jsonl"
        if keep_bytes is not None and self.path.exists():
            os.truncate(self.path, min(keep_bytes, self.path.stat().st_size))
        self.file = open(self.path, "ab" if keep_bytes is not None else "wb")  # noqa: SIM115
        self.board = _tensorboard(folder / "tensorboard", step)
        self.failed = False

    def write(self, kind: str, step: int, values: dict) -> None:
        line = json.dumps({"kind": kind, "step": step} | values)
        try:
            self.file.write(line.encode() + b"\n")
            self.file.flush()
            if self.board is not None:
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self.board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            self._report(error)

    def sync(self) -> int:
        """Puts all of it on the disk; returns how many bytes that is."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            if self.board is not None:
                self.board.flush()
        except OSError as error:
            self._report(error)
        return os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        try:
            self.file.close()
            if self.board is not None:
                self.board.close()
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self.failed:
            print(f"Metrics cannot be written, training goes on: {error}", file=sys.stderr)
        self.failed = True


def _tensorboard(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # optional
        return None
    # After a crash TensorBoard hides what an earlier process wrote beyond this step.
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


class ProgressBar:
    """A bar where a terminal shows it; in a log file a line for every row of metrics."""

    def __init__(self, config: Config, steps_per_epoch: int, step: int, *, shown: bool = True):
        self.epochs, self.steps_per_epoch, self.shown = config.epochs, steps_per_epoch, shown
        self.tokens_per_step = config.batch_size * config.bptt
        self.bar = None
        if shown and sys.stderr.isatty():
            self.bar = tqdm(
                total=self.epochs * steps_per_epoch * self.tokens_per_step,
                initial=step * self.tokens_per_step,
                unit="tok",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
            )

    def advance(self, epoch: int) -> None:
        if self.bar is not None:
            self.bar.set_description(f"epoch {epoch}/{self.epochs}", refresh=False)
            self.bar.update(self.tokens_per_step)

    def show(self, epoch: int, window: int, row: dict) -> None:
        """The latest row of metrics."""
        if self.bar is not None:
            numbers = {"loss": f"{row['loss']:.3f}", "ppl": f"{row['perplexity']:.1f}"}
            self.bar.set_postfix(numbers | {"lr": f"{row['lr']:.3g}"}, refresh=False)
            return
        self.say(
            f"epoch {epoch}/{self.epochs} | {window:5d}/{self.steps_per_epoch} | "
            f"lr {row['lr']:.3g} | {row['ms_per_step']:.1f} ms/step | loss {row['loss']:.3f} | "
            f"ppl {row['perplexity']:8.2f} | {row['tokens_per_second']:,.0f} tok/s | "
            f"left {clock(row['seconds_left'])}"
        )

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        if self.shown:
            print(text, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def trace_columns(trace: fr.RecodingTrace, states: Sequence[str]) -> dict[str, float]:
    """What the recoder did in a window, in columns of a row of metrics: means over its tokens."""
    columns = {"delta": trace.delta.mean().item(), "delta_after": trace.delta_after.mean().item()}
    for name, values in (
        ("step_size", trace.step_size),
        ("recoding_gradient_norm", trace.grad_norm),
    ):
        means = values.flatten(2).mean(2).tolist()  # [L, S]
        for layer, by_state in enumerate(means):
            for state, mean in zip(states, by_state, strict=True):
                columns[f"{name}/{state}{layer}"] = mean
    return columns


def epoch_line(row: dict, epochs: int) -> str:
    """What is said of an epoch when it is over."""
    train, valid = (_perplexities(row, split) for split in ("train", "valid"))
    return (
        f"epoch {row['epoch']}/{epochs} done | train ppl {train} | "
        f"valid ppl {valid}{' (best)' if row['best'] else ''} | {clock(row['seconds'])}"
    )


def _perplexities(row: dict, split: str) -> str:
    """Per token, and per word where tokens are not words."""
    per_token = row[f"{split}_perplexity"]
    per_word = row.get(f"{split}_perplexity_per_word", per_token)  # older runs have words alone
    text = f"{per_token:.2f}"
    return text if per_word == per_token else f"{text}, {per_word:.2f} per word"


def summary_table(summary: dict, history: list[dict], folder: Path) -> str:
    """What is said of a run when it is over."""
    rows = [
        {
            "epoch": f"{row['epoch']}{'*' if row['epoch'] == summary['best_epoch'] else ' '}",
            "lr": f"{row['lr']:.4g}",
            "train ppl": _perplexities(row, "train"),
            "valid ppl": _perplexities(row, "valid"),
            "time": clock(row["seconds"]),
        }
        for row in history
    ]
    test = ""
    if "test" in summary:
        bits = summary["test"]["bits_per_word"]
        test = f", test perplexity {_perplexities(summary, 'test')} ({bits:.3f} bits per word)"
    return (
        f"\n{table(rows)}\n\n"
        f"best epoch {summary['best_epoch']}: valid perplexity "
        f"{_perplexities(summary, 'valid')}{test}; "
        f"{summary['train_tokens_per_second']:,.0f} tokens/s in training\n"
        f"model: {folder / BEST}, curves: {folder / 'curves.png'}"
    )


def table(rows: list[dict[str, str]]) -> str:
    """Rows of the same columns, right-aligned under their names."""
    names = list(rows[0])
    widths = {n: max(len(n), *(len(row[n]) for row in rows)) for n in names}
    lines = ["  ".join(n.rjust(widths[n]) for n in names)]
    lines.append("  ".join("-" * widths[n] for n in names))
    lines += ["  ".join(row[n].rjust(widths[n]) for n in names) for row in rows]
    return "\n".join(lines)
