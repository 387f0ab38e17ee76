"""What a trained baseline gains at inference: from a recoder, and from dynamic evaluation.

Step sizes and learning rates are chosen on the validation text; the test text is read once.
"""

from __future__ import annotations

import functools
from pathlib import Path

from ..analysis.dynamic import evaluate_dynamically, gradient_sizes
from ..training import Corpus, evaluate, load_model

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LEARNING_RATES = (5e-4, 1e-3, 2e-3)
DECAYS = (0.001, 0.005)
TUNING_TOKENS = 5_000  # of the validation text, for dynamic evaluation: a batch of one is slow


def recoder_at_inference(
    folders: list[Path], data: Path, *, signal: str, states: str = "hc"
) -> dict:
    """Perplexity over the step size on the validation text, and with the best one on the test."""

    def perplexity(step: float, split: str) -> float:
        loaded = load_model(folders[0], signal=signal, step=step, states=states)
        tokens = Corpus(data, vocabulary=loaded.vocabulary)[split]
        return evaluate(loaded.model, tokens, bptt=loaded.config.bptt).perplexity

    by_step = {step: perplexity(step, "valid") for step in (0.0, *STEPS)}
    best = min(by_step, key=by_step.get)
    return {
        "step": best,
        "valid_perplexity": by_step[best],
        "test_perplexity": perplexity(best, "test"),
        "by_step": list(by_step.items()),
    }


def dynamic_evaluation(folders: list[Path], data: Path, *, tokens: int = TUNING_TOKENS) -> dict:
    """Krause et al. 2018, of the model of the one folder."""
    loaded = load_model(folders[0])
    corpus = Corpus(data, vocabulary=loaded.vocabulary)
    sizes = gradient_sizes(loaded.model, corpus["train"])
    run = functools.partial(evaluate_dynamically, loaded.model, sizes=sizes)
    tuning = corpus["valid"][: tokens + 1]
    choices = {
        (lr, decay): run(tuning, lr=lr, decay=decay).perplexity
        for lr in LEARNING_RATES
        for decay in DECAYS
    }
    lr, decay = min(choices, key=choices.get)
    test = run(corpus["test"], lr=lr, decay=decay)
    return {
        "lr": lr,
        "decay": decay,
        "tuning_perplexity": choices[lr, decay],
        "tuning_perplexity_static": run(tuning, lr=0.0, decay=0.0).perplexity,
        "choices": [[*key, value] for key, value in choices.items()],
        "test_perplexity": test.perplexity,
        "test_tokens_per_second": test.tokens_per_second,
    }
