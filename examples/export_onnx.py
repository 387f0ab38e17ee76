"""One reader step of a recoding language model in ONNX, read by onnxruntime beside our own reader.
Needs the packages onnx, onnxscript and onnxruntime."""

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

import fused_recoder as fr

PATH = Path("runs") / "reader_step.onnx"


def export(lm: fr.RecodingLanguageModel, path: Path, batch_size: int = 1) -> None:
    """Writes a file; weights and step sizes are in it as they are now."""
    tokens = torch.zeros(batch_size, dtype=torch.int64)
    state = torch.zeros(lm.rnn.num_layers, batch_size, lm.rnn.hidden_size)
    torch.onnx.export(
        fr.export.ReaderStep(lm),
        (tokens, tokens, state, state),
        path,
        input_names=["tokens", "targets", "h", "c"],
        output_names=["log_probabilities", "h_recoded", "c_recoded"],
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def read(path: Path, words: Tensor, layers: int, hidden: int) -> np.ndarray:
    """Log probabilities [T, V] of the word after each of `words` [T], by onnxruntime."""
    session = onnxruntime.InferenceSession(path)
    state = {name: np.zeros((layers, 1, hidden), np.float32) for name in ("h", "c")}
    found = []
    for word, following in zip(words.tolist(), [*words[1:].tolist(), -100], strict=True):
        given = {"tokens": np.array([word]), "targets": np.array([following]), **state}
        log_probabilities, state["h"], state["c"] = session.run(None, given)
        found.append(log_probabilities[0])
    return np.stack(found)


def main() -> None:
    torch.manual_seed(0)
    lm = fr.RecodingLanguageModel(1000, 32, 32, 2, signal="nll", step=0.5).eval()
    words = torch.randint(1000, (20,))
    PATH.parent.mkdir(exist_ok=True)
    export(lm, PATH)
    reader = lm.reader()
    ours = torch.cat([reader.feed(word.view(1)) for word in words])  # [T, V]
    apart = np.abs(read(PATH, words, 2, 32) - ours.numpy()).max()
    print(f"{PATH}: onnxruntime and the reader are {apart:.0e} apart")


if __name__ == "__main__":
    main()
