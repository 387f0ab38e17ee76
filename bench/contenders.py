"""Functions that do a job once: the stock language model, the fused one, the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

import fused_recoder as fr

from . import measure
from .cases import COMPILED, FUSED, GRAPHED, PLAIN, Contender, Shape

WORDS_READ = 20  # per call of a reading job


class PlainLanguageModel(nn.Module):
    """What one writes with stock PyTorch."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.encoder = nn.Embedding(shape.V, shape.H)
        self.rnn = nn.LSTM(shape.H, shape.H, shape.L)
        self.decoder = nn.Linear(shape.H, shape.V)

    def forward(self, tokens: Tensor, targets: Tensor, hx=None):
        output, hx = self.rnn(self.encoder(tokens), hx)
        return F.cross_entropy(self.decoder(output).flatten(0, 1), targets.flatten()), hx

    def predict(self, tokens: Tensor, hx):
        output, hx = self.rnn(self.encoder(tokens), hx)
        return F.log_softmax(self.decoder(output), -1), hx


def make_model(contender: Contender, shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    if contender.who == PLAIN:
        return PlainLanguageModel(shape)
    module = fr if contender.who in (FUSED, GRAPHED) else fr.reference
    model = module.RecodingLanguageModel(
        shape.V, shape.H, shape.H, shape.L, step=0.1, **contender.variant.options(shape)
    )
    if contender.who == COMPILED:
        # The recoder differentiates inside the step and keeps the graph.
        torch._functorch.config.donated_buffer = False
        model = torch.compile(model)
    return model


def make_job(contender: Contender, shape: Shape, job: str) -> Callable[[], object]:
    """A function that does the job once; a training step leaves gradients behind."""
    model = make_model(contender, shape)
    if job == "read":
        return make_reading(contender, model, shape)
    torch.manual_seed(1)
    tokens, targets = torch.randint(shape.V, (2, shape.T, shape.B))

    if contender.who == GRAPHED:
        with measure.autocast():
            step = fr.GraphedStep(model, tokens, targets)
        return lambda: step(tokens, targets)

    def loss() -> Tensor:
        with measure.autocast():
            out = model(tokens, targets)
        return out[0]  # of a tuple (loss, hx) and of a LanguageModelOutput

    def train():
        for parameter in model.parameters():
            parameter.grad = None
        loss().backward()

    def evaluate():
        with torch.no_grad():
            loss()

    if job == "evaluate":
        model.eval()
    return train if job == "train" else evaluate


def make_reading(contender: Contender, model: nn.Module, shape: Shape) -> Callable[[], object]:
    """Reads WORDS_READ words, predicting each next one."""
    model.eval()
    words = torch.randint(shape.V, (WORDS_READ + 1, shape.B))
    if contender.who == FUSED:
        reader = model.reader(shape.B)

        def read():
            for word in words[:-1]:
                reader.feed(word)

        return read
    hx = tuple(torch.zeros(shape.L, shape.B, shape.H) for _ in range(2))

    @torch.no_grad()
    def read():
        states = hx
        for word, following in pairwise(words):
            if contender.who == PLAIN:
                _, states = model.predict(word.unsqueeze(0), states)
            else:
                states = model(word.unsqueeze(0), following.unsqueeze(0), states).hx

    return read


def tokens_per_call(shape: Shape, job: str) -> int:
    return shape.B * (WORDS_READ if job == "read" else shape.T)
