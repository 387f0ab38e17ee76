"""Builds fused_recoder._C. Environment: USE_CUDA=0, FORCE_CUDA=1, TORCH_CUDA_ARCH_LIST, DEBUG=1."""

import contextlib
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.modified import newer_group

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(
        f"fused_recoder is compiled against PyTorch, which could not be imported ({error}).\n"
        "Install it first, then build without isolation:\n"
        "    pip install torch==2.13.0 setuptools ninja pybind11\n"
        "    pip install --no-build-isolation ."
    )

DEBUG = os.environ.get("DEBUG", "0") == "1"
X86 = platform.machine().lower() in ("x86_64", "amd64")
CUDA_SOURCES = sorted(glob("csrc/kernels/cuda/*.cu"))
CUDA_BACKEND = "csrc/engine/device_cuda.cpp"
HOST_SOURCES = [
    source
    for folder in ("ops", "engine", "signals", "steps", "cell")
    for source in glob(f"csrc/{folder}/*.cpp")
]

# CPU kernels are compiled once per instruction set and picked at run time.
INSTRUCTION_SETS = {"baseline": (16, [])}
if X86:
    INSTRUCTION_SETS["avx2"] = (32, ["-mavx2", "-mfma"])
    INSTRUCTION_SETS["avx512"] = (
        64,
        ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"],
    )

COMMON_FLAGS = ["-std=c++20", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"]
COMMON_FLAGS += ["-O0", "-g"] if DEBUG else ["-O3"]
NVCC_FLAGS = ["-std=c++20", *(["-O0", "-g", "-G"] if DEBUG else ["-O3"])]


def decide_cuda() -> tuple[bool, str]:
    """Whether to build CUDA kernels, and the reason in words."""
    use, force = os.environ.get("USE_CUDA"), os.environ.get("FORCE_CUDA", "0") == "1"
    if use == "0" and force:
        sys.exit("USE_CUDA=0 and FORCE_CUDA=1 contradict each other: unset one.")
    missing = None
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} was built without CUDA"
    elif CUDA_HOME is None:
        missing = "no CUDA toolkit was found (set CUDA_HOME)"
    if force and missing:
        sys.exit(f"FORCE_CUDA=1, but {missing}.")
    if use == "0":
        return False, "CPU only, because USE_CUDA=0"
    if missing:
        return False, f"CPU only, because {missing}"
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "torch's default list")
    return True, f"CUDA {torch.version.cuda} for architectures {archs}, toolkit in {CUDA_HOME}"


def warn_of_an_idle_gpu() -> None:
    """Where torch has CUDA and we shall not: said on the terminal itself, as pip hides the rest."""
    if cuda or torch.version.cuda is None or os.environ.get("USE_CUDA") == "0":
        return
    message = (
        f"\nWARNING: fused_recoder is being built {decision}.\n"
        f"It will have no kernels for GPUs, though torch {torch.__version__} could use them.\n"
        "Name the toolkit with CUDA_HOME=..., or say USE_CUDA=0 if this is what you want.\n"
    )
    print(message, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        print(message, file=terminal)


class BuildPerInstructionSet(BuildExtension):
    def build_extensions(self):
        warn_of_an_idle_gpu()
        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(self.compile_kernels, INSTRUCTION_SETS))
        for extension in self.extensions:
            extension.extra_objects = objects
        super().build_extensions()

    def compile_kernels(self, name: str) -> str:
        vector_bytes, flags = INSTRUCTION_SETS[name]
        source = "csrc/kernels/cpu/kernels.cpp"
        folder = Path(self.build_temp) / name
        built = folder / Path(source).with_suffix(".o")
        headers = glob("csrc/kernels/*.h") + glob("csrc/kernels/cpu/*.h")
        if not newer_group([source, "setup.py", *headers], str(built)) and not DEBUG:
            return str(built)
        (compiled,) = self.compiler.compile(
            [source],
            output_dir=str(folder),
            macros=[("FR_ISA", name), ("FR_VECTOR_BYTES", str(vector_bytes))],
            extra_postargs=[*COMMON_FLAGS, "-fno-math-errno", "-fno-trapping-math", *flags],
        )
        return compiled


cuda, decision = decide_cuda()
decision += f"; CPU kernels for {', '.join(INSTRUCTION_SETS)}"
decision += "; debug build" if DEBUG else ""
print(f"fused_recoder: torch {torch.__version__}; {decision}", file=sys.stderr)

macros = [("AT_PER_OPERATOR_HEADERS", None), ("FR_BUILD_DECISION", f'"{decision}"')]
macros += [("FR_X86", None)] if X86 else []
macros += [("FR_CUDA", None)] if cuda else []
setup(
    # An extension works with the torch it was compiled against, and with no other.
    install_requires=[f"torch=={torch.__version__.split('+')[0]}"],
    ext_modules=[
        (CUDAExtension if cuda else CppExtension)(
            "fused_recoder._C",
            [
                *sorted(set(HOST_SOURCES) - {CUDA_BACKEND}),
                *([CUDA_BACKEND, *CUDA_SOURCES] if cuda else []),
            ],
            define_macros=macros,
            # at::parallel_for is a header: without OpenMP here it would silently run serially.
            extra_compile_args={"cxx": [*COMMON_FLAGS, "-fopenmp"], "nvcc": NVCC_FLAGS},
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildPerInstructionSet},
)
