"""How large the models of a reproduction are, and on how much text they are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..training import Config
from ..training.data import SPLITS
from ..training.files import atomic_file


@dataclass(frozen=True)
class Scale:
    plain: Config  # the baseline
    seeds: int = 4  # runs per model
    lines: int | None = None  # only so many lines of the training text; a tenth of it otherwise
    samples: tuple[int, ...] = (1, 5, 10, 25, 50)  # K of MC Dropout
    members: tuple[int, ...] = (1, 5, 10, 25)  # K of ensembles
    default_samples: int = 15  # K where it is not what is studied
    default_members: int = 15
    sampling: dict = field(default_factory=dict)  # further options of MC Dropout


SCALES = {
    # The thesis's own: 2x650, 8 epochs, batches of 64.
    "full": Scale(Config.recipe("thesis")),
    # Half an hour for a plain model on one core. The learning rate falls to zero within the few
    # epochs there are, so that models are compared at the end of their training.
    "small": Scale(
        Config(
            signal=None,
            hidden_size=200,
            num_layers=2,
            dropout=0.2,
            batch_size=20,
            bptt=35,
            lr=20.0,
            clip=0.25,
            epochs=5,
            schedule="cosine",
        ),
        samples=(1, 3, 5),
        members=(1, 2, 3),
        default_samples=3,
        default_members=2,
        sampling={"mask": "shared"},
    ),
    # An hour or two: tied, regularised, trained until little is gained any more.
    "tied": Scale(Config.recipe("tied-small"), seeds=3),
    # Minutes per run: to look around before something larger is tried.
    "tiny": Scale(
        Config(
            signal=None,
            hidden_size=64,
            num_layers=1,
            dropout=0.1,
            batch_size=20,
            bptt=35,
            lr=20.0,
            clip=0.25,
            epochs=3,
            schedule="cosine",
        ),
        samples=(1, 3, 5),
        members=(1, 2, 3),
        default_samples=3,
        default_members=2,
        sampling={"mask": "shared"},
    ),
    # Seconds: shows that everything runs, says nothing about language.
    "smoke": Scale(
        Config(
            signal=None,
            hidden_size=24,
            num_layers=2,
            dropout=0.1,
            batch_size=10,
            bptt=20,
            lr=10.0,
            clip=0.25,
            epochs=2,
            schedule="cosine",
            max_vocab=400,
            log_every=4,
        ),
        seeds=2,
        lines=400,
        samples=(1, 5),
        members=(1, 3),
        default_samples=3,
        default_members=2,
        sampling={"mask": "shared"},
    ),
}


def first_lines(data: Path, lines: int, out: Path) -> Path:
    """A folder with the first `lines` of the training text and a tenth as many of the others."""
    folder = out / f"first-{lines}-lines"
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        count = lines if split == "train" else max(1, lines // 10)
        with open(data / f"{split}.txt", "rb") as text:
            head = [line for _, line in zip(range(count), text, strict=False)]
        path = folder / f"{split}.txt"
        content = b"".join(head)
        if not path.exists() or path.read_bytes() != content:
            with atomic_file(path) as file:
                file.write(content)
    return folder
