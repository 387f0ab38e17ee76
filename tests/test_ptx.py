"""What nvcc makes of the CUDA kernels, executed by the interpreter in tests/ptx: it finds the bugs
it is meant to find, and nvcc's code equals the CPU kernels."""

import re

import pytest
from ptx import build, report
from ptx.report import Requests, counted, run
from test_cuda_emu import CHECKS, PATTERNS

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

UNWRITTEN = "is undefined, from shared memory that nobody has written: .*bugs.cuh:"
RACE = "and nothing orders the two"

# Bug (a kernel of tests/emu/bugs.cuh) and what says so.
BUGS = {
    "missing_barrier": UNWRITTEN,
    "missing_barrier_at_loop_end": RACE,
    "missing_syncwarp": RACE,
    "shuffle_taken_for_a_fence": RACE,
    "last_block_without_fence": RACE,
    "blocks_share_a_counter": RACE,
    "block_reads_another_block": RACE,
    "barrier_in_a_branch": "waits at a barrier before which thread 100 has exited",
    "exit_before_a_barrier": "waits at a barrier before which thread 200 has exited",
    "two_barriers_in_branches": "waits while other threads wait at the barrier in line",
    "mask_names_absent_lanes": "waits for lanes that never come; lanes ffff0000 are in line",
    "mask_names_exited_lanes": "waits for lanes that never come; .*lanes ffff0000 have exited",
    "mask_without_the_caller": "the lane is not in its own mask.*thread 0\n",
    "shuffle_from_outside_the_mask": "the shuffle reads lane 16, which takes no part",
    "failing_assert": r"device assert in\[threadIdx.x\] < 90 failed at .*bugs.cuh:.*thread 89",
    "uninitialised_dynamic_shared_memory": UNWRITTEN,
    "uninitialised_static_shared_memory": UNWRITTEN,
    "beyond_global_memory": "4 bytes beyond the end of an array of 4096 bytes",
    "beyond_dynamic_shared_memory": "outside of the block's variables.*thread 255",
    "beyond_static_shared_memory": "outside of the block's variables.*thread 255",
    "misaligned_vector_load": "reads 16 bytes at a misaligned address",
}

# Of tests/ptx/check_instructions.cpp.
INSTRUCTIONS = [
    "approximations", "special_values", "approximate_reciprocals_of_doubles", "products",
    "transposition", "partial_copies", "refusals",
]  # fmt: skip
# A check that runs one kernel of instructions.cu, and what one warp of it asks for.
COUNTS = {
    "strided_1": ("loads", Requests(1, 4, 4, 128)),
    "strided_2": ("loads", Requests(1, 8, 4, 128)),
    "strided_8": ("loads", Requests(1, 32, 4, 128)),
    "wide_1": ("loads", Requests(1, 16, 16, 512)),
    "wide_2": ("loads", Requests(1, 32, 16, 512)),
    "shared_strided_1": ("shared", Requests(1, 1, 1, 128)),
    "shared_strided_2": ("shared", Requests(1, 2, 1, 128)),
    "shared_strided_32": ("shared", Requests(1, 32, 1, 128)),
}

# What takes the place of something in detectors.ptx, and what is said then.
UNKNOWN = [
    ("st.shared.f32", "st.volatile.shared.f32", "st.volatile.shared.f32 with operands .* is not"),
    ("%tid.x;", "%clock;", "special register %clock is not"),
    ("bar.sync \t0;", "@%p1 bar.sync \t0;", "predicated bar.sync"),
    (".reg .f32 \t%f<", ".local .f32 \t%f<", ".local is not modelled"),
]

# Divisions of numbers that do not fit into 32 bits, and of 0.
NEVER_EXECUTED = {"div.s64", "div.u64", "setp.neu.f64"}


def listed(program):
    return set(run(program, "--list").stdout.split())


def test_everything_is_listed_here():
    assert listed("detectors") == set(BUGS) | set(PATTERNS)
    assert listed("instructions") == {*INSTRUCTIONS, *COUNTS, "half_idle"}


@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_is_found(bug):
    result = run("detectors", bug)
    assert result.returncode == 1
    assert re.search(BUGS[bug], result.stdout, re.DOTALL), result.stdout
    kernel = "last_block_sums<false>" if bug == "last_block_without_fence" else bug
    assert f"{kernel}(float const*, float*), block" in result.stdout


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_is_found_where_nothing_is_wrong(pattern):
    result = run("detectors", pattern)
    assert (result.returncode, result.stdout, result.stderr) == (0, "nothing found\n", "")


@pytest.mark.parametrize("check", CHECKS)
def test_nvccs_code_equals_the_cpu_kernels(check):
    """With approximate instructions that are exact, and off by what the PTX ISA allows."""
    for seed in ("0", "1"):
        result = run("kernels", check, PTX_SEED=seed)
        assert result.returncode == 0, f"seed {seed}: {result.stdout}{result.stderr}"[:4000]


@pytest.mark.parametrize("check", INSTRUCTIONS)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_instructions_do_what_the_isa_says(check, seed):
    result = run("instructions", check, PTX_SEED=seed)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("check", COUNTS)
def test_requests_are_counted(check):
    (kernel,) = counted("instructions", check).kernels.values()
    kind, expected = COUNTS[check]
    runs = kernel.warps
    found = getattr(kernel, kind)
    assert found == Requests(
        runs * expected.count, runs * expected.parts, runs * expected.least, runs * expected.bytes
    )


def test_idle_lanes_are_counted():
    (kernel,) = counted("instructions", "half_idle").kernels.values()
    assert kernel.lanes / (32 * kernel.instructions) == pytest.approx(0.5, abs=0.02)
    assert kernel.parted == kernel.warps  # the branch around the loop


@pytest.mark.parametrize(("what", "by", "message"), UNKNOWN)
def test_what_is_not_known_is_refused(what, by, message, tmp_path):
    text = (report.folder() / "detectors.ptx").read_text()
    assert what in text
    changed = tmp_path / "changed.ptx"
    changed.write_text(text.replace(what, by))
    result = run("detectors", "missing_barrier_at_loop_end", ptx=changed)
    assert result.returncode == 1
    assert re.search(f"changed.ptx, .*{message}.* in line", result.stdout), result.stdout


def test_every_form_that_is_known_is_executed():
    """By some check: what nobody has tried should not pass for known."""
    executed = {}
    programs = {
        "kernels": CHECKS,
        "detectors": PATTERNS,
        "instructions": [*INSTRUCTIONS, *COUNTS, "half_idle"],
    }
    for program, checks in programs.items():
        for check in checks:
            for form, done in counted(program, check).forms.items():
                executed[form] = executed.get(form, False) or done
    assert {form for form, done in executed.items() if not done} == NEVER_EXECUTED
