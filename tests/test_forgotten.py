"""What must not be forgotten in the kernels fails to compile: each test forgets one thing."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "csrc" / "kernels"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def flags() -> list[str]:
    """Those of every C++ source."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "COMMON_FLAGS":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no COMMON_FLAGS")


def compile_changed(folder: Path, *changes: tuple[str, str, str]) -> str:
    """What the compiler says of the CPU's kernels after changes (file, text, new text)."""
    shutil.copytree(KERNELS, folder / "kernels")
    for file, text, new in changes:
        source = folder / "kernels" / file
        assert source.read_text().count(text) == 1, f"{text!r} in {file}"
        source.write_text(source.read_text().replace(text, new))
    command = ["g++", *flags(), "-fsyntax-only", "-DFR_ISA=baseline", "-DFR_VECTOR_BYTES=16"]
    result = subprocess.run(
        [*command, folder / "kernels" / "cpu" / "kernels.cpp"],
        env=os.environ | {"LC_ALL": "C"}, text=True, capture_output=True,
    )  # fmt: skip
    assert (result.returncode == 0) == ("error" not in result.stderr)
    return result.stderr


def test_as_they_are_they_compile(tmp_path):
    assert "error" not in compile_changed(tmp_path)


def test_a_kind_of_signal(tmp_path):
    kinds = "enum class SignalKind : int32_t {"
    errors = compile_changed(tmp_path, ("row_signals.h", kinds, kinds + "kForgotten,"))
    assert "enumeration value 'kForgotten' not handled in switch [-Werror=switch]" in errors
    assert "gold_signal" in errors
    assert "with_row_signal" in errors


def test_an_entry_of_the_kernel_table(tmp_path):
    errors = compile_changed(tmp_path, ("cpu/kernels.cpp", "    .recode = recode<T>,\n", ""))
    assert "missing initializer for member" in errors
    assert "::recode'" in errors


@pytest.mark.parametrize(
    ("limit", "value"), [("kStreamGoldRows = 64", 256), ("kStreamRows = 2", 65)], ids=str
)
def test_what_depends_on_a_limit(tmp_path, limit, value):
    change = ("limits.h", limit + ";", f"{limit.split(' = ')[0]} = {value};")
    assert "static assertion failed" in compile_changed(tmp_path, change)
