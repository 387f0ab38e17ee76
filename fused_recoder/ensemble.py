"""`EnsembleDecoder`: K decoders held near random anchors, for `signals.Ensemble`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EnsembleDecoder(nn.Module):
    """A Bayesian anchored ensemble of linear decoders (Pearce et al. 2018).

    Args:
        hidden_size, vocab_size: as of `nn.Linear(hidden_size, vocab_size)`.
        num_members: K.
        prior_scale: variance of the prior that members and anchors are drawn from.
        data_noise: variance of the data's noise; anchors pull with `data_noise / prior_scale`.
        dataset_size: number of training tokens N, by which the pull is divided.
        anchor: `"member"` draws an anchor for each member, `"shared"` one for all (the thesis's
            amortised form).
        predict: `"members"` predicts with the mean of the members' probabilities,
            `"mean_logits"` with the mean of their logits, which is one decoder. The signal is the
            entropy of this prediction; the loss of a language model is the members' in both.
    """

    anchor_weight: Tensor  # [K or 1, V, H]
    anchor_bias: Tensor | None  # [K or 1, V]

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_members: int = 10,
        prior_scale: float = 0.29,
        data_noise: float = 0.1,
        dataset_size: int | None = None,
        anchor: str = "member",
        predict: str = "members",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_members": num_members}
        _check_sizes(sizes)
        _check_prior(prior_scale, data_noise, dataset_size)
        if anchor not in ("member", "shared"):
            raise ValueError(f"anchor must be 'member' or 'shared', got {anchor!r}")
        if predict not in ("members", "mean_logits"):
            raise ValueError(f"predict must be 'members' or 'mean_logits', got {predict!r}")
        self.hidden_size, self.vocab_size, self.num_members = hidden_size, vocab_size, num_members
        self.prior_scale, self.data_noise, self.dataset_size = prior_scale, data_noise, dataset_size
        self.anchor, self.predict = anchor, predict
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = (num_members, vocab_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, **factory))  # [K, V, H]
        self.bias = nn.Parameter(torch.empty(shape[:2], **factory)) if bias else None  # [K, V]
        anchors = num_members if anchor == "member" else 1
        self.register_buffer("anchor_weight", torch.empty(anchors, *shape[1:], **factory))
        self.register_buffer(
            "anchor_bias", torch.empty(anchors, vocab_size, **factory) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws members and anchors from the prior."""
        with torch.no_grad():
            for tensor in (self.weight, self.bias, self.anchor_weight, self.anchor_bias):
                if tensor is not None:
                    tensor.normal_(0, math.sqrt(self.prior_scale))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]` -> `[..., V]`: log of the mean probabilities, or mean logits."""
        if self.predict == "mean_logits":
            bias = None if self.bias is None else self.bias.mean(0)
            return F.linear(hidden, self.weight.mean(0), bias)
        log_probabilities = self.member_log_probabilities(hidden)
        return torch.logsumexp(log_probabilities, 0) - math.log(self.num_members)

    def member_log_probabilities(self, hidden: Tensor) -> Tensor:
        """`[..., H]` -> `[K, ..., V]`"""
        bias = [None] * self.num_members if self.bias is None else self.bias
        logits = [F.linear(hidden, w, b) for w, b in zip(self.weight, bias, strict=True)]
        return F.log_softmax(torch.stack(logits), -1)

    def anchor_loss(self) -> Tensor:
        """What keeps members near their anchors: add it to the loss.

        `1/K sum_k lambda/N ||theta_k - anchor_k||^2` with `lambda = data_noise / prior_scale`.
        """
        if self.dataset_size is None:
            raise ValueError("anchor_loss needs dataset_size, the number of training tokens")
        distance = (self.weight - self.anchor_weight).square().sum()
        if self.bias is not None and self.anchor_bias is not None:
            distance = distance + (self.bias - self.anchor_bias).square().sum()
        pull = self.data_noise / self.prior_scale / self.dataset_size
        return pull * distance / self.num_members

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, {self.vocab_size}, num_members={self.num_members}, "
            f"prior_scale={self.prior_scale}, data_noise={self.data_noise}, "
            f"dataset_size={self.dataset_size}, anchor={self.anchor!r}, predict={self.predict!r}"
        )


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive int, got {size!r}")


def _check_prior(prior_scale: float, data_noise: float, dataset_size: int | None) -> None:
    for name, value in (("prior_scale", prior_scale), ("data_noise", data_noise)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if dataset_size is not None and dataset_size < 1:
        raise ValueError(f"dataset_size must be positive, got {dataset_size}")
