"""Builds fused_recoder._C. Environment: USE_CUDA=0, FORCE_CUDA=1, TORCH_CUDA_ARCH_LIST, DEBUG=1."""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

OLDEST, NEWEST = (2, 6), (2, 15)  # of PyTorch, as `make torch-check` found them to work
INSTALL = """Install it first, then build without isolation, so that no other one is fetched for it:
    pip install torch "setuptools>=80" ninja pybind11
    pip install --no-build-isolation ."""

try:
    from setuptools import setup
    from setuptools.modified import newer_group
except ImportError as error:
    sys.exit(f"fused_recoder is built with setuptools 80 or newer ({error}).\n{INSTALL}")
try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(
        "fused_recoder is compiled against the PyTorch it shall run with, which could not be "
        f"imported ({error}).\n{INSTALL}"
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
# at::parallel_for is a header: without OpenMP here it would silently run serially, as it does with
# Apple's compiler, which has none.
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
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


def check_torch() -> str:
    """The minor version that is compiled against, the only one that the extension will run with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST:
        sys.exit(f"fused_recoder needs torch {'.'.join(map(str, OLDEST))} or newer, and found "
                 f"{torch.__version__}.")  # fmt: skip
    if (major, minor) > NEWEST:
        print(f"fused_recoder: torch {torch.__version__} is newer than any it was tested with, "
              f"{'.'.join(map(str, NEWEST))}", file=sys.stderr)  # fmt: skip
    return f"{major}.{minor}"


class BuildPerInstructionSet(BuildExtension):
    def build_extensions(self):
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


minor = check_torch()
cuda, decision = decide_cuda()
decision += f"; CPU kernels for {', '.join(INSTRUCTION_SETS)}"
decision += "; debug build" if DEBUG else ""
print(f"fused_recoder: torch {torch.__version__}; {decision}", file=sys.stderr)

macros = [("AT_PER_OPERATOR_HEADERS", None), ("FR_BUILD_DECISION", f'"{decision}"')]
macros += [("FR_X86", None)] if X86 else []
macros += [("FR_CUDA", None)] if cuda else []
setup(
    install_requires=[f"torch=={minor}.*"],
    # A wheel says so in its name; sources do not depend on what they were packed with.
    options={} if "sdist" in sys.argv else {"egg_info": {"tag_build": f"+torch{minor}"}},
    ext_modules=[
        (CUDAExtension if cuda else CppExtension)(
            "fused_recoder._C",
            [
                *sorted(set(HOST_SOURCES) - {CUDA_BACKEND}),
                *([CUDA_BACKEND, *CUDA_SOURCES] if cuda else []),
            ],
            define_macros=macros,
            extra_compile_args={"cxx": [*COMMON_FLAGS, *OPENMP], "nvcc": NVCC_FLAGS},
            extra_link_args=OPENMP,
        )
    ],
    cmdclass={"build_ext": BuildPerInstructionSet},
)
