"""How well a language model predicts a text, and loading the model to ask that of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import fused_recoder as fr

from .checkpoint import checkpoint_header, load_checkpoint, tensors_under
from .config import Config
from .data import IGNORE, Batches, Vocabulary, onto
from .distributed import Processes
from .files import errors_naming
from .model import build_model, load_weights, read_plain_weights

BEST, CHECKPOINT = "best.safetensors", "checkpoint.safetensors"


@dataclass(frozen=True)
class Evaluation:
    tokens: int
    nll: float  # mean, in nats
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll)

    @property
    def bits_per_word(self) -> float:
        return self.nll / math.log(2)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict:
        return {
            "tokens": self.tokens,
            "nll": self.nll,
            "perplexity": self.perplexity,
            "bits_per_word": self.bits_per_word,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
        }


def perplexity(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: fr.RecodingLanguageModel,
    tokens: np.ndarray,
    *,
    batch_size: int = 10,
    bptt: int = 35,
    seed: int = 1,
    processes: Processes | None = None,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Mean nll of a text, every token once, with states carried (and recoded) throughout.

    The rows of a batch are shared among the processes. Signals that sample draw from `seed`, so
    the result is reproducible and training goes on as if nothing had been evaluated.
    `check` is called before every window; what it raises ends the evaluation.
    """
    processes = processes or Processes()
    share = (processes.rank, processes.world)
    batches = Batches(tokens, batch_size, bptt, part=share, keep_all=True)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    start, count, hx = time.perf_counter(), 0, None
    nll = torch.zeros((), dtype=torch.float64, device=device)  # its sum, which is read at the end
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed + processes.rank)
            for window in range(len(batches) if batches.rows else 0):
                check()
                inputs, targets = batches[window]
                out = model(*onto(device, inputs, targets), hx)
                nll += out.nll.double().sum()
                count += (targets != IGNORE).sum().item()
                hx = out.hx
    finally:
        model.train(was_training)
    total, count = processes.sum(nll.item(), count)
    return Evaluation(int(count), total / count, time.perf_counter() - start)


@dataclass(frozen=True)
class Loaded:
    model: fr.RecodingLanguageModel
    config: Config
    vocabulary: Vocabulary | None  # None: the file had weights only
    about: dict  # what the checkpoint says about its training


def load_model(path: str | Path, **changes) -> Loaded:
    """A trained model: of a run's folder (the best one), a checkpoint, or a plain state dict.

    `changes` are settings to replace: `signal="nll", step=0.3` puts a recoder on a plain model,
    `signal=None` takes it off a recoding one.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (BEST, CHECKPOINT) if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds neither {BEST} nor {CHECKPOINT}")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"no model {path}")
    if path.suffix == ".safetensors" and checkpoint_header(path) is not None:
        tensors, about, vocabulary = load_checkpoint(path)
        config, size = Config.from_dict(about["config"]), len(vocabulary)
        weights = tensors_under("model.", tensors) or tensors  # of a run in progress, or its best
    else:
        config, size, weights = read_plain_weights(path)
        vocabulary, about = None, {}
    config = config.replace(**changes)
    model = build_model(config, size, dataset_size=about.get("train_tokens"))
    with errors_naming(path):
        load_weights(model, weights, other_recoder=vocabulary is None or bool(changes))
    return Loaded(model, config, vocabulary, about)
