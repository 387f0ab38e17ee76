"""The training loop: truncated BPTT over a text, with everything needed to stop and go on.

    config = Config.recipe("zaremba-small", signal="nll", step=0.3, states="c")
    summary = Trainer(config, "my_text", "runs/mine").train()

A run writes into its folder alone: `checkpoint.safetensors` (where it is, with all it needs to go
on bit by bit), `best.safetensors` (the model of the best epoch), `metrics.jsonl`, `tensorboard/`,
`config.json`, and at the end `summary.json` and `curves.png`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fused_recoder as fr

from ..cuda_graph import StepOutput, refusal
from .callbacks import Callback
from .checkpoint import load_checkpoint, model_tensors
from .config import Config
from .data import SPLITS, Batches, Corpus, Vocabulary, onto
from .distributed import Processes
from .evaluation import Evaluation, evaluate, perplexity
from .files import errors_naming, require
from .model import build_model, build_optimizer, choose_device, load_weights
from .progress import Progress
from .reporting import ProgressBar, epoch_line, summary_table, trace_columns
from .run_folder import RunFolder
from .schedule import Schedule
from .state import States, load_state_tensors, state_tensors
from .stop_signals import StopSignals
from .unread import StepNumbers, Unread

# What may change when a run is resumed: nothing that its state depends on.
CHANGEABLE = {
    "epochs", "lr", "clip", "log_every", "checkpoint_seconds", "eval_batch_size", "device", "graph",
}  # fmt: skip


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is infinite or not a number."""


class _Stopped(Exception):
    """A signal or a callback asked the run to end."""


class Trainer:
    """Trains one language model on one corpus, into one folder.

    Args:
        config: all settings.
        data: folder with train.txt, valid.txt and test.txt.
        out: the run's folder; must not hold a run already (see `resume`).
        callbacks: told about every step and epoch, in this order.
        test: whether the best model reads the test text at the end.
        processes: those that train together; this one alone by default.
    """

    def __init__(
        self,
        config: Config,
        data: str | Path,
        out: str | Path,
        *,
        callbacks: Sequence[Callback] = (),
        test: bool = True,
        processes: Processes | None = None,
        _vocabulary: Vocabulary | None = None,
    ):
        self.config, self.callbacks, self.test = config, list(callbacks), test
        self.processes = processes or Processes(device=choose_device(config.device))
        self.folder = RunFolder(out, writes=self.processes.is_first)
        if _vocabulary is None:
            self.folder.refuse_another_run()
        self.batches = self._read_text(data, _vocabulary)
        self.model, self.optimizer = self._build()
        self.schedule = Schedule(config, len(self.batches))
        self.progress = Progress()
        self.hx: States | None = None  # carried from window to window
        self.unread = Unread(self.processes.device)
        if self.unread.costs_waiting:
            self.optimizer.found_inf = self.unread.halt
        on_gpu = self.processes.device.type == "cuda"
        self.replays = on_gpu and config.graph and refusal(self.model) is None
        self._graph: fr.GraphedStep | None = None
        self._signals = StopSignals(impatient=True)
        self._stop_reason: str | None = None
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()

    def _read_text(self, data: str | Path, vocabulary: Vocabulary | None) -> Batches:
        config, processes = self.config, self.processes
        if config.batch_size % processes.world:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes ({processes.world}), "
                f"got {config.batch_size}"
            )
        limits = {"max_vocab": config.max_vocab, "min_count": config.min_count}
        with processes.first_goes_first():  # the others find its work in the cache
            self.corpus = Corpus(data, vocabulary=vocabulary, **limits).encode()
        self.train_tokens = len(self.corpus["train"]) - 1
        part = (processes.rank, processes.world)
        return Batches(self.corpus["train"], config.batch_size, config.bptt, part=part)

    def _build(self) -> tuple[fr.RecodingLanguageModel, torch.optim.Optimizer]:
        config = self.config
        torch.manual_seed(config.seed)
        words = len(self.corpus.vocabulary)
        model = build_model(config, words, dataset_size=self.train_tokens)
        model.to(self.processes.device).train()
        optimizer = build_optimizer(model, config)
        torch.manual_seed(config.seed + self.processes.rank)  # every process its own masks
        return model, optimizer

    @classmethod
    def resume(
        cls,
        out: str | Path,
        data: str | Path | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        test: bool = True,
        processes: Processes | None = None,
        **changes: object,
    ) -> Trainer:
        """The run in a folder, where its checkpoint left it.

        Args:
            data: the folder of the text, if it has moved; it must be the same text.
            callbacks, test, processes: as for a new run.
            changes: settings to change, of those in `CHANGEABLE`.
        """
        path = RunFolder(out).checkpoint
        tensors, about, vocabulary = load_checkpoint(path)
        world = processes.world if processes else 1
        _check_is_of_a_run(path, tensors, about, world)
        config = _resumed_config(path, Config.from_dict(about["config"]), changes)
        given = {"callbacks": callbacks, "test": test, "processes": processes}
        trainer = cls(config, data or about["data"], out, **given, _vocabulary=vocabulary)
        for split in SPLITS:
            if trainer.corpus.digest(split) != about["digests"][split]:
                raise ValueError(
                    f"{trainer.corpus.path(split)} is not the text that {path} was trained with"
                )
        with errors_naming(path):
            trainer._go_on_from(tensors, about)
        return trainer

    def _go_on_from(self, tensors: dict[str, Tensor], about: dict) -> None:
        self.hx = load_state_tensors(tensors, self.model, self.optimizer, self.processes)
        self.progress = Progress(**about["progress"])
        self.schedule.factor = self.progress.lr_factor
        self.folder.metrics_bytes = about["metrics_bytes"]
        self._saved_step = self.progress.step

    # Steps

    def step(self) -> dict | None:
        """One window: forward, backward, update. Returns a row of metrics when one is due."""
        config, progress = self.config, self.progress
        due = (progress.step + 1) % config.log_every == 0
        ends_epoch = progress.window + 1 == len(self.batches)
        with progress.timed():
            tokens, targets = onto(self.processes.device, *self.batches[progress.window])
            # The trace costs another decoding of every step: only where it is shown.
            out = self._backward(tokens, targets, due and config.signal is not None)
            numbers = self._update(out, due or ends_epoch or not self.unread.costs_waiting)
            self.hx = out.hx
            progress.count(len(tokens))
        return self._row(numbers, out.trace) if due else None

    def objective(
        self, tokens: Tensor, targets: Tensor, return_trace: bool = False
    ) -> tuple[Tensor, fr.LanguageModelOutput]:
        """What is minimised, and all else that the model says of the window."""
        out = self.model(tokens, targets, self.hx, return_trace=return_trace)
        return self._minimised(out), out

    def _minimised(self, out: fr.LanguageModelOutput) -> Tensor:
        anchor_loss = getattr(self.model.decoder, "anchor_loss", None)
        loss = out.loss if anchor_loss is None else out.loss + anchor_loss()
        # It is a mean over time and rows; Zaremba et al. sum over time.
        return loss * len(out.nll) if self.config.loss == "sum" else loss

    def _backward(self, tokens: Tensor, targets: Tensor, traced: bool) -> fr.LanguageModelOutput:
        """Leaves the gradients of a window; what it returns has no history."""
        if self.replays and not traced and len(tokens) == self.config.bptt:
            loss, nll, hx = self._replay(tokens, targets)
            return fr.LanguageModelOutput(loss, nll, hx, None, None)
        self.optimizer.zero_grad()
        loss, out = self.objective(tokens, targets, traced)
        loss.backward()
        hx = tuple(state.detach() for state in out.hx)
        return out._replace(loss=loss.detach(), nll=out.nll.detach(), hx=hx)

    def _replay(self, tokens: Tensor, targets: Tensor) -> StepOutput:
        """The same from a CUDA graph, which is captured anew if the model's options change."""
        if self._graph is None or not self._graph.is_current:
            self._graph = None  # room for the new one
            self._graph = fr.GraphedStep(self.model, tokens, targets, objective=self._minimised)
        return self._graph(tokens, targets, self.hx)

    def _update(self, out: fr.LanguageModelOutput, look: bool) -> StepNumbers | None:
        """Moves the weights by their gradients; returns this step's numbers if it shall `look`."""
        progress, parameters = self.progress, list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.processes.average_(gradients)
        lr = self.schedule.lr(progress.step)
        norms = torch.stack(torch._foreach_norm(gradients))
        about = (progress.step, len(out.nll), lr)
        norm = self.unread.add(*about, out.loss, out.nll.mean(), norms)
        numbers = self._look()[-1] if look else None
        if self.config.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return numbers

    def _look(self) -> list[StepNumbers]:
        """Waits for the device and takes over what its last steps have found."""
        steps = self.unread.read()
        for numbers in steps:
            if not numbers.finite:
                raise NonFiniteError(self._where_not_finite(numbers))
            self.progress.add(numbers.nll, numbers.length)
        self.unread.clear()
        return steps

    @property
    def _tokens_per_step(self) -> float:
        """On average: the last window of an epoch may be shorter."""
        return self.config.batch_size * self.batches.inputs.shape[1] / len(self.batches)

    def _row(self, latest: StepNumbers, trace: fr.RecodingTrace | None) -> dict:
        """The metrics since the last row."""
        progress = self.progress
        (nll,) = self.processes.sum(progress.row_nll)
        nll /= self.processes.world * progress.row_time
        steps, seconds = progress.since_last_row()
        progress.begin_row()
        total = self.config.epochs * len(self.batches)
        row = {
            "epoch": progress.epoch + progress.window / len(self.batches),
            "loss": nll,
            "perplexity": perplexity(nll),
            "lr": latest.lr,
            "gradient_norm": latest.norm,
            "ms_per_step": 1000 * seconds / steps,
            "tokens_per_second": steps * self._tokens_per_step / seconds,
            "seconds_left": seconds / steps * (total - progress.step),
        }
        return row if trace is None else row | trace_columns(trace, self.model.rnn.states)

    def _where_not_finite(self, at: StepNumbers) -> str:
        named = [name for name, p in self.model.named_parameters() if p.grad is not None]
        bad = [name for name, x in zip(named, at.norms, strict=True) if not math.isfinite(x)]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        gradients = f"; gradients that are not finite: {', '.join(bad[:3])}{more}" if bad else ""
        epoch, window = divmod(at.step, len(self.batches))
        return (
            f"the loss is {at.loss} and the norm of its gradient {at.norm} in epoch {epoch + 1}, "
            f"window {window + 1} of {len(self.batches)} (step {at.step + 1}, lr {at.lr:g}"
            f"{gradients}). {self._what_is_kept()} A smaller lr, clip or recoding step may help."
        )

    def _what_is_kept(self) -> str:
        if self._saved_step is None:
            return "Nothing was saved yet."
        return f"The last good state, of step {self._saved_step}, is in {self.folder.checkpoint}."

    # The run

    def train(self) -> dict:
        """Trains to the end, or until a signal or a callback asks to stop. Returns the summary."""
        self._stop_reason = None
        # torchrun passes on a SIGINT that the terminal has sent already: two are no impatience.
        self._signals = StopSignals(impatient=self.processes.world == 1)
        new = self._saved_step is None
        with self.folder.opened(self.config, self.progress.step, new=new), self._signals:
            self.processes.wait()
            shown = self.processes.is_first
            self.bar = ProgressBar(self.config, len(self.batches), self.progress.step, shown=shown)
            try:
                summary = self._train()
            except _Stopped:
                summary = self._end_early()
            finally:
                self.bar.close()
            for callback in self.callbacks:
                callback.on_end(self, summary)
        return summary

    def stop(self, reason: str = "a callback") -> None:
        """Asks the run to end after the current step; `reason` is who or what it was stopped by."""
        self._stop_reason = reason

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that ended the last `train()`, if one did."""
        return self._signals.received

    @property
    def _asked_to_stop(self) -> bool:
        return self._signals.received is not None or self._stop_reason is not None

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
                self.folder.write_row("train", progress.step, row)
            for callback in self.callbacks:
                callback.on_step(self, row)
            due = time.monotonic() - self._saved_at >= self.config.checkpoint_seconds
            # Processes must agree, or one would wait for the others for ever.
            stop, save = self.processes.max(self._asked_to_stop, due)
            if stop:
                raise _Stopped
            if save:
                self._save()

    def _end_epoch(self) -> None:
        progress = self.progress
        valid = self.evaluate("valid")
        if not math.isfinite(valid.nll):
            raise NonFiniteError(
                f"the loss on the validation text is {valid.nll} after epoch {progress.epoch + 1}. "
                + self._what_is_kept()
            )
        improved = progress.best_nll is None or valid.nll < progress.best_nll
        row = self._epoch_row(valid, improved)
        progress.history.append(row)
        self.folder.write_row("epoch", progress.step, row)
        self.bar.say(epoch_line(row, self.config.epochs))
        progress.end_epoch()
        self.hx = None
        self.schedule.end_epoch(progress.epoch, improved)
        progress.lr_factor = self.schedule.factor
        # First this, then the checkpoint: killed in between, the epoch's end is repeated.
        if improved and self._write(self.folder.best, model_tensors(self.model)):
            progress.best_nll, progress.best_epoch = valid.nll, progress.epoch
        self._save()
        for callback in self.callbacks:
            callback.on_epoch_end(self, row)
        if self.processes.max(self._asked_to_stop)[0]:
            raise _Stopped

    def _epoch_row(self, valid: Evaluation, improved: bool) -> dict:
        progress = self.progress
        (nll,) = self.processes.sum(progress.epoch_nll)
        nll /= self.processes.world * progress.epoch_time
        return {
            "epoch": progress.epoch + 1,
            "train_perplexity": perplexity(nll),
            "valid_perplexity": valid.perplexity,
            "lr": self.schedule.lr(progress.step - 1),
            "seconds": progress.seconds,
            "best": improved,
        }

    def evaluate(self, split: str, model: fr.RecodingLanguageModel | None = None) -> Evaluation:
        """How well the model as it is now, or another one, predicts a split of the text."""

        def check() -> None:
            if self._asked_to_stop and self.processes.world == 1:
                raise _Stopped

        return evaluate(
            self.model if model is None else model,
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
            raise OSError(f"no model could be written into {str(self.folder.path)!r}; see above")
        summary = {
            "finished": True,
            "epochs": progress.epoch,
            "steps": progress.step,
            "best_epoch": progress.best_epoch,
            "valid_perplexity": perplexity(progress.best_nll),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "train_seconds": progress.seconds,
            "train_tokens_per_second": progress.step * self._tokens_per_step / progress.seconds,
        }
        if self.test:
            test = self.evaluate("test", self._best_model())
            summary |= {"test_perplexity": test.perplexity, "test": test.to_dict()}
            row = {"perplexity": test.perplexity, "epoch": progress.best_epoch}
            self.folder.write_row("test", progress.step, row)
        self.folder.write_summary(summary | {"history": progress.history})
        self.bar.say(summary_table(summary, progress.history, self.folder.path))
        return summary

    def _best_model(self) -> fr.RecodingLanguageModel:
        """A copy: the run's own weights are those of its last step, and saved as such."""
        self.optimizer.zero_grad()  # room for it
        model = copy.deepcopy(self.model)
        if self.processes.is_first:
            load_weights(model, load_checkpoint(self.folder.best)[0])
        if self.processes.world > 1:
            for tensor in model_tensors(model).values():
                torch.distributed.broadcast(tensor, 0)
        return model

    def _end_early(self) -> dict:
        """Saves, and says how to go on."""
        saved = self._save()
        signal_name = self.stopped_by.name if self.stopped_by else None
        by = signal_name or self._stop_reason or "another process"
        where = f"step {self.progress.step} (epoch {self.progress.epoch + 1})"
        if not saved and self.processes.is_first:
            raise OSError(
                f"stopped by {by} at {where}, but the state could not be saved; the last "
                f"good checkpoint is that of step {self._saved_step}"
            )
        world = self.processes.world
        command = f"torchrun --nproc-per-node {world} -m fused_recoder"
        self.bar.say(
            f"Stopped by {by} at {where}; everything is saved. Go on with:\n"
            f"  {command if world > 1 else 'fused-recoder'} train --out {self.folder.path} --resume"
        )
        return {"finished": False, "steps": self.progress.step, "stopped_by": by}

    # Checkpoints

    def _save(self) -> bool:
        """All that is needed to go on. False, and a message, if it cannot be written."""
        with self.progress.timed():
            self._look()
        tensors = state_tensors(self.model, self.optimizer, self.hx, self.processes)
        saved = self._write(self.folder.checkpoint, tensors)
        self._saved_at = time.monotonic()
        if saved:
            self._saved_step = self.progress.step
        return saved

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> bool:
        about = {
            "config": self.config.to_dict(),
            "progress": dataclasses.asdict(self.progress),
            "processes": self.processes.world,
            "data": str(self.corpus.folder.resolve()),
            "digests": {split: self.corpus.digest(split) for split in SPLITS},
            "train_tokens": self.train_tokens,
        }
        written = self.folder.write_checkpoint(path, tensors, about, self.corpus.vocabulary)
        return not self.processes.max(not written)[0]  # processes must agree on what follows


def _check_is_of_a_run(path: Path, tensors: dict[str, Tensor], about: dict, world: int) -> None:
    """That a checkpoint has what a run of so many processes needs to go on."""
    require(path, about, ["progress", "processes", "data", "digests", "metrics_bytes"])
    if world != about["processes"]:
        raise ValueError(
            f"{path} is of {about['processes']} processes: states are kept per process, so "
            f"resume with as many, not with {world}"
        )
    require(path, tensors, [f"random.cpu.{rank}" for rank in range(world)])


def _resumed_config(path: Path, config: Config, changes: dict) -> Config:
    """The settings of a checkpoint with changes, which must be ones that its state allows."""
    wanted = config.replace(**changes)
    was = {n: v for n, v in config.to_dict().items() if v != getattr(wanted, n)}
    if fixed := sorted(set(was) - CHANGEABLE):
        made_with = ", ".join(f"{name}={was[name]!r}" for name in fixed)
        raise ValueError(f"a resumed run cannot change {fixed}: {path} has {made_with}")
    return wanted
