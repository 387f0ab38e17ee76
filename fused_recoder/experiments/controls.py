"""Is it the gradient? Recoding against everything else that could explain its gain.

The step of `nll` on h is `alpha (W_y - E_o[W])`: it feeds the gold word's output embedding forward.
So the baseline here ties input and output embeddings, which gives a plain model that word, too, and
is regularised. Beside it: the same error as an input, without a gradient of the cell
(training/feedback.py), and plain models made wider until their parameters, or the arithmetic of
their training, match the best recoder's. Every model is also read with dynamic evaluation. The
recoder that gets all seeds is the better of two on the validation text; each model reads the test
text once.
"""

from __future__ import annotations

from pathlib import Path

from ..training import Config
from .costs import parameters, training_flops, widened
from .jobs import Job, Training
from .rows import result
from .scales import Scale
from .study import dynamic_evaluation_of

BASELINE, FEEDBACK, DETACHED = "tied", "tied-feedback", "tied-nll"
BY_STATE, BY_UNIT = "tied-nll-exact", "tied-nll-exact-unit"
MORE_PARAMETERS, MORE_TIME = "tied-wider-parameters", "tied-wider-time"
UNTIED, UNTIED_EXACT = "untied", "untied-nll-exact"
REPEATED = 3  # seeds of the arms that are compared with each other first; the others have one
VOCABULARY = 10_000  # of PTB; widths are chosen before a text is read

LEARNED = {"step": "learned", "step_options": {"init": 0.1}}
NLL = {"signal": "nll", **LEARNED}


def arms(scale: Scale) -> dict[str, Config]:
    """All models by name."""
    plain = scale.plain.replace(tie_weights=True)
    exact = NLL | {"gradient": "exact"}
    by_unit = exact | {"step_options": {"init": 0.1, "per": "unit"}}
    richest = plain.replace(**by_unit)

    def count(config: Config) -> int:
        return parameters(config, VOCABULARY)

    def arithmetic(config: Config) -> int:
        return training_flops(config, VOCABULARY)

    return {
        BASELINE: plain,
        BY_STATE: plain.replace(**exact),
        BY_UNIT: richest,
        FEEDBACK: plain.replace(architecture="error-feedback"),
        f"{FEEDBACK}-exact": plain.replace(architecture="error-feedback", gradient="exact"),
        DETACHED: plain.replace(**NLL),
        MORE_PARAMETERS: widened(plain, count, count(richest)),
        MORE_TIME: widened(plain, arithmetic, arithmetic(richest)),
        UNTIED: plain.replace(tie_weights=False),
        UNTIED_EXACT: plain.replace(tie_weights=False, **exact),
        "tied-nll-exact-predicted": plain.replace(
            signal="nll", gradient="exact", step="predicted", step_options={"init": 0.1}
        ),
    }


def jobs(scale: Scale, out: Path, seeds: int) -> list[Job]:
    """What is known to be needed by now, most important first."""
    found = arms(scale)

    def of(name: str, seed: int) -> list[Job]:
        training = Training(name, found[name].replace(seed=seed))
        return [training, dynamic_evaluation_of(training)]

    wanted = [*of(BASELINE, 1), *of(BY_STATE, 1), *of(BY_UNIT, 1)]
    best = chosen(out)
    if best is None:
        return wanted
    for seed in range(2, seeds + 1):
        wanted += [*of(BASELINE, seed), *of(best, seed)]
    for seed in range(1, min(seeds, REPEATED) + 1):
        wanted += of(FEEDBACK, seed)
    known = {job.name for job in wanted}
    rest = [job for name in found for job in of(name, 1)]
    return wanted + [job for job in rest if job.name not in known]


def chosen(out: Path) -> str | None:
    """The recoder that gets all seeds: the better one on the validation text."""
    rows = {name: result(out, f"{name}.seed1") for name in (BY_STATE, BY_UNIT)}
    if None in rows.values():
        return None
    trained = {n: row for n, row in rows.items() if row["status"] == "finished"}
    return min(trained, key=lambda n: trained[n]["valid_perplexity"], default=BY_STATE)
