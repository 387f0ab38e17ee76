"""From a text folder to a trained recoding language model.

    from fused_recoder.training import Config, Trainer

    config = Config.recipe("zaremba-small", signal="nll", step=0.3, states="c")
    summary = Trainer(config, "my_text", "runs/mine").train()

Needs the packages of `pip install fused-recoder[train]`.
"""

from .callbacks import Callback
from .config import Config, recipe_names
from .curves import draw_curves
from .data import Batches, Corpus
from .distributed import Processes, processes
from .evaluation import Evaluation, evaluate, load_model
from .model import build_model
from .sample import sample_corpus
from .tokenizer import Tokenizer, Vocabulary
from .trainer import NonFiniteError, Trainer

__all__ = [
    "Batches",
    "Callback",
    "Config",
    "Corpus",
    "Evaluation",
    "NonFiniteError",
    "Processes",
    "Tokenizer",
    "Trainer",
    "Vocabulary",
    "build_model",
    "draw_curves",
    "evaluate",
    "load_model",
    "processes",
    "recipe_names",
    "sample_corpus",
]
