"""A text small enough to train on in a test, and the settings of a model of its size."""

import json
import random
from pathlib import Path

TINY = {
    "hidden_size": 10, "num_layers": 2, "batch_size": 4, "bptt": 7, "eval_batch_size": 3,
    "epochs": 2, "lr": 2.0, "clip": 0.5, "log_every": 1, "checkpoint_seconds": 1e9, "device": "cpu",
}  # fmt: skip
# What two runs with the same history have in common; times are not among it.
EXACT = ("loss", "gradient_norm", "lr", "delta", "delta_after", "valid_perplexity", "perplexity")


def write_text(folder: Path, *, train: int = 150, other: int = 30) -> Path:
    """Lines in which a word depends on the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, lines in (("train", train), ("valid", other), ("test", other)):
        with open(folder / f"{split}.txt", "w") as file:
            for _ in range(lines):
                word, words = draw.randrange(20), []
                for _ in range(draw.randint(3, 8)):
                    words.append(f"w{word}")
                    word = (2 * word + draw.randint(1, 3)) % 20
                file.write(" ".join(words) + "\n")
    return folder


def exact_metrics(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = ("kind", "step", *EXACT)
    return [{k: v for k, v in r.items() if k in kept or "/" in k} for r in rows]
