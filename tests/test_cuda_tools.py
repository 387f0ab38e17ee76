"""The tools around nvcc read what it says; compiling itself is `make nvcc-check`."""

import shutil

import pytest

from tools import cuda_toolkit, gpu_tables, nvcc_check

CLEAN = """\
ptxas info    : 294 bytes gmem, 40 bytes cmem[4]
ptxas info    : Compiling entry function '_Z4copyIfEvPT_' for 'sm_80'
ptxas info    : Function properties for _Z4copyIfEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 102 registers, used 1 barriers, 128 bytes smem, 504 bytes cmem[0]
ptxas info    : Compile time = 158.318 ms
"""
SPILLING = """\
ptxas warning : Registers are spilled to local memory in function '_Z4fillIdEvPT_'
ptxas info    : Compiling entry function '_Z4fillIdEvPT_' for 'sm_80'
ptxas info    : Function properties for _Z4fillIdEvPT_
    16 bytes stack frame, 28 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 456 bytes cmem[0]
"""

pytestmark = pytest.mark.skipif(
    shutil.which("c++filt") is None, reason="c++filt is not installed (binutils)"
)


def test_the_report_of_ptxas_is_read():
    clean, spilling = nvcc_check.parse(CLEAN + SPILLING, "sm_80")
    assert clean == nvcc_check.Usage("copy<float>", "sm_80", 102, 128, 0, 0)
    assert spilling == nvcc_check.Usage("fill<double>", "sm_80", 40, 0, 16, 36)
    assert nvcc_check.spills([clean]) == []
    assert nvcc_check.spills([clean, spilling]) == [
        "fill<double> spills on sm_80: 36 bytes, stack frame 16 bytes"
    ]


@pytest.mark.parametrize(("report", "status"), [(CLEAN, 0), (CLEAN + SPILLING, 1), ("", 1)])
def test_spills_and_silence_fail(monkeypatch, capsys, report, status):
    monkeypatch.setattr(cuda_toolkit, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(nvcc_check, "compile_for", lambda name, *_: nvcc_check.parse(report, name))
    assert nvcc_check.main() == status
    assert f"{7 if status and report else 0} with spills" in capsys.readouterr().out


def test_without_nvcc_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cuda_toolkit, "find_nvcc", lambda: None)
    assert nvcc_check.main() == 0
    assert "skipped: there is no nvcc" in capsys.readouterr().out


def test_instructions_are_counted_by_class():
    listing = """\
//--------------------- .text._Z4copyIfEvPT_ --------------------------
\t.section\t.text._Z4copyIfEvPT_
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;
        /*0020*/                   STG.E.U16 [R2.64], R4 ;
        /*0030*/                   MUFU.RCP64H R5, R7 ;
        /*0040*/                   MUFU.EX2 R5, R7 ;
        /*0050*/                   EXIT ;
//--------------------- .text._Z4fillIdEvPT_ --------------------------
        /*0000*/                   DADD R2, R2, R4 ;
"""
    counts = gpu_tables.count_instructions(listing)
    assert counts == {
        "copy<float>": {
            "integer and other": 1, "global 128 bit": 1, "global, narrower": 1, "double": 1,
            "special function": 1, "control": 1,
        },
        "fill<double>": {"double": 1},
    }  # fmt: skip


def test_the_toolkit_is_found_by_cuda_home_first(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_toolkit.find_include() == tmp_path / "include"
