"""Does any recoding model beat its baseline? Small models, choices on the validation text.

The hypothesis, fixed beforehand: `nll` recoding with learned steps does. Beside it one seed of
every other candidate; the best of all, by validation perplexity, is trained with the further seeds
too, and so is the hypothesis with exact gradients, to see whether they help. Each model reads the
test text once, when its training ends; no choice looks at that number.
"""

from __future__ import annotations

from pathlib import Path

from .ablation import remove_recoder
from .adapting import dynamic_evaluation
from .jobs import Job, Measurement, Training
from .rows import result
from .scales import Scale
from .signal_shape import inference_jobs
from .variants import BASELINE, SIMILAR_PRIOR, ensemble, gold, mc_dropout

HYPOTHESIS = "nll-hc-learned"
EXACT = f"{HYPOTHESIS}-exact"  # the same, trained through the recoding gradient
EXACT_SEEDS = 3
WITHOUT = f"without-recoder.{HYPOTHESIS}"
DYNAMIC = "dynamic-evaluation"


def candidates(scale: Scale) -> dict[str, dict]:
    """`explore` has more of `nll`, at a smaller scale."""
    return {
        **gold("nll", "learned"),
        **gold("nll", "learned", exact=True),
        **gold("nll", 0.3, "c"),
        **gold("surprisal", 5.0),
        **gold("surprisal", "learned"),
        **ensemble(scale, prior=SIMILAR_PRIOR),
        **ensemble(scale, "learned", prior=SIMILAR_PRIOR),
        **mc_dropout(scale),
        **mc_dropout(scale, "learned"),
    }


def jobs(scale: Scale, out: Path, seeds: int) -> list[Job]:
    """All jobs that are known by now, most important first; a model is measured when it is there,
    so that models need not be kept for long."""
    settings = {BASELINE: {}, **candidates(scale)}

    def training(variant: str, seed: int) -> Training:
        return Training(variant, scale.plain.replace(seed=seed, **settings[variant]))

    found: list[Job] = []
    for seed in range(1, seeds + 1):
        plain, recoding = training(BASELINE, seed), training(HYPOTHESIS, seed)
        found += [plain, recoding, *_measurements(plain, recoding)]
    found += [training(EXACT, seed) for seed in range(1, min(EXACT_SEEDS, seeds) + 1)]
    found += [training(name, 1) for name in settings if name not in (BASELINE, HYPOTHESIS, EXACT)]
    best = best_candidate(out, list(settings)[1:])
    if best is not None:
        known = {job.name for job in found}
        further = [training(best, seed) for seed in range(2, seeds + 1)]
        found += [job for job in further if job.name not in known]
    if best not in (None, HYPOTHESIS):
        found += [dynamic_evaluation_of(training(best, seed)) for seed in range(1, seeds + 1)]
    return found


def _measurements(plain: Training, recoding: Training) -> list[Measurement]:
    """The models of a seed, read in other ways than they were trained."""
    return [
        _measurement(WITHOUT, recoding, remove_recoder),
        *inference_jobs(plain, plain.config.seed),
        dynamic_evaluation_of(plain),
        dynamic_evaluation_of(recoding),
    ]


def dynamic_evaluation_of(model: Training) -> Measurement:
    """The model, read with weights that follow the text."""
    return _measurement(f"{DYNAMIC}.{model.variant}", model, dynamic_evaluation)


def _measurement(variant: str, model: Training, measure) -> Measurement:
    about = {"variant": variant, "seed": model.config.seed}
    return Measurement(f"{variant}.seed{model.config.seed}", about, (model.name,), measure)


def measured_variants(best: str | None) -> list[str]:
    inference = [f"inference.{signal}-{states}" for signal in ("nll", "surprisal")
                 for states in ("hc", "c")]  # fmt: skip
    dynamic = dict.fromkeys(f"{DYNAMIC}.{name}" for name in (BASELINE, HYPOTHESIS, best) if name)
    return [WITHOUT, *inference, *dynamic]


def best_candidate(out: Path, names: list[str]) -> str | None:
    """By validation perplexity of seed 1; None until all have been trained."""
    rows = {name: result(out, f"{name}.seed1") for name in names}
    if None in rows.values():
        return None
    trained = {name: row for name, row in rows.items() if row["status"] == "finished"}
    return min(trained, key=lambda name: trained[name]["valid_perplexity"], default=None)
