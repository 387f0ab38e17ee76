"""The CUDA kernels, executed on the CPU by the shim in tests/emu: the shim finds the bugs it is
meant to find, and the kernels equal the CPU's and have none of them."""

import os
import re
import shutil
import subprocess

import pytest
from emu import build, coverage

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

BUILDS = ["plain", "address", "thread"]

RACE = "ThreadSanitizer: data race"
OVERFLOW = "AddressSanitizer: (heap|global|dynamic-stack|stack)-buffer-overflow"

# Bug (a kernel of bugs.cuh), what says so, and the builds that do.
BUGS = [
    ("missing_barrier", "NaN in the result", ["plain"]),
    ("missing_barrier", "the result depends on the order", ["address"]),
    ("missing_barrier", RACE, ["thread"]),
    ("missing_barrier_at_loop_end", RACE, ["thread"]),
    ("missing_syncwarp", RACE, ["thread"]),
    ("shuffle_taken_for_a_fence", RACE, ["thread"]),
    ("last_block_without_fence", RACE, ["thread"]),
    ("blocks_share_a_counter", RACE, ["thread"]),
    ("block_reads_another_block", RACE, ["thread"]),
    ("block_reads_another_block", "the result depends on the order", ["plain", "address"]),
    ("barrier_in_a_branch", "__syncthreads after some threads have exited", BUILDS),
    ("exit_before_a_barrier", "__syncthreads after some threads have exited", BUILDS),
    ("two_barriers_in_branches", "divergent __syncthreads", BUILDS),
    ("mask_names_absent_lanes", "deadlock", BUILDS),
    ("mask_names_exited_lanes", "deadlock", BUILDS),
    ("mask_without_the_caller", "not in its own mask", BUILDS),
    ("shuffle_from_outside_the_mask", "reads lane 16, which takes no part", BUILDS),
    ("failing_assert", r"device assert in\[threadIdx.x\] < 90 failed at .*bugs.cuh:", BUILDS),
    ("uninitialised_dynamic_shared_memory", "NaN in the result", BUILDS),
    ("uninitialised_static_shared_memory", "NaN in the result", ["plain"]),
    ("beyond_global_memory", OVERFLOW, ["address"]),
    ("beyond_dynamic_shared_memory", OVERFLOW, ["address"]),
    ("beyond_static_shared_memory", "(bugs.cuh.*runtime error: store to address|" + OVERFLOW + ")",
     ["address"]),
    ("misaligned_vector_load", "bugs.cuh.*runtime error: .*misaligned address", ["address"]),
]  # fmt: skip
PATTERNS = [
    "reduction_in_a_loop",
    "neighbours_with_syncwarp",
    "half_warps_with_exact_masks",
    "compaction_by_ballot",
    "atomics_between_blocks",
    "reversal_in_dynamic_shared_memory",
    "last_block_with_fence",
]

ALL_TYPES = [
    "cell_forward", "recode", "recode_backward", "cell_backward", "softmax_signal",
    "mixture_signal", "gold_arrives", "mask_rows", "gather_units", "trial_step",
]  # fmt: skip
ACCUMULATION_TYPES = [
    "softmax_signal_backward", "mixture_signal_backward", "dropout_mask", "mask_sum",
    "scatter_units", "trial_verdict", "gate",
]  # fmt: skip
CHECKS = [
    *(f"{name}_{t}" for name in ALL_TYPES for t in ("float", "double", "half", "bfloat16")),
    *(f"{name}_{t}" for name in ACCUMULATION_TYPES for t in ("float", "double")),
    "list_units",
    "list_units_too_short",
    "softmax_large_vocabularies",
    "softmax_without_scratch",
    "softmax_targets_out_of_range",
    "softmax_row_plans",
    "unit_plans",
]


def run(variant, executable, *arguments):
    folder = build.build(variant, executable)
    return subprocess.run(
        [folder / executable, *arguments],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
        text=True, capture_output=True,
    )  # fmt: skip


def listed(executable):
    return set(run("plain", executable, "--list").stdout.split())


def test_every_kernel_of_the_shims_own_tests_is_listed_here():
    assert listed("detectors") == {bug for bug, _, _ in BUGS} | set(PATTERNS)


@pytest.mark.parametrize(
    ("variant", "bug", "message"),
    [(variant, bug, message) for bug, message, variants in BUGS for variant in variants],
)
def test_the_bug_is_found(variant, bug, message):
    result = run(variant, "detectors", bug)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert re.search(message, output), output[:2000]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("variant", BUILDS)
def test_nothing_is_found_where_nothing_is_wrong(variant, pattern):
    result = run(variant, "detectors", pattern)
    assert (result.returncode, result.stdout, result.stderr) == (0, "nothing found\n", "")


def test_every_check_of_the_kernels_is_listed_here():
    assert listed("kernels") == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("variant", BUILDS)
def test_kernels_equal_the_cpus(variant, check):
    result = run(variant, "kernels", check)
    assert result.returncode == 0, (result.stdout + result.stderr)[:4000]


@pytest.mark.skipif(shutil.which("gcov") is None, reason="gcov is not installed")
def test_every_line_of_the_kernels_is_executed():
    lines = coverage.measure()
    assert set(lines) >= {path.name for path in coverage.KERNELS.glob("*.cuh")} - {"portable.cuh"}
    assert {name: gaps for name in lines if (gaps := coverage.missed(lines[name]))} == {}
