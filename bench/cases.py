"""What is measured: shapes, variants, and the experiments that put contenders side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fused_recoder as fr


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int
    L: int
    V: int

    def __str__(self) -> str:
        return f"B={self.B}, T={self.T}, {self.L}x{self.H}, V={self.V:,}"


LARGE_GEMM = 1536

CASES = {
    "thesis": Shape(64, 35, 650, 2, 10_000),
    "small": Shape(20, 35, 200, 2, 10_000),
    "wide-vocab": Shape(20, 35, 400, 2, 50_000),
    "long": Shape(20, 512, 200, 2, 10_000),
    "reading": Shape(1, 1, 650, 2, 10_000),
    "reading-small": Shape(1, 1, 200, 2, 10_000),
    "tiny": Shape(4, 6, 16, 2, 50),
}


@dataclass(frozen=True)
class Variant:
    """A model: its signal, and what else distinguishes it."""

    signal: str = "none"
    K: int = 1
    p: float = 0.21
    mask: str = "unit"
    predict: str = "members"
    gradient: str = "detached"

    def __str__(self) -> str:
        if self.gradient == "exact":
            return f"{replace(self, gradient='detached')}, exact gradient"
        if self.signal == "mc_dropout":
            return f"MC Dropout {self.mask}, K={self.K}"
        if self.signal == "ensemble":
            return f"ensemble {self.predict}, K={self.K}"
        return self.signal

    def options(self, shape: Shape) -> dict:
        """For a language model of this kind."""
        return {"gradient": self.gradient, **self._of_signal(shape)}

    def _of_signal(self, shape: Shape) -> dict:
        if self.signal == "none":
            return {"signal": None}
        if self.signal == "mc_dropout":
            return {"signal": fr.signals.MCDropout(self.K, self.p, self.mask)}
        if self.signal == "ensemble":
            decoder = fr.EnsembleDecoder(
                shape.H, shape.V, self.K, dataset_size=1_000_000, predict=self.predict
            )
            return {"signal": fr.signals.Ensemble(), "decoder": decoder}
        return {"signal": self.signal}


NONE, NLL, SURPRISAL, ENTROPY = (Variant(s) for s in ("none", "nll", "surprisal", "entropy"))

# Who runs a variant: the stock PyTorch language model (which cannot recode), the fused engine, the
# reference, the reference under torch.compile, or (on a GPU) the engine in a CUDA graph.
PLAIN, FUSED, REFERENCE, COMPILED = "plain", "fused", "reference", "compiled"
GRAPHED = "fused in a CUDA graph"


@dataclass(frozen=True)
class Contender:
    who: str
    variant: Variant = NONE

    def __str__(self) -> str:
        if self.who == PLAIN:
            return "plain LM (stock PyTorch)"
        if self.variant == NONE:
            return f"{self.who}, no signal"
        return f"{self.who}, {self.variant}"


@dataclass(frozen=True)
class Experiment:
    """Contenders that take turns. `job`: train, evaluate or read."""

    name: str
    job: str
    case: str
    contenders: tuple[Contender, ...]
    rounds: float = 1.0  # relative to what is asked for: slow ones get fewer
    core: bool = False  # measured with every number of threads, the others with the first only
    keeps_memory: bool = False  # whether the C library is told to keep memory that was freed
    gemm: int = LARGE_GEMM  # rows and columns of the large product that the limit is taken from
    weighed: bool = True  # whether memory is measured, too: a process for every contender

    @property
    def shape(self) -> Shape:
        return CASES[self.case]

    @property
    def environment(self) -> dict[str, str]:
        """Of the process that measures it."""
        if not self.keeps_memory:
            return {}
        return {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}

    def without(self, who: str) -> Experiment:
        return replace(self, contenders=tuple(c for c in self.contenders if c.who != who))

    def with_graphs(self) -> Experiment:
        """With a CUDA graph of each training step of the engine."""
        if self.job != "train":
            return self
        fused = (c for c in self.contenders if c.who == FUSED)
        graphed = tuple(replace(c, who=GRAPHED) for c in fused)
        return replace(self, contenders=(*self.contenders, *graphed))


def against_everything(*variants: Variant, compiled: tuple[Variant, ...] = ()) -> tuple:
    return (
        Contender(PLAIN),
        Contender(FUSED),
        *(Contender(FUSED, v) for v in variants),
        *(Contender(REFERENCE, v) for v in variants),
        *(Contender(COMPILED, v) for v in compiled),
    )


def sweep(variant: Variant, counts: tuple[int, ...]) -> tuple:
    return (Contender(PLAIN), *(Contender(FUSED, replace(variant, K=k)) for k in counts))


MC = Variant("mc_dropout", 10)
SHARED, WEIGHT = replace(MC, mask="shared"), replace(MC, mask="weight")
EXACT, EXACT_ENTROPY = (replace(v, gradient="exact") for v in (NLL, ENTROPY))
ENSEMBLE = Variant("ensemble", 10)
MEAN_LOGITS = replace(ENSEMBLE, predict="mean_logits")

EXPERIMENTS = [
    Experiment("train thesis", "train", "thesis",
               against_everything(NLL, SURPRISAL, ENTROPY, compiled=(NLL,)), core=True),
    Experiment("train small", "train", "small",
               against_everything(NLL, SURPRISAL, ENTROPY, compiled=(NLL,)), core=True),
    Experiment("train small, freed memory kept", "train", "small",
               against_everything(NLL, SURPRISAL), core=True, keeps_memory=True).without(REFERENCE),
    Experiment("train wide-vocab", "train", "wide-vocab", against_everything(NLL, ENTROPY)),
    Experiment("train long", "train", "long", against_everything(NLL), 0.5),
    Experiment("train MC Dropout", "train", "thesis", against_everything(MC, SHARED), 0.5),
    Experiment("train ensemble", "train", "thesis", against_everything(ENSEMBLE, MEAN_LOGITS), 0.3),
    Experiment("train exact", "train", "thesis",
               (*against_everything(EXACT, EXACT_ENTROPY), Contender(FUSED, NLL)), 0.5),
    Experiment("train exact small", "train", "small",
               (*against_everything(EXACT, EXACT_ENTROPY), Contender(FUSED, NLL))),
    Experiment("evaluate thesis", "evaluate", "thesis", against_everything(NLL, ENTROPY),
               core=True),
    Experiment("evaluate MC shared", "evaluate", "thesis", sweep(SHARED, (1, 5, 10, 25, 50))),
    Experiment("evaluate MC unit", "evaluate", "thesis", sweep(MC, (1, 5, 10, 25, 50)), 0.3),
    Experiment("evaluate MC weight", "evaluate", "thesis", sweep(WEIGHT, (1, 5, 10)), 0.3),
    Experiment("evaluate ensemble", "evaluate", "thesis", sweep(ENSEMBLE, (1, 5, 10, 25)), 0.3),
    Experiment("read", "read", "reading", against_everything(NLL, ENTROPY), 2.0, True),
    Experiment("read small", "read", "reading-small", against_everything(NLL, ENTROPY), 2.0, True),
]  # fmt: skip

TINY = [
    Experiment("tiny train", "train", "tiny", against_everything(NLL, SHARED, ENSEMBLE), gemm=64),
    Experiment("tiny evaluate", "evaluate", "tiny", sweep(SHARED, (1, 5)), gemm=64),
    Experiment("tiny exact", "train", "tiny", against_everything(EXACT), gemm=64, weighed=False),
    Experiment("tiny read", "read", "tiny", against_everything(NLL), gemm=64),
]
