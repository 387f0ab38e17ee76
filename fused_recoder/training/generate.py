"""`fused-recoder generate`: text that a trained model goes on with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import fused_recoder as fr

from ..analysis.sentences import tokenize
from ..generation import Sampling, generate
from .evaluation import load_run
from .model import choose_device
from .tokenizer import Tokenizer

BETWEEN = "-" * 20


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "generate",
        help="text from a trained model",
        description="Goes on with a prompt, one line per sentence. Every word that was chosen is "
        "read by the model, and its recoder, as if a text had it.",
    )
    parser.add_argument("model", type=Path, help="a run's folder or a .safetensors file")
    parser.add_argument("--prompt", default="", help="how the text begins; a new line if absent")
    parser.add_argument("--length", type=int, default=100, help="tokens to choose (100)")
    parser.add_argument("--batch", type=int, default=1, help="texts, side by side (1)")
    parser.add_argument(
        "--temperature", type=float, default=1.0,
        help="below 1 bolder, above 1 more varied; 0 takes the most probable token (1)",
    )  # fmt: skip
    parser.add_argument("--top-k", type=int, help="choose from so many most probable tokens")
    parser.add_argument(
        "--top-p", type=float, help="choose from the fewest tokens that have this probability"
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (1)")
    parser.add_argument("--one-line", action="store_true", help="stop where the line ends (<eos>)")
    return parser


def run(arguments: argparse.Namespace, **changes) -> int:
    """Prints the texts; `changes` are settings of the model to replace."""
    loaded, vocabulary = load_run(arguments.model, **changes)
    model = loaded.model.to(choose_device(loaded.config.device)).eval()
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    texts = continuations(
        model, vocabulary, arguments.prompt, arguments.length, sampling,
        batch=arguments.batch, seed=arguments.seed, one_line=arguments.one_line,
    )  # fmt: skip
    print(f"\n{BETWEEN}\n".join(texts))
    return 0


@torch.no_grad()
def continuations(
    model: fr.RecodingLanguageModel,
    vocabulary: Tokenizer,
    prompt: str,
    length: int,
    sampling: Sampling,
    *,
    batch: int = 1,
    seed: int = 1,
    one_line: bool = False,
) -> list[str]:
    """Texts that begin with a prompt, after `<eos>`."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    words = tokenize(prompt, vocabulary) if prompt.strip() else []
    ids = [i for word in words for i in word.ids]
    device = model.encoder.weight.device
    read = torch.tensor([vocabulary.eos, *ids], device=device).unsqueeze(1).expand(-1, batch)
    generator = torch.Generator(device).manual_seed(seed)
    eos = vocabulary.eos if one_line else None
    chosen = generate(model, read, length, sampling, eos=eos, generator=generator)
    shown = tqdm(chosen, total=length, unit="tok", leave=False, disable=not sys.stderr.isatty())
    rows = torch.stack(list(shown), 1).tolist()  # [B, length]
    return [vocabulary.decode(ids + row).rstrip("\n") for row in rows]
