"""Recoding for recurrent language models, in closed form. Start with `FusedRecodingLSTM`."""

import torch

from . import _build

_build.check()

from . import _following, _ops, _saving, export, functional, reference, signals, steps  # noqa: E402
from ._call import RecodingTrace  # noqa: E402
from .cuda_graph import GraphedStep  # noqa: E402
from .ensemble import EnsembleDecoder  # noqa: E402
from .gate import Gate  # noqa: E402
from .language_model import LanguageModelOutput, RecodingLanguageModel  # noqa: E402
from .lstm import FusedRecodingLSTM  # noqa: E402
from .reader import Reader  # noqa: E402

_following.register()
_saving.register()

__version__ = "0.1.0"
__all__ = [
    "EnsembleDecoder",
    "FusedRecodingLSTM",
    "Gate",
    "GraphedStep",
    "LanguageModelOutput",
    "Reader",
    "RecodingLanguageModel",
    "RecodingTrace",
    "export",
    "functional",
    "reference",
    "signals",
    "steps",
]
del torch, _build, _following, _ops, _saving
