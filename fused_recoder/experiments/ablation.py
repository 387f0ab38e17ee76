"""Trained models read the test text with another recoder than they were trained with."""

from __future__ import annotations

from pathlib import Path

from ..training import Corpus, evaluate, load_model
from ..training.evaluation import Loaded


def remove_recoder(folders: list[Path], data: Path) -> dict:
    """The model of the one folder, without its recoder."""
    return _test(load_model(folders[0], signal=None), data)


def add_recoder(folders: list[Path], data: Path) -> dict:
    """The plain model of the first folder with the recoder of the second, trained steps included.

    A plain model has one decoder: of an ensemble's signal the entropy of that one remains.
    """
    recoding = load_model(folders[1])
    config = recoding.config
    signal, options = config.signal, config.signal_options
    if signal == "ensemble":
        signal, options = "entropy", {}
    plain = load_model(
        folders[0],
        signal=signal,
        signal_options=options,
        step=config.step,
        step_options=config.step_options,
        states=config.states,
    )
    plain.model.rnn.step.load_state_dict(recoding.model.rnn.step.state_dict())
    return _test(plain, data)


def _test(loaded: Loaded, data: Path) -> dict:
    config = loaded.config
    result = evaluate(
        loaded.model,
        Corpus(data, vocabulary=loaded.vocabulary)["test"],
        batch_size=config.eval_batch_size,
        bptt=config.bptt,
        seed=config.seed,
    )
    return {
        "test_perplexity": result.perplexity,
        "test_tokens_per_second": result.tokens_per_second,
    }
