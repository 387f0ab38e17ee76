"""A control for the study: a prediction's error as an input, with no gradient of the cell in it.

At time step t+1 the network reads `x + M e`, where `e = W^T (o - onehot(y))` is what `nll` recoding
gets at the top of time step t, and M is learned (in the spirit of Rocki 2016, who fed surprisal
back). If recoding helps because an error is fed forward, this helps as much.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._call import Call, Result
from .._language_model import LanguageModelBase
from .._module import RecodingLSTMBase, States
from ..functional import signal_gradient
from ..reference import Masks, losses, project


class ErrorFeedbackLSTM(RecodingLSTMBase):
    """A plain LSTM that reads its last error. `gradient="exact"` differentiates the error, too.

    The error is carried from call to call as one more layer of `hx`.
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, **options: Any):
        if options.get("signal") is not None:
            raise ValueError("error feedback takes the place of a recoder: signal must be none")
        super().__init__(input_size, hidden_size, *args, **options)
        self.feedback = nn.Linear(
            hidden_size, input_size, bias=False,
            device=options.get("device"), dtype=options.get("dtype"),
        )  # fmt: skip
        nn.init.zeros_(self.feedback.weight)  # it starts as a plain LSTM

    def initial_states(
        self,
        hx: States | None,
        batch_size: int,
        device: torch.device,
        unbatched: bool = False,
    ) -> States:
        shape = (self.num_layers + 1, batch_size, self.hidden_size)
        if hx is None:
            zeros = torch.zeros(shape, dtype=self.weight_hh_l0.dtype, device=device)
            return zeros, zeros
        if any(tuple(state.shape) != shape for state in hx):
            given = [tuple(state.shape) for state in hx]
            raise ValueError(f"hx: states and error must have shape {shape}, got {given}")
        return hx

    def _run(self, call: Call) -> Result:
        if call.targets is None or call.lengths is not None:
            raise ValueError("error feedback needs targets, and sequences of one length")
        masks = Masks(self, call)
        layers = [(w[0], w[1].t(), w[2] + w[3] if self.bias else None)
                  for w in self.weights_of(call)]  # fmt: skip
        error_to_gates = layers[0][0] @ self.feedback.weight  # [4H, H]
        h, c = list(call.h0[:-1].unbind(0)), list(call.c0[:-1].unbind(0))  # L x [B, H]
        error = call.h0[-1]  # [B, H]
        outputs, nlls = [], []
        for t, from_input in enumerate(project(call.input, masks, layers[0])):
            gates = from_input + F.linear(error, error_to_gates)
            for l, (w_ih, w_hh, bias) in enumerate(layers):
                if l > 0:
                    gates = F.linear(masks.apply_up(l - 1, t, h[l - 1]), w_ih, bias)
                h[l], c[l] = cell(torch.addmm(gates, h[l], w_hh), c[l])
            outputs.append(masks.apply_up(self.num_layers - 1, t, h[-1]))
            nll, error = self.error_of(outputs[-1], call.targets[t])
            nlls.append(nll)
        output = torch.stack(outputs)
        # With exact gradients the loss comes with the error; else a plain one costs less.
        nll = torch.stack(nlls) if self.gradient == "exact" else losses(self, call, output)[0]
        states = torch.stack([*h, error]), torch.stack([*c, torch.zeros_like(error)])
        return Result(output, *states, nll, nll, None, None)

    def error_of(self, top: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """nll `[B]` and error `[B, H]` of what the decoder reads `[B, H]`."""
        weight, bias = self.decoder_parameters()
        if self.gradient == "detached":
            top, weight = top.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        return signal_gradient(top, weight, bias, targets, signal="nll")


def cell(gates: Tensor, c: Tensor) -> States:
    """h and c `[B, H]` of pre-activations `[B, 4H]` and the c before."""
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class ErrorFeedbackLanguageModel(LanguageModelBase):
    """A language model around it."""

    rnn_class = ErrorFeedbackLSTM
