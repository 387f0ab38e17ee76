"""Interventions (Giulianelli et al. 2018): recoding towards what a classifier should say.

A classifier is trained to read the number of the subject off a state between subject and verb.
Where a sentence's number is known, the `Classifier` signal then moves that state so that the
classifier is right, and the model goes on reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional as F

import fused_recoder as fr

from ..training import Vocabulary
from ..training.data import IGNORE
from .agreement import Agreement
from .theorems import with_recoder

BATCH = 50


@dataclass(frozen=True)
class Diagnosis:
    layer: int
    state: str
    weight: np.ndarray  # [H]
    bias: float
    accuracy: float  # on items it was not trained on

    def signal(self, dtype: torch.dtype) -> fr.signals.Classifier:
        weight = torch.as_tensor(self.weight, dtype=dtype)
        bias = torch.tensor(self.bias, dtype=dtype)
        return fr.signals.Classifier(weight, bias, self.layer, self.state)


def batches(items: Sequence[Agreement]) -> list[list[int]]:
    """Indices of items of similar length."""
    order = sorted(range(len(items)), key=lambda i: len(items[i].words))
    return [order[i : i + BATCH] for i in range(0, len(order), BATCH)]


def encode(sentences: Sequence[Sequence[str]], vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """`<eos>` and the words, padded, [T, B], and the lengths [B]."""
    rows = [[vocabulary.eos, *vocabulary.encode(words)] for words in sentences]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(int(lengths.max()), len(rows), dtype=torch.int64)
    for b, row in enumerate(rows):
        tokens[: len(row), b] = torch.tensor(row)
    return tokens, lengths


@torch.no_grad()
def states_until_verb(
    model: fr.RecodingLanguageModel, vocabulary: Vocabulary, items: Sequence[Agreement]
) -> tuple[dict[tuple[int, str], np.ndarray], np.ndarray]:
    """States [N, H] from the subject to the word before the verb, by (layer, state), and the labels
    [N]."""
    plain = with_recoder(model, None, 0.0, ("h", "c"), torch.float32)
    rnn = plain.rnn
    found: dict[tuple[int, str], list] = {
        (layer, state): [] for layer in range(rnn.num_layers) for state in "hc"
    }
    labels = []
    for indices in batches(items):
        chosen = [items[i] for i in indices]
        tokens, _ = encode([item.words for item in chosen], vocabulary)
        x, hx, history = plain.encoder(tokens), None, []
        for t in range(len(tokens)):
            _, hx = rnn(x[t : t + 1], hx)
            history.append(hx)
        for b, item in enumerate(chosen):
            for t in range(item.subject + 1, len(item.words) + 1):  # <eos> comes first
                for (layer, state), rows in found.items():
                    rows.append(history[t]["hc".index(state)][layer, b].numpy())
                labels.append(item.label)
    return {key: np.stack(rows) for key, rows in found.items()}, np.array(labels)


def train_classifiers(
    model: fr.RecodingLanguageModel,
    vocabulary: Vocabulary,
    training: Sequence[Agreement],
    held_out: Sequence[Agreement],
) -> list[Diagnosis]:
    """One per layer and state."""
    states, labels = states_until_verb(model, vocabulary, training)
    other_states, other_labels = states_until_verb(model, vocabulary, held_out)
    found = []
    for (layer, state), values in states.items():
        mean, spread = values.mean(0), values.std(0) + 1e-8
        fitted = LogisticRegression(C=0.1, max_iter=2000).fit((values - mean) / spread, labels)
        # The same classifier, of the states as they are.
        weight = fitted.coef_[0] / spread
        bias = float(fitted.intercept_[0] - weight @ mean)
        guesses = other_states[layer, state] @ weight + bias > 0
        accuracy = float((guesses == (other_labels == 1)).mean())
        found.append(Diagnosis(layer, state, weight, bias, accuracy))
    return found


@torch.no_grad()
def agreement(
    model: fr.RecodingLanguageModel,
    vocabulary: Vocabulary,
    items: Sequence[Agreement],
    diagnoses: Sequence[Diagnosis] = (),
    step: float = 0.0,
    *,
    until_verb: bool = True,
) -> dict:
    """How often the correct form is the more probable one, and the sentences' perplexity.

    Args:
        diagnoses: the classifiers to intervene with; none: the model as it is.
        until_verb: intervene from the subject to the word before the verb, else at the subject.
    """
    dtype = torch.float32
    signal = [d.signal(dtype) for d in diagnoses] if diagnoses and step else None
    reading = with_recoder(model, signal, step, ("h", "c"), dtype)
    right, total, count = [], 0.0, 0
    for indices in batches(items):
        chosen = [items[i] for i in indices]
        tokens, lengths = encode([item.words + item.rest for item in chosen], vocabulary)
        targets = tokens.roll(-1, 0)  # [T, B]
        labels = torch.full_like(tokens, IGNORE)
        for b, item in enumerate(chosen):
            targets[lengths[b] - 1 :, b] = IGNORE
            last = len(item.words) if until_verb else item.subject + 1
            labels[item.subject + 1 : last + 1, b] = item.label
        extra = {"labels": labels} if signal else {}
        result = reading.rnn.read(
            reading.encoder(tokens), targets=targets, lengths=lengths, loss=True, **extra
        )
        total += result.nll.double().sum().item()
        count += (targets != IGNORE).sum().item()
        places = torch.tensor([len(item.words) for item in chosen])
        before_verb = result.output[places, torch.arange(len(chosen))]  # [B, H]
        log_p = F.log_softmax(reading.decoder(before_verb), -1)
        for b, item in enumerate(chosen):
            forms = [vocabulary.ids[form] for form in (item.correct, item.wrong)]
            right.append(bool(log_p[b, forms[0]] > log_p[b, forms[1]]))
    return {
        "items": len(items),
        "accuracy": float(np.mean(right)),
        "perplexity": float(np.exp(total / count)) if count else float("nan"),
    }
