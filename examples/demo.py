"""One training step of a word language model that recodes, three ways: with the fused engine, with
the same in plain PyTorch and autograd (the reference), and without recoding (nn.LSTM).
Prints how well the first two agree and how fast all three are."""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import fused_recoder as fr

VOCAB, SIZE, LAYERS, BATCH, TIME = 10_000, 200, 2, 20, 35


class LanguageModel(nn.Module):
    def __init__(self, make_rnn):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, SIZE)
        self.decoder = nn.Linear(SIZE, VOCAB)
        self.rnn = make_rnn(self.decoder)

    def forward(self, tokens, targets):
        # nn.LSTM knows no targets; a recoding LSTM corrects its states with them as it reads.
        arguments = {} if isinstance(self.rnn, nn.LSTM) else {"targets": targets}
        output, _ = self.rnn(self.encoder(tokens), **arguments)
        return F.cross_entropy(self.decoder(output).flatten(0, 1), targets.flatten())


def recoding(cls):
    return lambda decoder: cls(SIZE, SIZE, LAYERS, decoder=decoder, signal="nll", step=0.1)


def main():
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (TIME + 1, BATCH))
    x, y = tokens[:-1], tokens[1:]
    plain = LanguageModel(lambda _: nn.LSTM(SIZE, SIZE, LAYERS))
    fused = LanguageModel(recoding(fr.FusedRecodingLSTM))
    reference = LanguageModel(recoding(fr.reference.RecodingLSTM))
    fused.load_state_dict(plain.state_dict())  # the same names: a trained LSTM loads as it is
    reference.load_state_dict(plain.state_dict())

    print(fused, end="\n\n")
    a, b = fused(x, y), reference(x, y)
    a.backward(), b.backward()
    pairs = zip(fused.parameters(), reference.parameters(), strict=True)
    gradients = max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)
    print(f"loss           fused {a.item():.6f}   reference {b.item():.6f}")
    print(f"largest relative difference of a gradient: {gradients:.1e} (float32)\n")

    def seconds(model):
        start = time.perf_counter()
        model(x, y).backward()
        return time.perf_counter() - start

    rounds = []
    for _ in range(10):  # interleaved: whatever else the machine does, it does to all of them
        rounds.append([seconds(model) for model in (plain, fused, reference)])
    print(f"A training step at B={BATCH}, T={TIME}, {LAYERS}x{SIZE}, V={VOCAB:,}, median of 10:")
    names = ("plain nn.LSTM, no recoding", "recoding, fused", "recoding, autograd reference")
    for i, name in enumerate(names):
        speed = statistics.median(BATCH * TIME / r[i] for r in rounds)
        ratio = statistics.median(r[0] / r[i] for r in rounds)
        print(f"  {name:30s} {speed:8,.0f} tokens/s   {ratio:.2f}x the plain model's speed")


if __name__ == "__main__":
    main()
