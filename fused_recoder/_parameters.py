"""What a recoding LSTM has of `nn.LSTM`: sizes, weights, their names and their initialisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LSTMParameters(nn.Module):
    """Sizes and weights, called as those of `nn.LSTM`."""

    bidirectional, proj_size = False, 0
    weight_hh_l0: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive int, got {size!r}")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias = bool(bias)
        for layer in range(num_layers):
            below = input_size if layer == 0 else hidden_size
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (4 * hidden_size, below)}
            shapes["weight_hh"] = (4 * hidden_size, hidden_size)
            if self.bias:
                shapes["bias_ih"] = shapes["bias_hh"] = (4 * hidden_size,)
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                self.register_parameter(f"{name}_l{layer}", parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initialisation of nn.LSTM, in its order."""
        bound = 1 / math.sqrt(self.hidden_size)
        for weights in self.all_weights:
            for weight in weights:
                nn.init.uniform_(weight, -bound, bound)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """Per layer w_ih [4H, in], w_hh [4H, H] and, with bias, b_ih, b_hh [4H]."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        return [[getattr(self, f"{k}_l{n}") for k in kinds] for n in range(self.num_layers)]

    def flatten_parameters(self) -> None:
        """Nothing to do here; `nn.LSTM` has it, so code that calls it goes on working."""
