"""What `torch.load(..., weights_only=True)` may build, models saved whole with `torch.save`, and
what `torch.export.save` may name: our results.

Our own modules, and those of PyTorch that they are made of. A `Custom` signal holds a function of
the user's, which only the user can vouch for.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree

from . import reference, signals, steps
from ._call import RecodingTrace
from .ensemble import EnsembleDecoder
from .gate import Gate
from .language_model import LanguageModelOutput, RecodingLanguageModel
from .lstm import FusedRecodingLSTM

MODELS = [
    FusedRecodingLSTM,
    RecodingLanguageModel,
    reference.RecodingLSTM,
    reference.RecodingLanguageModel,
]
PARTS = [
    *signals.NAMES.values(),
    signals.Classifier,
    signals.Classifiers,
    *steps.NAMES.values(),
    steps.Fixed,
    EnsembleDecoder,
    Gate,
]
OF_TORCH = [nn.Embedding, nn.Linear, nn.ModuleList, nn.ReLU, nn.Sequential, nn.Softplus]


def register() -> None:
    """Called once, at import."""
    torch.serialization.add_safe_globals([*MODELS, *PARTS, *OF_TORCH])
    for result in (LanguageModelOutput, RecodingTrace):
        _pytree._register_namedtuple(
            result, serialized_type_name=f"{result.__module__}.{result.__name__}"
        )
