"""Damaged files: reading one works, or ends in an error that names the file. What has a checksum is
read as it was written; a cache is as good as no cache."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fused_recoder.analysis.agreement import read_giulianelli, read_gulordava
from fused_recoder.analysis.sentences import read_sentences, tokenize
from fused_recoder.cli import FAILURES
from fused_recoder.experiments import rows
from fused_recoder.experiments.jobs import Training
from fused_recoder.experiments.scales import SCALES
from fused_recoder.experiments.study_report import report
from fused_recoder.training import Config, Corpus, Trainer, Vocabulary, build_model, load_model
from fused_recoder.training.checkpoint import load_checkpoint, save_checkpoint
from fused_recoder.training.curves import draw_curves

from . import damage

TEXT = {
    "train": "the dog saw the cat\nthe cat saw <unk> bird\n" * 30,
    "valid": "the dog saw the bird\n" * 5,
    "test": "the cat saw the dog\n" * 5,
}
SETTINGS = {
    "hidden_size": 3, "num_layers": 1, "batch_size": 4, "bptt": 9, "eval_batch_size": 2,
    "epochs": 1, "lr": 1.0, "log_every": 2, "device": "cpu", "optimizer": "adam",
}  # fmt: skip
RECIPE = """base = "thesis"
hidden_size = 4
step = "learned"
dropout = 0.1
max_vocab = 50
clip = 0.25
[step_options]
init = 0.2
[signal_options]
target = "argmax"
"""
GIULIANELLI = "the dog near the cat often saw it\tD N\tsing\t1\t6\t0\t0\n" * 3
GULORDAVA = (
    "pattern\tconstr_id\tsent_id\tcorrect_number\tform\tclass\tprefix\tlen_context\tlen_prefix\n"
    "p\t1\t0\tsing\tsees\tcorrect\tthe dog\t1\t2\np\t1\t0\tsing\tsee\twrong\tthe dog\t1\t2\n"
)


# ------------------------------------------------------------------- a folder with one of each kind


def _write_study(folder: Path) -> None:
    """Rows of finished jobs, and the folder of one that is not gathered yet."""
    lines = []
    for name, perplexity in (("baseline", 120.0), ("nll-hc-learned", 111.0)):
        for seed in (1, 2):
            numbers = {"valid_perplexity": perplexity + seed, "test_perplexity": perplexity - seed}
            row = {"name": f"{name}.seed{seed}", "variant": name, "seed": seed} | numbers
            lines.append(json.dumps(row | {"status": "finished", "config": SETTINGS}))
    folder.mkdir()
    (folder / rows.ROWS).write_text("\n".join(lines) + "\n")


@functools.cache
def workshop() -> Path:
    """Made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    (folder / "text").mkdir()
    for split, content in TEXT.items():
        (folder / "text" / f"{split}.txt").write_text(content)
    os.environ["FUSED_RECODER_CACHE"] = str(folder / "cache")
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(Config(**SETTINGS), folder / "text", folder / "run").train()
    shutil.rmtree(folder / "run" / "tensorboard", ignore_errors=True)
    best = load_model(folder / "run")
    plain = {n: t for n, t in best.model.state_dict().items() if ".step." not in n}
    torch.save(plain, folder / "plain.pt")
    save_file(plain, folder / "plain.safetensors")
    (folder / "words.txt").write_bytes(best.vocabulary.to_bytes())
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "sentences.txt").write_text("The dog saw the cat.\nthe cat saw\n")
    (folder / "sing.tsv").write_text(GIULIANELLI)
    (folder / "generated.tab").write_text(GULORDAVA)
    _write_study(folder / "study")
    job = folder / "study" / "nll-c-0.3.seed1"
    job.mkdir()
    shutil.copy(folder / "run" / "config.json", job)
    shutil.copy(folder / "run" / "metrics.jsonl", job)
    row = {"variant": "nll-c-0.3", "seed": 1, "status": "finished", "test_perplexity": 100.0}
    (job / rows.RESULT).write_text(json.dumps(row | {"valid_perplexity": 101.0}))
    return folder


# ------------------------------------------------------------------------------ what reads them


def _model(path: Path, **changes) -> dict:
    found = load_model(path, **changes)
    words = found.vocabulary and found.vocabulary.words
    return {"words": words, "config": found.config.to_dict(), **found.model.state_dict()}


def _best(folder: Path) -> dict:
    return _model(folder / "run")


def _run(folder: Path) -> dict:
    trainer = Trainer.resume(folder / "run", folder / "text")
    state = trainer.optimizer.state_dict()["state"]
    remembered = {f"{i} {key}": t for i, kept in state.items() for key, t in kept.items()}
    rest = {"progress": vars(trainer.progress), "config": trainer.config.to_dict()}
    return {**trainer.model.state_dict(), **remembered, **rest, "random": torch.get_rng_state()}


def _corpus(folder: Path) -> dict:
    corpus = Corpus(folder / "text", cache=folder / "cache").encode()
    splits = {split: torch.tensor(corpus[split]) for split in TEXT}
    return {"words": corpus.vocabulary.words, **splits}


def _recipe(folder: Path) -> None:
    config = Config.recipe(folder / "recipe.toml", device="cpu")
    try:
        build_model(config, 9)
    except ValueError as error:  # which setting it is has to do: flags may have changed it
        if not any(setting in str(error) for setting in config.to_dict()):
            raise


def _sentences(folder: Path) -> None:
    words = Vocabulary(["<eos>", "<unk>", "the", "dog", "cat", "saw"])
    for sentence in read_sentences(folder / "sentences.txt"):
        with contextlib.suppress(ValueError):  # one without words says so itself
            tokenize(sentence, words)


def _study(folder: Path) -> None:
    out = folder / "study"
    rows.gather(out)
    report(SCALES["smoke"], out, 2)
    for name in rows.read(out):
        rows.course(out, name)
        Training(name.split(".")[0], Config(**SETTINGS)).check(out)


@dataclass(frozen=True)
class Kind:
    """A file, what reads it, ways to damage it, whether it must be read as it was written, and what
    it has become part of when an error names that instead."""

    path: str
    read: Callable[[Path], Any]
    ways: tuple = ()
    sealed: bool = False
    part_of: str = "?"


def _of_checkpoint(generator: random.Random, content: bytes) -> bytes:
    """A whole checkpoint, with its checksum, but of something else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        path.write_bytes(content)
        tensors, about, vocabulary = load_checkpoint(path)
        if generator.random() < 0.5:
            tensors = damage.of_tensors(generator, tensors)
        else:
            about = damage.mutated_tree(generator, about)
        save_checkpoint(path, tensors, about, vocabulary)
        return path.read_bytes()


def _of_state_dict(generator: random.Random, content: bytes) -> bytes:
    tensors = torch.load(io.BytesIO(content), weights_only=True)
    if generator.random() < 0.3:
        tensors = damage.mutated_tree(generator, tensors)
    else:
        tensors = damage.of_tensors(generator, tensors)
    written = io.BytesIO()
    torch.save(tensors, written)
    return written.getvalue()


def _of_array(generator: random.Random, content: bytes) -> bytes:
    """The words that describe an array."""
    old, new = generator.choice(
        ((b"<i4", b"<f4"), (b"<i4", b"|O8"), (b"(", b"(9"), (b"False", b"True "), (b"i", b"u"))
    )
    return content.replace(old, new, 1)


KINDS = (
    Kind("run/best.safetensors", _best, (damage.of_safetensors,), sealed=True),
    Kind("run/checkpoint.safetensors", _run, (damage.of_safetensors,), sealed=True),
    Kind("run/best.safetensors", _best, (_of_checkpoint,)),
    Kind("run/checkpoint.safetensors", _run, (_of_checkpoint,)),
    Kind("run/metrics.jsonl", lambda f: draw_curves(f / "run"), (damage.of_json_lines,)),
    Kind("plain.pt", lambda f: _model(f / "plain.pt", signal="nll"), (_of_state_dict,)),
    Kind("plain.safetensors", lambda f: _model(f / "plain.safetensors"), (damage.of_safetensors,)),
    Kind("words.txt", lambda f: Vocabulary.load(f / "words.txt"), (damage.of_lines,)),
    Kind("text/train.txt", _corpus, (damage.of_lines,)),
    Kind("text/valid.txt", _corpus, (damage.of_lines,)),
    Kind("cache/*.npy", _corpus, (_of_array,), sealed=True),
    Kind("cache/*.vocab", _corpus, (damage.of_lines,), sealed=True),
    Kind("recipe.toml", _recipe, (damage.of_toml,)),
    Kind("sentences.txt", _sentences, (damage.of_lines,)),
    Kind("sing.tsv", lambda f: read_giulianelli(f / "sing.tsv"), (damage.of_lines,)),
    Kind("generated.tab", lambda f: read_gulordava(f / "generated.tab"), (damage.of_lines,)),
    Kind("study/rows.jsonl", _study, (damage.of_json_lines,)),
    Kind("study/nll-c-0.3.seed1/result.json", _study, (damage.of_json,), part_of=rows.ROWS),
    Kind("study/nll-c-0.3.seed1/config.json", _study, (damage.of_json,)),
    Kind("study/nll-c-0.3.seed1/metrics.jsonl", _study, (damage.of_json_lines,)),
)  # fmt: skip

# ------------------------------------------------------------------------------------------- cases


@functools.cache
def _undamaged(number: int) -> Any:
    return KINDS[number].read(fresh_copy())


def copies() -> Path:
    return workshop().with_name(f"{workshop().name}-copy")


def fresh_copy() -> Path:
    """Of the workshop, in a folder that the next one replaces."""
    shutil.rmtree(copies(), ignore_errors=True)
    return Path(shutil.copytree(workshop(), copies()))


def _make(seed: int) -> tuple[int, Path, str]:
    """Which kind it is, the damaged file, and what was done to it."""
    generator = random.Random(seed)
    number = generator.randrange(len(KINDS))
    folder = fresh_copy()
    path = generator.choice(sorted(folder.glob(KINDS[number].path)))
    return number, path, damage.damage_file(generator, path, KINDS[number].ways)


def prepare() -> None:
    """What all cases need."""
    workshop()


def describe(seed: int) -> str:
    number, path, how = _make(seed)
    return f"{KINDS[number].path}: {how} (see {path})"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return a == b


def _complaint(kind: Kind, name: str, error: Exception) -> str:
    """What is wrong with an error; nothing if it names the file."""
    if name not in str(error) and kind.part_of not in str(error):
        return "the file is not named"
    # But for a folder that is in its place.
    in_vain = kind.path.startswith("cache/") and not isinstance(error, OSError)
    return "a cache is no reason to fail" if in_vain else ""


def check(seed: int) -> None:
    number, path, how = _make(seed)
    kind = KINDS[number]
    try:
        found = kind.read(copies())
    except FAILURES as error:
        if complaint := _complaint(kind, path.name, error):
            raise AssertionError(f"{kind.path}: {how}: {complaint}") from error
        return
    if kind.sealed and not _same(found, _undamaged(number)):
        raise AssertionError(f"{kind.path}: {how}: something else was read")
