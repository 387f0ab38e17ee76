"""The thesis's tables: which runs each needs, and the numbers published beside ours.

Ulmer 2019, chapter "Experiments": test perplexity on PTB, mean and standard deviation of four runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .ablation import add_recoder, remove_recoder
from .jobs import Job, Measurement, Training
from .scales import Scale
from .variants import BASELINE, ensemble, gold, mc_dropout

Published = tuple[float, float] | None
SURPRISAL, DROPOUT, ENSEMBLE = "Surprisal", "MC Dropout", "BAE"
PUBLISHED_BASELINE = (126.60, 4.06)


@dataclass(frozen=True)
class Row:
    model: str
    setting: str
    jobs: tuple[Job, ...]  # one per seed
    published: Published = None
    published_speed: float | None = None
    needs: tuple[Training, ...] = ()  # what measurements are made on


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    setting: str  # what the second column says
    rows: tuple[Row, ...]
    speed: bool = False  # also tokens per second in testing

    def jobs(self) -> list[Job]:
        """Every job once, what others need first."""
        jobs = (job for row in self.rows for job in (*row.needs, *row.jobs))
        return list({job.name: job for job in jobs}.values())


class TableMaker:
    """Rows of training jobs for one scale and number of seeds."""

    def __init__(self, scale: Scale, seeds: int):
        self.scale, self.seeds = scale, range(1, seeds + 1)

    def training(self, variant: dict[str, dict], seed: int) -> Training:
        ((name, settings),) = variant.items()
        return Training(name, self.scale.plain.replace(seed=seed, **settings))

    def row(self, model: str, setting, variant: dict[str, dict], published=None, speed=None) -> Row:
        jobs = tuple(self.training(variant, seed) for seed in self.seeds)
        return Row(model, f"{setting}", jobs, published, speed)

    def baseline(self, speed: float | None = None, *, published: bool = True) -> Row:
        numbers = PUBLISHED_BASELINE if published else None
        return self.row("Baseline", "-", {BASELINE: {}}, numbers, speed)

    def measured(self, model, setting, name, needs: list[dict], measure, published) -> Row:
        """Rows of measurements on runs of the same seed."""
        trainings = {s: [self.training(variant, s) for variant in needs] for s in self.seeds}
        jobs = tuple(
            Measurement(
                f"{name}.seed{seed}",
                {"variant": name, "seed": seed},
                tuple(job.name for job in needed),
                measure,
            )
            for seed, needed in trainings.items()
        )
        needed = tuple(job for jobs in trainings.values() for job in jobs)
        return Row(model, setting, jobs, published, needs=needed)


def step_size(scale: Scale, seeds: int) -> Table:
    make = TableMaker(scale, seeds)
    published = {
        SURPRISAL: {0.1: (126.93, 1.12), 1: (126.94, 0.86), 5: (125.33, 1.32),
                    10: (170.51, 30.78), 25: (235.14, 76.99)},
        DROPOUT: {1e-4: (144.03, 3.54), 1e-3: (139.61, 7.28), 0.01: (142.43, 8.12),
                  0.1: (157.91, 22.03), 1: (169.89, 7.36), 5: (198.95, 7.66)},
        ENSEMBLE: {1e-4: (143.66, 8.79), 1e-3: (139.40, 7.24), 0.01: (144.29, 4.17),
                   0.1: (151.61, 4.09), 1: (164.79, 1.84), 5: (204.00, 12.12)},
    }  # fmt: skip
    variants: dict[str, Callable[[float], dict]] = {
        SURPRISAL: lambda step: gold("surprisal", step),
        DROPOUT: lambda step: mc_dropout(scale, step),
        ENSEMBLE: lambda step: ensemble(scale, step),
    }
    rows = [make.baseline()]
    for model, by_step in published.items():
        rows += [
            make.row(model, f"{step:g}", variants[model](float(step)), numbers)
            for step, numbers in by_step.items()
        ]
    return Table("step_size", "Recoding step size", "step", tuple(rows))


def samples(scale: Scale, seeds: int) -> Table:
    make = TableMaker(scale, seeds)
    published = {
        DROPOUT: {1: ((145.77, 8.99), 66.85), 5: ((138.02, 2.79), 48.3),
                  10: ((140.81, 7.60), 31.15), 25: ((143.88, 7.03), 14),
                  50: ((143.85, 2.81), 7.35)},
        ENSEMBLE: {1: ((138.54, 4.24), 59.15), 5: ((161.30, 9.22), 32.2),
                   10: ((170.41, 5.22), 18.55), 25: ((215.23, 12.16), 8.05)},
    }  # fmt: skip
    rows = [make.baseline(406.35)]
    for k in scale.samples:
        numbers = published[DROPOUT].get(k, (None, None))
        rows.append(make.row(DROPOUT, k, mc_dropout(scale, samples=k), *numbers))
    for k in scale.members:
        numbers = published[ENSEMBLE].get(k, (None, None))
        rows.append(make.row(ENSEMBLE, k, ensemble(scale, members=k), *numbers))
    return Table("samples", "Number of samples", "K", tuple(rows), speed=True)


def dropout_rate(scale: Scale, seeds: int) -> Table:
    make = TableMaker(scale, seeds)
    published = {0.1: (141.32, 4.83), 0.2: (140.37, 4.49), 0.3: (145.51, 4.97),
                 0.4: (139.14, 8.29), 0.5: (143.95, 4.17), 0.6: (143.25, 3.91)}  # fmt: skip
    rows = [make.baseline()]
    rows += [make.row(DROPOUT, p, mc_dropout(scale, p=p), n) for p, n in published.items()]
    return Table("dropout_rate", "MC Dropout rate", "p", tuple(rows))


# Best fixed step, and the two that adapt, of every model: published perplexities of the models
# themselves, without their recoder, and of the baseline with that recoder.
FIXED, LEARNED, PREDICTED = "fixed", "learned", "predicted"
DYNAMIC = {
    (SURPRISAL, FIXED): ((125.33, 1.32), (126.11, 1.38), (125.95, 3.56)),
    (SURPRISAL, LEARNED): ((126.25, 0.77), (126.25, 0.77), (126.55, 3.63)),
    (SURPRISAL, PREDICTED): ((129.01, 2.42), (129.01, 2.42), (126.59, 3.64)),
    (DROPOUT, FIXED): ((139.61, 7.28), (138.01, 2.79), (126.78, 3.67)),
    (DROPOUT, LEARNED): ((140.50, 6.78), (145.74, 8.95), (127.04, 4.11)),
    (DROPOUT, PREDICTED): ((154.48, 14.32), (159.60, 10.93), (127.11, 4.14)),
    (ENSEMBLE, FIXED): ((139.40, 7.24), (138.54, 4.24), (126.72, 3.65)),
    (ENSEMBLE, LEARNED): ((142.20, 8.84), (142.36, 7.76), (126.72, 4.22)),
    (ENSEMBLE, PREDICTED): ((139.55, 6.30), (140.51, 5.48), (126.72, 4.22)),
}


def _by_step_kind(scale: Scale, model: str, kind: str) -> dict[str, dict]:
    if model == SURPRISAL:
        return gold("surprisal", 5.0 if kind == FIXED else kind)
    make = {DROPOUT: mc_dropout, ENSEMBLE: ensemble}[model]
    return make(scale, 0.001 if kind == FIXED else kind)


def dynamic_steps(scale: Scale, seeds: int) -> Table:
    make = TableMaker(scale, seeds)
    rows = [make.baseline()]
    rows += [
        make.row(model, kind, _by_step_kind(scale, model, kind), published[0])
        for (model, kind), published in DYNAMIC.items()
    ]
    return Table("dynamic_steps", "Dynamic step size", "step", tuple(rows))


def ablation(scale: Scale, seeds: int) -> Table:
    make = TableMaker(scale, seeds)
    rows = [make.baseline()]
    for (model, kind), published in DYNAMIC.items():
        variant = _by_step_kind(scale, model, kind)
        (name,) = variant
        rows.append(
            make.measured(
                model,
                f"{kind}, without its recoder",
                f"without-recoder.{name}",
                [variant],
                remove_recoder,
                published[1],
            )
        )
    for (model, kind), published in DYNAMIC.items():
        variant = _by_step_kind(scale, model, kind)
        (name,) = variant
        rows.append(
            make.measured(
                "Baseline",
                f"with the recoder of {model}, {kind}",
                f"baseline-with.{name}",
                [{BASELINE: {}}, variant],
                add_recoder,
                published[2],
            )
        )
    return Table("ablation", "Ablation: the recoder taken off, or put on", "change", tuple(rows))


TABLES: dict[str, Callable[[Scale, int], Table]] = {
    "step_size": step_size,
    "samples": samples,
    "dropout_rate": dropout_rate,
    "dynamic_steps": dynamic_steps,
    "ablation": ablation,
}
