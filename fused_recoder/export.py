"""`ReaderStep`: one time step of a recoding language model in plain PyTorch operations, for
runtimes that know neither our engine nor autograd, such as ONNX's.

The recoding gradient is written out here, as in docs/mathematics.md; `Reader` and the fused engine
are what it is tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._language_model import LanguageModelBase
from .signals import NLL, Entropy, Surprisal
from .steps import Fixed, Learned, Lipschitz

Gates = tuple[Tensor, Tensor, Tensor, Tensor]  # i, f, g, o [B, H], activated


class ReaderStep(nn.Module):
    """Reads one word: `step(tokens, targets, h, c) -> log_probabilities, h, c`.

    `tokens` [B] are read from the states `h` and `c` [L, B, H]; `log_probabilities` [B, V] are
    those of the next words, and the states that come back are recoded for `targets` [B], the words
    that really came next (-100: not recoded). With a gold signal the prediction does not depend on
    them: to read without knowing what follows, ask with -100 first, and again from the same states
    when it is known. Other signals look at no target, and recode wherever it is not -100.

    Weights are shared with `lm`; step sizes are those of the moment. For the signals `NLL`,
    `Surprisal`, `Entropy` or none, and for steps that are known before a word is read (a number,
    `Learned`, `Lipschitz`), without dropout.
    """

    def __init__(self, lm: LanguageModelBase):
        super().__init__()
        rnn = lm.rnn
        for name, part, known in (
            ("signal", rnn.signal, (NLL, Surprisal, Entropy)),
            ("step", rnn.step, (Fixed, Learned, Lipschitz)),
        ):
            if part is not None and type(part) not in known:
                raise NotImplementedError(
                    f"{name} must be one of {', '.join(kind.__name__ for kind in known)}, got "
                    f"{type(part).__name__}: it is not written in plain operations"
                )
        if rnn.gate is not None:
            raise NotImplementedError("gate must be None, got one: it is not written here")
        self.encoder, self.decoder, self.rnn = lm.encoder, lm.decoder, rnn
        if rnn.signal is not None:
            self.register_buffer("sizes", rnn.step.sizes(rnn).detach().clone())  # [L, S]

    def forward(
        self, tokens: Tensor, targets: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the class."""
        below, all_gates, new_h, new_c = self.encoder(tokens), [], [], []
        for layer, weights in enumerate(self.rnn.all_weights):
            gates, cell = read_word(below, h[layer], c[layer], weights)
            below = gates[3] * torch.tanh(cell)
            all_gates.append(gates)
            new_h.append(below)
            new_c.append(cell)
        log_o = F.log_softmax(self.decoder(below), -1)
        if self.rnn.signal is None:
            return log_o, torch.stack(new_h), torch.stack(new_c)
        top = self.top_gradient(log_o, targets)  # [B, H]
        recoded_h, recoded_c = self.recode(top, all_gates, new_h, new_c, c)
        if not self.rnn.signal.sees_labels:  # the prediction is that of the recoded state
            log_o = F.log_softmax(self.decoder(recoded_h[-1]), -1)
        return log_o, recoded_h, recoded_c

    def top_gradient(self, log_o: Tensor, targets: Tensor) -> Tensor:
        """d(delta)/d(h) of the top layer, [B, H]."""
        signal, weight, o = self.rnn.signal, self.rnn.decoder_parameters()[0], log_o.exp()
        counts = (targets >= 0).to(o.dtype).unsqueeze(1)  # [B, 1]
        if isinstance(signal, Entropy):
            entropy = -(o * log_o).sum(-1, keepdim=True)
            return -(o * (log_o + entropy)) @ weight * counts
        assert signal is not None
        gold = targets.clamp(min=0) if signal.needs_targets else log_o.argmax(-1)
        gradient = (o @ weight - weight[gold]) * counts
        if isinstance(signal, Surprisal):
            log_p = log_o.gather(1, gold.unsqueeze(1))
            gradient = gradient * torch.exp((1 - log_p.exp()) * log_p) * (log_p + 1)
        return gradient

    def recode(
        self,
        gradient: Tensor,
        all_gates: list[Gates],
        h: list[Tensor],
        c: list[Tensor],
        c_before: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """All states after the recoding step, from the top layer down; each [L, B, H]."""
        states, recoded_h, recoded_c = self.rnn.states, list(h), list(c)
        for layer in reversed(range(len(h))):
            i, f, g, o = all_gates[layer]
            tanh_c = torch.tanh(c[layer])
            gradient_c = gradient * o * (1 - tanh_c * tanh_c)
            if "h" in states:
                recoded_h[layer] = h[layer] - self.sizes[layer, states.index("h")] * gradient
            if "c" in states:
                recoded_c[layer] = c[layer] - self.sizes[layer, states.index("c")] * gradient_c
            through_gates = torch.cat(
                [
                    gradient_c * g * i * (1 - i),
                    gradient_c * c_before[layer] * f * (1 - f),
                    gradient_c * i * (1 - g * g),
                    gradient * tanh_c * o * (1 - o),
                ],
                1,
            )
            gradient = through_gates @ self.rnn.all_weights[layer][0]
        return torch.stack(recoded_h), torch.stack(recoded_c)


def read_word(below: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]) -> tuple[Gates, Tensor]:
    """Activated gates, and the new c [B, H], of one LSTM cell."""
    w_ih, w_hh, *biases = weights
    all_four = F.linear(below, w_ih) + F.linear(h, w_hh) + sum(biases)
    i, f, g, o = all_four.chunk(4, 1)
    gates = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    return gates, gates[1] * c + gates[0] * gates[2]
