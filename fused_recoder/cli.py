"""`fused-recoder`: the command line."""

from __future__ import annotations

import argparse
import platform
import sys

import torch


def env() -> str:
    """Versions, build decision, instruction set, threads and devices, one per line."""
    from . import _C, __version__

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
    return "\n".join(f"{name:14s} {value}" for name, value in rows.items())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fused-recoder", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print versions, build decision and devices")
    arguments = parser.parse_args(argv)
    if arguments.command == "env":
        print(env())
        sys.exit(0)
