"""`fused-recoder analyze`: sentences, word by word."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from .compare import SentenceNumbers, parse_models, read_runs, write_tsv
from .figures import draw_sentence
from .page import write_page
from .sentences import read_sentences


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "analyze",
        help="surprisal and recoding of sentences, word by word",
        description="Reads sentences with trained models and writes, into one folder, a table per "
        "model (TSV), figures (PNG, SVG) and a page to look at (index.html).",
    )
    parser.add_argument(
        "models", nargs="+", metavar="model",
        help="[name=]run[,run...][@where]: runs of one model with different seeds; where it "
        "recodes: all (default), none, or words by their numbers from 1, e.g. @2,5",
    )  # fmt: skip
    parser.add_argument("--sentences", type=Path, help="file with one sentence per line")
    parser.add_argument(
        "--sentence", action="append", default=[], help="a sentence; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--figures", type=int, default=20, help="figures of the first so many")
    parser.add_argument("--seed", type=int, default=1, help="of signals that sample")
    return parser


def run(arguments: argparse.Namespace) -> int:
    sentences = list(arguments.sentence)
    if arguments.sentences:
        sentences += read_sentences(arguments.sentences)
    if not sentences:
        raise ValueError("nothing to read: give --sentences or --sentence")
    models = parse_models(arguments.models)
    numbers = {model.name: read_runs(model, sentences, arguments.seed) for model in models}

    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for model in models:
        write_tsv(out / f"{model.file_name}.tsv", numbers[model.name])
        print(f"{model.name}: {_in_short(numbers[model.name])}")
    for i in range(min(arguments.figures, len(sentences))):
        draw_sentence(
            {name: found[i] for name, found in numbers.items()}, out / f"sentence-{i + 1:03d}.png"
        )
    write_page(out / "index.html", numbers)
    print(f"{out / 'index.html'}")
    return 0


def _in_short(sentences: list[SentenceNumbers]) -> str:
    words = sum(len(s.tokens) for s in sentences)
    unknown = sum(len(s.unknown) for s in sentences)
    whole = sum(not s.unknown for s in sentences)
    text = f"{words} words, {unknown} unknown, {whole} of {len(sentences)} sentences fully known"
    if unknown == words:
        return text
    bits = sum(np.nansum(s.mean("surprisal")) for s in sentences) / (words - unknown)
    return f"{text}; {bits:.3f} bits per known word"
