"""For the first person with a GPU: builds, tests and measures; leaves one Markdown file to send.

`make gpu-report`. What fails is reported, and the rest is done all the same. The file is complete
after every part: an interrupted run leaves what it has found.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "gpu-report.md"
FOLDER = ROOT / "build" / "gpu-report"  # of the benchmarks
BUILT = ".venv/.built"
# Each against the plain LM of PyTorch in the same precision.
EXPERIMENTS = ["train thesis", "train small", "train MC Dropout", "evaluate thesis", "read"]
PRECISIONS = ["float32", "tf32", "bfloat16"]
NO_GPU = "not run: there is no CUDA device here"
LINES, LINES_OF_A_FAILURE = 10, 60  # of what a command says


@dataclass
class Part:
    """A command, and what came of it."""

    title: str
    command: list[str]
    needs_gpu: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    leaves: Path | None = None  # Markdown that is shown instead of the end of its output
    result: str = "not reached"
    text: str = ""

    def run(self, has_gpu: bool) -> None:
        """Never raises: what goes wrong is a result."""
        if self.needs_gpu and not has_gpu:
            self.result = NO_GPU
            return
        start = time.monotonic()
        code, output = execute(self.command, self.environment)
        said = output.strip().splitlines()
        try:
            self.text = last(said, LINES) if self.leaves is None else below_ours(self.leaves)
        except OSError as error:
            code, said = code or 1, [*said, str(error)]
        self.result = f"done in {(time.monotonic() - start) / 60:.1f} minutes"
        if code != 0:
            self.result = f"**failed** with exit code {code}"
            self.text = last(said, LINES_OF_A_FAILURE)

    def __str__(self) -> str:
        command = " ".join(["python", *self.command[1:]] if self.runs_python else self.command)
        return f"\n## {self.title}\n\n`{command}`: {self.result}\n\n{self.text}".rstrip()

    @property
    def runs_python(self) -> bool:
        return self.command[0] == sys.executable


def execute(command: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a command, which may not be there."""
    try:
        result = subprocess.run(
            command, cwd=ROOT, env=os.environ | (environment or {}), text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        return 127, str(error)
    return result.returncode, result.stdout


def last(lines: list[str], count: int) -> str:
    return "\n".join(["```", *lines[-count:], "```"])


def below_ours(page: Path) -> str:
    """A page with its headings two levels further down."""
    return re.sub("^#", "###", page.read_text(), flags=re.M)


def parts(has_gpu: bool) -> list[Part]:
    """All that is done, in order."""
    python = [sys.executable, "-m"]
    forced = {"FORCE_CUDA": "1"} if has_gpu else {}  # a missing toolkit is an error then
    found = [
        Part("Hardware", ["nvidia-smi"]),
        Part("Build", ["make", "--no-print-directory", BUILT], False, forced),
        Part("Environment", [*python, "fused_recoder", "env"], needs_gpu=False),
        Part("Tests", [*python, "pytest", "-m", "gpu", "-rfE"]),
    ]
    for precision in PRECISIONS:
        folder = FOLDER / precision
        command = [
            *python, "bench", "--device", "cuda", "--precision", precision, "--no-compiled",
            "--only", *EXPERIMENTS, "--out", str(folder.relative_to(ROOT)),
        ]  # fmt: skip
        found.append(Part(f"Benchmarks in {precision}", command, leaves=folder / "results.md"))
    return found


def markdown(found: list[Part], gpu: str | None) -> str:
    """The report."""
    version = execute(["git", "describe", "--always", "--dirty"])[1].strip()
    lines = [
        "# fused_recoder on a GPU", "",
        f"GPU: {gpu}." if gpu else "**There is no CUDA device here. Nothing below ran on a GPU.**",
        f"Version {version}, torch {torch.__version__} (CUDA {torch.version.cuda}), Python "
        f"{platform.python_version()}, {platform.platform()}.", "",
        "| part | result |", "|---|---|", *(f"| {part.title} | {part.result} |" for part in found),
    ]  # fmt: skip
    return "\n".join([*lines, *(str(part) for part in found if part.text)]) + "\n"


def has_kernels() -> bool:
    """Whether what is installed was built with CUDA."""
    ask = "from fused_recoder import _build; raise SystemExit(not _build.has_cuda_kernels())"
    return execute([sys.executable, "-c", ask])[0] == 0


def main() -> int:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if gpu and not has_kernels():
        (ROOT / BUILT).unlink(missing_ok=True)  # it was built for the CPU
    found = parts(gpu is not None)
    REPORT.parent.mkdir(exist_ok=True)
    for part in (progress := tqdm(found)):
        progress.set_description(part.title)
        part.run(gpu is not None)
        REPORT.write_text(markdown(found, gpu))
    print(f"The report is in {REPORT.relative_to(ROOT)}. Please send it.")
    return 1 if any("failed" in part.result for part in found) else 0


if __name__ == "__main__":
    sys.exit(main())
