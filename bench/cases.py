"""What is measured: shapes, and the contenders that run at each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import nn

import fused_recoder as fr


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int
    L: int
    V: int

    def __str__(self) -> str:
        return f"B={self.B} T={self.T} {self.L}x{self.H} V={self.V:,}"


CASES = {
    "thesis": Shape(64, 35, 650, 2, 10_000),
    "small": Shape(20, 35, 200, 2, 10_000),
    "reading": Shape(1, 35, 650, 2, 10_000),
    "tiny": Shape(4, 6, 16, 2, 50),
}

FUSED, ENGINE, REFERENCE, COMPILED, PLAIN = (
    "fused",
    "fused engine, no signal",
    "reference",
    "compiled reference",
    "nn.LSTM",
)
CONTENDERS = [FUSED, ENGINE, REFERENCE, COMPILED, PLAIN]


def make_contender(name: str, shape: Shape, signal: str) -> Callable[[], object]:
    """A function that runs forward and backward of the module once.

    This measures the modules of the same signature. The loss, and the decoder that it shares with
    the recoder, are the language model's business.
    """
    torch.manual_seed(0)
    decoder = nn.Linear(shape.H, shape.V)
    x = torch.randn(shape.T, shape.B, shape.H, requires_grad=True)
    y = torch.randint(shape.V, (shape.T, shape.B))
    cotangent = torch.randn(shape.T, shape.B, shape.H)
    sizes = (shape.H, shape.H, shape.L)
    options = {"decoder": decoder, "signal": signal, "step": 0.1}
    if name == PLAIN:
        rnn, arguments = nn.LSTM(*sizes), {}
    elif name == ENGINE:
        rnn, arguments = fr.FusedRecodingLSTM(*sizes, decoder=decoder, signal=None), {}
    elif name == FUSED:
        rnn, arguments = fr.FusedRecodingLSTM(*sizes, **options), {"targets": y}
    else:
        rnn, arguments = fr.reference.RecodingLSTM(*sizes, **options), {"targets": y}
    if name == COMPILED:
        # The recoder differentiates inside the step and keeps the graph.
        torch._functorch.config.donated_buffer = False
        rnn = torch.compile(rnn)

    def step():
        output, _ = rnn(x, **arguments)
        output.backward(cotangent)

    return step
