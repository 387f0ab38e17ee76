"""Runs experiments and turns times into ratios: to the plain LM, to the own reference, to the
limit."""

from __future__ import annotations

import statistics
from itertools import chain

import torch

from . import flops, measure
from .cases import COMPILED, FUSED, NONE, PLAIN, REFERENCE, Contender, Experiment
from .contenders import make_job, tokens_per_call


def run(experiment: Experiment, rounds: int, memory: bool) -> dict:
    return measure.in_a_fresh_process(
        _run, experiment, rounds, memory, environment=experiment.environment
    )


def _run(experiment: Experiment, rounds: int, memory: bool) -> dict:
    shape = experiment.shape
    rounds = max(2, round(rounds * experiment.rounds))
    torch._dynamo.reset()  # compiled for this shape, not for a general one
    jobs, failed = {}, {}
    for contender in experiment.contenders:
        job = make_job(contender, shape, experiment.job)
        try:
            job()
        except Exception as error:  # a compiler that gives up is a result, not a crash
            if contender.who != COMPILED:
                raise
            failed[contender] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        jobs[contender] = job
    times, gemm_times = measure.interleave(jobs, rounds, experiment.name, experiment.gemm)
    gemm = 2 * experiment.gemm**3  # FLOPs
    tokens = tokens_per_call(shape, experiment.job)

    def faster_than(contender: Contender, other: Contender):
        return measure.ratio(times, contender, other) if other in times else None

    rows = []
    for contender in jobs:
        work = flops.per_token(contender, shape, experiment.job) * tokens
        limit = [work / gemm * t for t in gemm_times[contender]]  # seconds
        rows.append(
            {
                "name": str(contender),
                "who": contender.who,
                "variant": str(contender.variant),
                "K": contender.variant.K,
                "tokens_per_second": tokens / statistics.median(times[contender]),
                "to_plain": faster_than(contender, Contender(PLAIN)),
                "to_reference": faster_than(contender, Contender(REFERENCE, contender.variant)),
                "to_engine": faster_than(contender, Contender(FUSED, NONE)),
                "share_of_limit": measure.quartiles(
                    [a / b for a, b in zip(limit, times[contender], strict=True)]
                ),
                "memory": None,
                "seconds": times[contender],
            }
        )
    rows += [{"name": str(contender), "failed": why} for contender, why in failed.items()]
    if memory and experiment.weighed and experiment.job == "train":
        for contender, row in zip(jobs, rows, strict=False):
            if contender.who in (PLAIN, FUSED):
                row["memory"] = measure.memory_in_a_fresh_process(experiment.name, str(contender))
    return {
        "name": experiment.name,
        "job": experiment.job,
        "case": experiment.case,
        "shape": str(shape),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "gemm_gflops": gemm / statistics.median(chain(*gemm_times.values())) / 1e9,
        "rows": rows,
    }
