"""What can be known about the CUDA kernels without a GPU, as Markdown for docs/gpu.md:
`python -m tools.gpu_tables` rewrites the part between its markers. Needs nvcc, g++ and nvdisasm
(pip install nvidia-cuda-nvdisasm==13.4.92)."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from . import cuda_toolkit, nvcc_check

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- begin: python -m tools.gpu_tables -->", "<!-- end -->"

# Devices in the order of occupancy.cpp: name, architecture, threads per multiprocessor.
DEVICES = [("A100", "sm_80", 2048), ("H100", "sm_90", 2048), ("RTX 4090", "sm_89", 1536)]
SASS_ARCHITECTURE = "sm_80"

# Threads per block at the thesis's shape, H = 650 and V = 10,000 (plan_units, plan_rows), by the
# beginning of the kernel's name.
THREADS = {"cell_": 64, "recode": 64, "dropout": 64, "softmax": 512, "mixture": 512,
           "mask_": 64, "gather": 64, "scatter": 64, "trial_step": 64, "gold": 64,
           "list": 128, "gate": 128, "trial_verdict": 128}  # fmt: skip

# The kernels of that shape: H = 650 is loaded in pairs.
SHOWN = re.compile(
    r"(cell|recode|mask|gold|trial_step).*<(float|__half), 2>|gather.*<float, 4>|"
    r"softmax.*<(float|__half), |(dropout|mixture|scatter|gate|trial_verdict).*<float>|list"
)

INSTRUCTIONS = {  # first letters of SASS opcodes, first match counts
    "global 128 bit": r"(LDG|STG)\.E\.128",
    "global, narrower": r"LDG|STG",
    "shared": r"LDS|STS|ATOMS",
    "shuffle, barrier": r"SHFL|BAR|WARPSYNC|BSYNC|BSSY",
    "double": r"D(ADD|MUL|FMA|SETP)|(F2F|I2F|F2I|MUFU)\..*64",
    "special function": r"MUFU",
    "float": r"F(ADD|MUL|FMA|SETP|SEL|MNMX|CHK)|HADD2|HMUL2|HFMA2|F2FP?|I2F|F2I",
    "control": r"BRA|CALL|RET|EXIT|BREAK|NOP|YIELD|BPT",
}


def threads_of(kernel: str) -> int:
    return next(threads for start, threads in THREADS.items() if kernel.startswith(start))


def resident_blocks(usages: list[nvcc_check.Usage], folder: Path) -> list[list[int]]:
    """Per kernel the blocks per multiprocessor on each device."""
    program = folder / "occupancy"
    subprocess.run(
        ["g++", "-isystem", cuda_toolkit.find_include(), HERE / "occupancy.cpp", "-o", program],
        check=True,
    )
    lines = "\n".join(f"{u.registers} {threads_of(u.kernel)} {u.shared_bytes}" for u in usages)
    output = subprocess.run([program], input=lines, text=True, capture_output=True, check=True)
    return [[int(n) for n in line.split()] for line in output.stdout.splitlines()]


def occupancy_table(by_architecture: dict[str, list[nvcc_check.Usage]], folder: Path) -> str:
    heads = " | ".join(f"{name} ({arch})" for name, arch, _ in DEVICES)
    lines = [f"| kernel | threads | {heads} |", "|---" * (len(DEVICES) + 2) + "|"]
    columns = []
    for index, (_, architecture, most) in enumerate(DEVICES):
        usages = by_architecture[architecture]
        blocks = [line[index] for line in resident_blocks(usages, folder)]
        columns.append({
            usage.kernel: f"{usage.registers} regs, {count} blocks, "
            f"{100 * count * threads_of(usage.kernel) // most} %"
            for usage, count in zip(usages, blocks, strict=True)
        })  # fmt: skip
    for kernel in sorted(filter(SHOWN.match, columns[0])):
        cells = " | ".join(column[kernel] for column in columns)
        lines.append(f"| `{kernel}` | {threads_of(kernel)} | {cells} |")
    return "\n".join(lines)


def classify(opcode: str) -> str:
    matches = (name for name, pattern in INSTRUCTIONS.items() if re.match(pattern, opcode))
    return next(matches, "integer and other")


def count_instructions(sass: str) -> dict[str, Counter]:
    """Instructions by class and kernel, from nvdisasm's listing."""
    sections = re.split(r"^//-+ \.text\.", sass, flags=re.MULTILINE)[1:]
    names = nvcc_check.readable([section.split()[0] for section in sections])
    instruction = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
    return {
        name: Counter(classify(match[1]) for match in instruction.finditer(section))
        for name, section in zip(names, sections, strict=True)
    }


def sass_table(sass: str) -> str:
    classes = [*INSTRUCTIONS, "integer and other"]
    lines = [f"| kernel | all | {' | '.join(classes)} |", "|---" * (len(classes) + 2) + "|"]
    for kernel, counts in sorted(count_instructions(sass).items()):
        if SHOWN.match(kernel):
            cells = " | ".join(str(counts[name]) for name in classes)
            lines.append(f"| `{kernel}` | {counts.total()} | {cells} |")
    return "\n".join(lines)


def make_tables(nvcc: Path, nvdisasm: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        usages = nvcc_check.compile_all(nvcc, folder)
        if wrong := nvcc_check.spills(usages):
            sys.exit("\n".join(wrong))
        by_architecture = {
            arch: [u for u in usages if u.architecture == arch] for _, arch, _ in DEVICES
        }
        sass = subprocess.run(
            [nvdisasm, "-c", folder / f"{SASS_ARCHITECTURE}.cubin"],
            text=True, capture_output=True, check=True,
        ).stdout  # fmt: skip
        version = subprocess.run([nvcc, "--version"], text=True, capture_output=True).stdout
        release = re.search(r"V([\d.]+)", version)[1]
        return f"""\
### Occupancy

Theoretical: registers per thread, resident blocks per multiprocessor and the share of its threads
that they are, at the block sizes of H = 650 and V = 10,000 (nvcc {release}).

{occupancy_table(by_architecture, folder)}

### Instructions

Static count of SASS instructions for {SASS_ARCHITECTURE}, all paths of a kernel together.

{sass_table(sass)}

### Registers

Per thread, and static shared memory per block. No kernel spills.

{nvcc_check.table(usages)}
"""


def replace_part(begin: str, text: str) -> None:
    """Puts `text` between the marker `begin` of the page and the end marker that follows it."""
    before, rest = PAGE.read_text().split(begin)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{begin}\n\n{text}\n{END}{after}")


def main() -> None:
    nvcc, nvdisasm = cuda_toolkit.find_nvcc(), cuda_toolkit.find_nvdisasm()
    if nvcc is None or nvdisasm is None:
        sys.exit(f"needs nvcc and nvdisasm; found {nvcc} and {nvdisasm}")
    replace_part(BEGIN, make_tables(nvcc, nvdisasm))


if __name__ == "__main__":
    main()
