"""Weights averaged over the last epochs of a run: the mean of what every step left."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import fused_recoder as fr

from .checkpoint import model_tensors, tensors_under
from .model import load_weights

COUNT, WEIGHTS = "average.count", "average.model."


class Average:
    """Of a model's weights, from its first update on."""

    def __init__(self, model: fr.RecodingLanguageModel):
        self._averaged = AveragedModel(model)

    @property
    def model(self) -> fr.RecodingLanguageModel:
        """A model with the mean weights."""
        return self._averaged.module

    def update(self, model: fr.RecodingLanguageModel) -> None:
        """Takes up the weights as they are now."""
        self._averaged.update_parameters(model)

    def tensors(self) -> dict[str, Tensor]:
        """All that `load` needs."""
        weights = {f"{WEIGHTS}{n}": t for n, t in model_tensors(self.model).items()}
        return weights | {COUNT: self._averaged.n_averaged}

    @classmethod
    def load(cls, model: fr.RecodingLanguageModel, tensors: dict[str, Tensor]) -> Average | None:
        """What `tensors` kept for a model like this one; None if averaging had not begun."""
        if COUNT not in tensors:
            return None
        average = cls(model)
        load_weights(average.model, tensors_under(WEIGHTS, tensors))
        with torch.no_grad():
            average._averaged.n_averaged.copy_(tensors[COUNT])
        return average
