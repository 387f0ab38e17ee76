"""The training loop: truncated BPTT over a text, with everything needed to stop and go on.

    config = Config.recipe("zaremba-small", signal="nll", step=0.3, states="c")
    summary = Trainer(config, "my_text", "runs/mine").train()

A run writes into its folder alone: `checkpoint.safetensors` (where it is, with all it needs to go
on bit by bit), `best.safetensors` (the model of the best epoch), `metrics.jsonl`, `tensorboard/`,
`config.json`, and at the end `summary.json` and `curves.png`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import fused_recoder as fr

from .checkpoint import (
    load_checkpoint,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    save_checkpoint,
)
from .config import Config
from .curves import draw_curves
from .data import SPLITS, Batches, Corpus, Vocabulary
from .distributed import Processes
from .evaluation import BEST, CHECKPOINT, Evaluation, evaluate, perplexity
from .files import atomic_file, only_process_in
from .model import build_model, build_optimizer, choose_device, load_weights
from .reporting import Metrics, ProgressBar, clock, table
from .schedule import Schedule

# What may change when a run is resumed: nothing that its state depends on.
CHANGEABLE = {
    "epochs", "lr", "clip", "log_every", "checkpoint_seconds", "eval_batch_size", "device",
}  # fmt: skip


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is infinite or not a number."""


class _Stopped(Exception):
    """A signal asked the run to end."""


@dataclass
class Progress:
    """How far a run is. Plain numbers, so that JSON keeps them exactly."""

    epoch: int = 0  # epochs done
    window: int = 0  # windows of the current epoch done
    step: int = 0  # windows of all epochs done
    seconds: float = 0.0  # spent on them
    epoch_nll: float = 0.0  # summed over the time steps of the epoch, mean over rows
    epoch_time: int = 0  # those time steps
    row_nll: float = 0.0  # the same since the last row of metrics
    row_time: int = 0
    lr_factor: float = 1.0
    best_nll: float | None = None  # on the validation text
    best_epoch: int | None = None
    history: list[dict] = field(default_factory=list)  # one row per epoch


class Trainer:
    """Trains one language model on one corpus, into one folder.

    Args:
        config: all settings.
        data: folder with train.txt, valid.txt and test.txt.
        out: the run's folder; must not hold a run already (see `resume`).
        processes: those that train together; this one alone by default.
    """

    def __init__(
        self,
        config: Config,
        data: str | Path,
        out: str | Path,
        *,
        processes: Processes | None = None,
        _vocabulary: Vocabulary | None = None,
    ):
        self.config, self.out = config, Path(out)
        self.processes = processes or Processes(device=choose_device(config.device))
        if _vocabulary is None and (self.out / CHECKPOINT).exists():
            raise FileExistsError(
                f"{str(self.out)!r} holds a run already: resume it, or name another folder"
            )
        if config.batch_size % self.processes.world:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes "
                f"({self.processes.world}), got {config.batch_size}"
            )
        with self.processes.first_goes_first():  # the others find its work in the cache
            self.corpus = corpus = Corpus(
                data,
                vocabulary=_vocabulary,
                max_vocab=config.max_vocab,
                min_count=config.min_count,
            ).encode()
        part = (self.processes.rank, self.processes.world)
        self.batches = Batches(corpus["train"], config.batch_size, config.bptt, part=part)
        self.train_tokens = len(corpus["train"]) - 1

        torch.manual_seed(config.seed)
        self.model = build_model(config, len(corpus.vocabulary), dataset_size=self.train_tokens)
        self.model.to(self.processes.device).train()
        self.optimizer = build_optimizer(self.model, config)
        self.schedule = Schedule(config, len(self.batches))
        self.progress = Progress()
        self.hx: tuple[Tensor, Tensor] | None = None  # carried states, [L, B, H] each
        torch.manual_seed(config.seed + self.processes.rank)  # every process its own masks

        self.stopped_by: signal.Signals | None = None
        self._metrics: Metrics | None = None
        self._metrics_bytes: int | None = None  # of the checkpoint this run was resumed from
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._row_seconds, self._row_step = 0.0, 0  # where the last row of metrics ended

    # Steps

    def step(self) -> dict | None:
        """One window: forward, backward, update. Returns a row of metrics when one is due."""
        config, progress, start = self.config, self.progress, time.monotonic()
        inputs, targets = self.batches[progress.window]
        due = (progress.step + 1) % config.log_every == 0
        device, length = self.processes.device, len(inputs)
        lr = self.schedule.lr(progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        self.optimizer.zero_grad()
        # The trace costs another decoding of every step: only where it is shown.
        trace = due and config.signal is not None
        loss, out = self.objective(inputs.to(device), targets.to(device), trace)
        # loss is a mean over time and rows; Zaremba et al. sum over time.
        (loss * length if config.loss == "sum" else loss).backward()
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.processes.average_(gradients)
        norm = nn.utils.get_total_norm(gradients)
        values = torch.stack([loss.detach(), norm, out.nll.detach().mean()])
        loss_value, norm_value, nll = values.tolist()
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise NonFiniteError(self._where_not_finite(loss_value, norm_value, lr))
        if config.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, config.clip, norm)
        self.optimizer.step()
        self.hx = tuple(state.detach() for state in out.hx)

        progress.window += 1
        progress.step += 1
        progress.epoch_nll += nll * length
        progress.epoch_time += length
        progress.row_nll += nll * length
        progress.row_time += length
        progress.seconds += time.monotonic() - start
        return self._row(lr, norm_value, out.trace) if due else None

    def objective(self, tokens: Tensor, targets: Tensor, return_trace: bool = False):
        """What is minimised, and all else that the model says of the window."""
        out = self.model(tokens, targets, self.hx, return_trace=return_trace)
        anchor_loss = getattr(self.model.decoder, "anchor_loss", None)
        return out.loss if anchor_loss is None else out.loss + anchor_loss(), out

    @property
    def _tokens_per_step(self) -> float:
        """On average: the last window of an epoch may be shorter."""
        return self.config.batch_size * self.batches.inputs.shape[1] / len(self.batches)

    def _row(self, lr: float, norm: float, trace: fr.RecodingTrace | None) -> dict:
        """The metrics since the last row."""
        progress = self.progress
        (nll,) = self.processes.sum(progress.row_nll)
        nll /= self.processes.world * progress.row_time
        seconds = progress.seconds - self._row_seconds
        steps = progress.step - self._row_step
        total = self.config.epochs * len(self.batches)
        row = {
            "epoch": progress.epoch + progress.window / len(self.batches),
            "loss": nll,
            "perplexity": perplexity(nll),
            "lr": lr,
            "gradient_norm": norm,
            "ms_per_step": 1000 * seconds / steps,
            "tokens_per_second": steps * self._tokens_per_step / seconds,
            "seconds_left": seconds / steps * (total - progress.step),
        }
        if trace is not None:
            row["delta"] = trace.delta.mean().item()
            row["delta_after"] = trace.delta_after.mean().item()
            for name, values in (
                ("step_size", trace.step_size),
                ("recoding_gradient_norm", trace.grad_norm),
            ):
                means = values.flatten(2).mean(2).tolist()  # [L, S]
                for layer, by_state in enumerate(means):
                    for state, mean in zip(self.model.rnn.states, by_state, strict=True):
                        row[f"{name}/{state}{layer}"] = mean
        self._row_seconds, self._row_step = progress.seconds, progress.step
        progress.row_nll, progress.row_time = 0.0, 0
        return row

    def _where_not_finite(self, loss: float, norm: float, lr: float) -> str:
        progress = self.progress
        bad = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not p.grad.isfinite().all()
        ]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        gradients = f"; gradients that are not finite: {', '.join(bad[:3])}{more}" if bad else ""
        return (
            f"the loss is {loss} and the norm of its gradient {norm} in epoch "
            f"{progress.epoch + 1}, window {progress.window + 1} of {len(self.batches)} (step "
            f"{progress.step + 1}, lr {lr:g}{gradients}). {self._what_is_kept()} A smaller lr, "
            "clip or recoding step may help."
        )

    def _what_is_kept(self) -> str:
        if self._saved_step is None:
            return "Nothing was saved yet."
        return f"The last good state, of step {self._saved_step}, is in {self.out / CHECKPOINT}."

    # The run

    def train(self) -> dict:
        """Trains to the end, or until a signal asks to stop. Returns the summary."""
        first = self.processes.is_first
        if first:
            self._make_folder()
        self.processes.wait()
        with only_process_in(self.out) if first else nullcontext(), self._listening():
            if first:
                self._metrics = Metrics(
                    self.out, keep_bytes=self._metrics_bytes, step=self.progress.step
                )
            self.bar = ProgressBar(self.config, len(self.batches), self.progress.step, shown=first)
            try:
                return self._train()
            except _Stopped:
                return self._stop()
            finally:
                self.bar.close()
                if self._metrics is not None:
                    self._metrics.close()

    def _train(self) -> dict:
        if self._saved_step is None:
            self._save()
        self._saved_at = time.monotonic()
        while self.progress.epoch < self.config.epochs:
            self._train_epoch()
            self._end_epoch()
        return self._finish()

    def _train_epoch(self) -> None:
        progress = self.progress
        while progress.window < len(self.batches):
            row = self.step()
            self.bar.advance(progress.epoch + 1)
            if row is not None:
                self.bar.show(progress.epoch + 1, progress.window, row)
                self._write("train", row)
            due = time.monotonic() - self._saved_at >= self.config.checkpoint_seconds
            # Processes must agree, or one would wait for the others for ever.
            stop, save = self.processes.max(self.stopped_by is not None, due)
            if stop:
                raise _Stopped
            if save:
                self._save()

    def _end_epoch(self) -> None:
        progress = self.progress
        (nll,) = self.processes.sum(progress.epoch_nll)
        nll /= self.processes.world * progress.epoch_time
        valid = self._evaluate("valid")
        if not math.isfinite(valid.nll):
            raise NonFiniteError(
                f"the loss on the validation text is {valid.nll} after epoch {progress.epoch + 1}. "
                + self._what_is_kept()
            )
        improved = progress.best_nll is None or valid.nll < progress.best_nll
        row = {
            "epoch": progress.epoch + 1,
            "train_perplexity": perplexity(nll),
            "valid_perplexity": valid.perplexity,
            "lr": self.schedule.lr(progress.step - 1),
            "seconds": progress.seconds,
            "best": improved,
        }
        progress.history.append(row)
        self._write("epoch", row)
        self.bar.say(
            f"epoch {row['epoch']}/{self.config.epochs} done | train ppl "
            f"{row['train_perplexity']:.2f} | valid ppl {row['valid_perplexity']:.2f}"
            f"{' (best)' if improved else ''} | {clock(progress.seconds)}"
        )
        progress.epoch += 1
        progress.window, progress.epoch_nll, progress.epoch_time, self.hx = 0, 0.0, 0, None
        self.schedule.end_epoch(progress.epoch, improved)
        progress.lr_factor = self.schedule.factor
        # First this, then the checkpoint: killed in between, the epoch's end is repeated.
        if improved and self._guarded_write(BEST, model_tensors(self.model)):
            progress.best_nll, progress.best_epoch = valid.nll, progress.epoch
        self._save()

    def _evaluate(self, split: str) -> Evaluation:
        def check():
            if self.stopped_by is not None and self.processes.world == 1:
                raise _Stopped

        return evaluate(
            self.model,
            self.corpus[split],
            batch_size=self.config.eval_batch_size,
            bptt=self.config.bptt,
            seed=self.config.seed,
            processes=self.processes,
            check=check,
        )

    def _finish(self) -> dict:
        progress = self.progress
        if progress.best_epoch is None:
            raise OSError(f"no model could be written into {str(self.out)!r}; see above")
        if self.processes.is_first:
            load_weights(self.model, load_checkpoint(self.out / BEST)[0])
        if self.processes.world > 1:
            for tensor in model_tensors(self.model).values():
                torch.distributed.broadcast(tensor, 0)
        test = self._evaluate("test")
        summary = {
            "finished": True,
            "epochs": progress.epoch,
            "steps": progress.step,
            "best_epoch": progress.best_epoch,
            "valid_perplexity": perplexity(progress.best_nll),
            "test_perplexity": test.perplexity,
            "test": test.to_dict(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "train_seconds": progress.seconds,
            "train_tokens_per_second": progress.step * self._tokens_per_step / progress.seconds,
        }
        self._write("test", {"perplexity": test.perplexity, "epoch": progress.best_epoch})
        if self.processes.is_first:
            try:
                with atomic_file(self.out / "summary.json") as file:
                    content = json.dumps(summary | {"history": progress.history}, indent=1)
                    file.write(content.encode())
                draw_curves(self.out)
            except OSError as error:
                print(f"Summary and curves cannot be written: {error}", file=sys.stderr)
            self.bar.say(self._summary_table(summary))
        return summary

    def _summary_table(self, summary: dict) -> str:
        rows = [
            {
                "epoch": f"{row['epoch']}{'*' if row['epoch'] == summary['best_epoch'] else ' '}",
                "lr": f"{row['lr']:.4g}",
                "train ppl": f"{row['train_perplexity']:.2f}",
                "valid ppl": f"{row['valid_perplexity']:.2f}",
                "time": clock(row["seconds"]),
            }
            for row in self.progress.history
        ]
        return (
            f"\n{table(rows)}\n\n"
            f"best epoch {summary['best_epoch']}: valid perplexity "
            f"{summary['valid_perplexity']:.2f}, test perplexity {summary['test_perplexity']:.2f} "
            f"({summary['test']['bits_per_word']:.3f} bits per word); "
            f"{summary['train_tokens_per_second']:,.0f} tokens/s in training\n"
            f"model: {self.out / BEST}, curves: {self.out / 'curves.png'}"
        )

    def _stop(self) -> dict:
        saved = self._save()
        if self.processes.is_first:
            name = self.stopped_by.name if self.stopped_by else "another process"
            where = f"step {self.progress.step} (epoch {self.progress.epoch + 1})"
            if not saved:
                raise OSError(
                    f"stopped by {name} at {where}, but the state could not be saved; the last "
                    f"good checkpoint is that of step {self._saved_step}"
                )
            world = self.processes.world
            command = f"torchrun --nproc-per-node {world} -m fused_recoder"
            self.bar.say(
                f"Stopped by {name} at {where}; everything is saved. Go on with:\n"
                f"  {command if world > 1 else 'fused-recoder'} train --out {self.out} --resume"
            )
        return {"finished": False, "steps": self.progress.step}

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the current step; a second SIGINT at once."""

        def remember(number, frame):
            self.stopped_by = signal.Signals(number)
            # torchrun passes on a SIGINT that the terminal has sent already.
            if number == signal.SIGINT and self.processes.world == 1:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, remember)
        except ValueError:
            pass  # not in the main thread: somebody else listens
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # Files

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for abandoned in self.out.glob("*.tmp"):
                abandoned.unlink()
            with atomic_file(self.out / "config.json") as file:
                file.write(json.dumps(self.config.to_dict(), indent=1).encode())
        except OSError as error:
            raise OSError(f"cannot write into {str(self.out)!r}: {error}") from error

    def _write(self, kind: str, row: dict) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, self.progress.step, row)

    def _save(self) -> bool:
        """All that is needed to go on. False, and a message, if it cannot be written."""
        tensors = {f"model.{n}": t for n, t in model_tensors(self.model).items()}
        tensors |= {f"optimizer.{n}": t for n, t in optimizer_tensors(self.optimizer).items()}
        for rank, state in enumerate(self.processes.gather(torch.get_rng_state())):
            tensors[f"random.cpu.{rank}"] = state
        if self.processes.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.processes.device)
            for rank, part in enumerate(self.processes.gather(state)):
                tensors[f"random.cuda.{rank}"] = part
        if self.hx is not None:
            for name, state in zip("hc", self.hx, strict=True):
                for rank, part in enumerate(self.processes.gather(state)):
                    tensors[f"state.{name}.{rank}"] = part.clone()
        saved = self._guarded_write(CHECKPOINT, tensors)
        self._saved_at = time.monotonic()
        if saved:
            self._saved_step = self.progress.step
        return saved

    def _guarded_write(self, name: str, tensors: dict[str, Tensor]) -> bool:
        failed = self.processes.is_first and not self._try_to_write(name, tensors)
        return not self.processes.max(failed)[0]  # what follows must not differ among processes

    def _try_to_write(self, name: str, tensors: dict[str, Tensor]) -> bool:
        about = {
            "config": self.config.to_dict(),
            "progress": dataclasses.asdict(self.progress),
            "processes": self.processes.world,
            "data": str(self.corpus.folder.resolve()),
            "digests": {split: self.corpus.digest(split) for split in SPLITS},
            "train_tokens": self.train_tokens,
            "metrics_bytes": self._metrics.sync() if self._metrics is not None else 0,
        }
        try:
            save_checkpoint(self.out / name, tensors, about, self.corpus.vocabulary)
        except OSError as error:
            print(
                f"Cannot write {self.out / name}: {error}. The file that was there before is kept, "
                "training goes on.",
                file=sys.stderr,
                flush=True,
            )
            return False
        return True

    @classmethod
    def resume(
        cls,
        out: str | Path,
        data: str | Path | None = None,
        *,
        processes: Processes | None = None,
        **changes,
    ) -> Trainer:
        """The run in a folder, where its checkpoint left it.

        Args:
            data: the folder of the text, if it has moved; it must be the same text.
            changes: settings to change, of those in `CHANGEABLE`.
        """
        path = Path(out) / CHECKPOINT
        tensors, about, vocabulary = load_checkpoint(path)
        config = Config.from_dict(about["config"])
        wanted = config.replace(**changes)
        was = {n: v for n, v in config.to_dict().items() if v != getattr(wanted, n)}
        if fixed := sorted(set(was) - CHANGEABLE):
            made_with = ", ".join(f"{name}={was[name]!r}" for name in fixed)
            raise ValueError(f"a resumed run cannot change {fixed}: {path} has {made_with}")
        config = wanted
        world = processes.world if processes else 1
        if world != about["processes"]:
            raise ValueError(
                f"{path} is of {about['processes']} processes: states are kept per process, so "
                f"resume with as many, not with {world}"
            )
        trainer = cls(
            config, data or about["data"], out, processes=processes, _vocabulary=vocabulary
        )
        for split in SPLITS:
            if trainer.corpus.digest(split) != about["digests"][split]:
                raise ValueError(
                    f"{trainer.corpus.path(split)} is not the text that {path} was trained with"
                )
        trainer._load(tensors, about)
        return trainer

    def _load(self, tensors: dict[str, Tensor], about: dict) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        rank, device = self.processes.rank, self.processes.device
        load_weights(self.model, part("model."))
        load_optimizer_tensors(self.optimizer, part("optimizer."))
        self.progress = Progress(**about["progress"])
        self.schedule.factor = self.progress.lr_factor
        if f"state.h.{rank}" in tensors:
            self.hx = tuple(tensors[f"state.{name}.{rank}"].to(device) for name in "hc")
        torch.set_rng_state(tensors[f"random.cpu.{rank}"])
        if f"random.cuda.{rank}" in tensors and device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"random.cuda.{rank}"], device)
        self._metrics_bytes = about["metrics_bytes"]
        self._saved_step = self.progress.step
        self._row_seconds, self._row_step = self.progress.seconds, self.progress.step
