"""Builds the programs of tests/emu once more, linked with the interpreter of this folder, and the
PTX that nvcc makes of the same kernels.

`python tests/ptx/build.py` builds by hand; the tests call build()."""

from __future__ import annotations

import sys
from pathlib import Path

from ninja import ninja_syntax

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for running it by hand
from emu import build as emu  # noqa: E402

from tools import cuda_toolkit, nvcc_check  # noqa: E402

ARCHITECTURE = "sm_80"
# The compiler's own fused operations would not round as the instructions do.
FLAGS = [*emu.COMMON, "-O2", "-march=native", "-ffp-contract=off"]
NVCC_FLAGS = [*nvcc_check.COMPILER_FLAGS, f"-arch={ARCHITECTURE}", "-lineinfo"]
SOURCES = {  # of the PTX that a program of tests/emu needs
    "kernels": nvcc_check.SOURCE,
    "detectors": HERE / "detectors.cu",
    "instructions": HERE / "instructions.cu",
}


def missing() -> str | None:
    """Why nothing can be built here, in words."""
    if cuda_toolkit.find_nvcc() is None:
        return "there is no nvcc (set CUDA_HOME or pip install nvidia-cuda-nvcc)"
    return emu.missing()


def _has_checks(path: Path) -> bool:
    return "check_" in path.name and "check_main" not in path.name


def _write_rules(folder: Path, programs: dict[str, list[Path]]) -> None:
    include = cuda_toolkit.find_include()
    flags = [*FLAGS, f"-isystem {include}", f"-isystem {include / 'cccl'}", f"-I{emu.HERE}",
             f"-I{nvcc_check.SOURCE.parent}"]  # fmt: skip
    nvcc_flags = [*NVCC_FLAGS, f"-I{emu.HERE}", f"-I{nvcc_check.SOURCE.parent}"]
    with open(folder / "build.ninja", "w") as file:
        writer = ninja_syntax.Writer(file)
        depfile = {"depfile": "$out.d", "deps": "gcc"}
        writer.rule("compile", f"g++ {' '.join(flags)} -MMD -MF $out.d -c $in -o $out", **depfile)
        writer.rule("link", "g++ $in -o $out")
        writer.rule(
            "ptx",
            f"{cuda_toolkit.find_nvcc()} {' '.join(nvcc_flags)} -MMD -MF $out.d -ptx $in -o $out",
            **depfile,
        )
        interpreter = []
        for source in sorted(HERE.glob("*.cpp")):
            built = writer.build(f"{source.stem}.o", "compile", str(source))
            if not source.stem.startswith("check_"):
                interpreter += built
        # The same main() with other checks.
        programs["instructions"] = [
            *(path for path in programs["kernels"] if not _has_checks(path)),
            Path("check_instructions.o"),
        ]
        for name, objects in programs.items():
            writer.build(name, "link", [*map(str, objects), *interpreter])
            writer.build(f"{name}.ptx", "ptx", str(SOURCES[name]))


def build() -> Path:
    """The folder with the programs and their PTX, up to date."""
    folder = emu.ROOT / "build" / "ptx"
    programs = emu.objects_of("plain")
    emu.run_ninja(folder, lambda: _write_rules(folder, programs))
    return folder


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"cannot build: {reason}")
    print(build())
