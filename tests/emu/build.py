"""Builds the executables of this folder: the shim and the CUDA kernels, compiled by g++.

`python tests/emu/build.py [VARIANT...]` builds by hand; the tests call build(). Ninja decides by
time stamps and commands what has to be compiled again."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import ninja
from ninja import ninja_syntax

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))  # for running it by hand
from tools import cuda_toolkit  # noqa: E402

# What kernels and tests are compiled with. ThreadSanitizer must not see the shim's own switches.
VARIANTS = {
    "plain": ["-O2"],
    "address": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-O1", "-g1", "-fsanitize=thread", "-DEMU_TSAN=1"],
    "coverage": ["-O0", "--coverage"],
    "module": ["-O2", "-fPIC"],
}
SHIM_FLAGS = {"thread": ["-O2", "-g", "-DEMU_TSAN=1"], "coverage": ["-O2"]}
LINK_FLAGS = {"thread": ["-fsanitize=thread"], "module": ["-shared"]}
COMMON = ["-std=c++20", "-Wall", "-Wextra", "-Werror=switch", "-fno-strict-aliasing",
          "-Wno-unknown-pragmas", "-Wno-psabi"]  # fmt: skip
SHIM = ["scheduler.cpp", "fiber.cpp"]
KERNELS = "csrc/kernels/cuda/kernels.cu"
CPU_KERNELS = "csrc/kernels/cpu/kernels.cpp"
BACKEND = "backend.so"  # of the variant "module": see backend.cpp


def missing() -> str | None:
    """Why nothing can be built here, in words."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the shim switches fibers on x86-64 only, this is {platform.machine()}"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if cuda_toolkit.find_include() is None:
        return "no CUDA headers: set CUDA_HOME or pip install nvidia-cuda-runtime nvidia-cuda-crt"
    return None


def _torch_includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return [f"-isystem {path}" for path in include_paths()]


def _extension() -> str:
    """The extension whose kernels are to be replaced: the one that this process imports."""
    from fused_recoder import _C

    return _C.__file__


def _write_rules(folder: Path, variant: str) -> None:
    include = cuda_toolkit.find_include()
    flags = [*COMMON, f"-isystem {include}", f"-isystem {include / 'cccl'}", f"-I{HERE}",
             f"-I{ROOT / 'csrc/kernels/cuda'}"]  # fmt: skip
    own = VARIANTS[variant]
    with open(folder / "build.ninja", "w") as file:
        writer = ninja_syntax.Writer(file)
        writer.rule(
            "compile",
            "g++ $flags -MMD -MF $out.d -x c++ -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
        )
        link = LINK_FLAGS.get(variant, own)
        writer.rule("link", f"g++ {' '.join(link)} $in -o $out")

        def compile(source: Path, own: list[str]) -> str:
            built = str(Path(*source.relative_to(ROOT).parts).with_suffix(".o")).replace("/", "_")
            writer.build(built, "compile", str(source),
                         variables={"flags": " ".join([*flags, *own])})  # fmt: skip
            return built

        shim = [compile(HERE / name, SHIM_FLAGS.get(variant, own)) for name in SHIM]
        if variant == "module":
            objects = [compile(HERE / "backend.cpp", [*own, *_torch_includes()]),
                       compile(ROOT / KERNELS, own), *shim]  # fmt: skip
            writer.build(BACKEND, "link", [*objects, _extension()])
            return
        writer.build("detectors", "link", [compile(HERE / "test_detectors.cpp", own), *shim])
        checks = [compile(path, own) for path in sorted(HERE.glob("check_*.cpp"))]
        kernels = compile(ROOT / KERNELS, own)
        cpu = compile(ROOT / CPU_KERNELS, ["-O2", "-DFR_ISA=baseline", "-DFR_VECTOR_BYTES=16"])
        writer.build("kernels", "link", [*checks, kernels, cpu, *shim])


def build(variant: str, *executables: str) -> Path:
    """The folder with the executables of a variant, up to date. All of them if none is named."""
    folder = ROOT / "build" / "emu" / variant
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        _write_rules(folder, variant)
        result = subprocess.run(
            [os.path.join(ninja.BIN_DIR, "ninja"), "-C", str(folder), *executables],
            text=True, capture_output=True,
        )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"the {variant} build failed:\n{result.stdout[-4000:]}")
    return folder


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"cannot build: {reason}")
    for name in sys.argv[1:] or VARIANTS:
        print(build(name))
