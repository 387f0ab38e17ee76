"""The control: a plain LSTM that reads its last error."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_all_close
from tiny_text import TINY, exact_metrics, write_text
from torch import nn

from fused_recoder.training import Config, Trainer, build_model, load_model
from fused_recoder.training.feedback import ErrorFeedbackLanguageModel

V, H, T, B, L = 11, 6, 5, 3, 2


def make_model(gradient):
    torch.manual_seed(7)
    lm = ErrorFeedbackLanguageModel(
        V, 4, H, L, signal=None, gradient=gradient, dtype=torch.float64
    )  # fmt: skip
    nn.init.normal_(lm.rnn.feedback.weight)
    return lm


def by_hand(lm, tokens, targets, exact):
    """nll [T, B], from `nn.LSTMCell` and autograd alone."""
    cells = [nn.LSTMCell(4 if l == 0 else H, H, dtype=torch.float64) for l in range(L)]
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    shared = [{n: getattr(lm.rnn, f"{n}_l{l}") for n in names} for l in range(L)]
    states = [(torch.zeros(B, H, dtype=torch.float64),) * 2 for _ in range(L)]
    error, nll = torch.zeros(B, H, dtype=torch.float64), []
    for t in range(T):
        x = lm.encoder(tokens[t]) + error @ lm.rnn.feedback.weight.t()
        for l in range(L):
            states[l] = torch.func.functional_call(cells[l], shared[l], (x, states[l]))
            x = states[l][0]
        now = F.cross_entropy(lm.decoder(x), targets[t], reduction="none", ignore_index=-100)
        (error,) = torch.autograd.grad(now.sum(), x, create_graph=True)
        error = error if exact else error.detach()
        nll.append(now)
    return torch.stack(nll), error


@pytest.mark.parametrize("gradient", ["detached", "exact"])
def test_agrees_with_autograd(gradient):
    lm = make_model(gradient)
    tokens, targets = torch.randint(V, (T, B)), torch.randint(V, (T, B))
    targets[2, 1] = -100
    out = lm(tokens, targets)
    nll, error = by_hand(lm, tokens, targets, gradient == "exact")
    weights = torch.rand(T, B, dtype=torch.float64)
    got = {"nll": out.nll, "error": out.hx[0][-1]}
    want = {"nll": nll, "error": error}
    parameters = dict(lm.named_parameters())
    for results in (got, want):
        grads = torch.autograd.grad(
            (results["nll"] * weights).sum(), parameters.values(), retain_graph=True
        )
        results |= {f"grad {n}": g for n, g in zip(parameters, grads, strict=True)}
    assert_all_close(got, want)
    assert got["grad rnn.feedback.weight"].norm() > 0


def test_two_calls_are_one():
    lm = make_model("detached").eval()
    tokens, targets = torch.randint(V, (T, B)), torch.randint(V, (T, B))
    whole = lm(tokens, targets)
    first = lm(tokens[:2], targets[:2])
    second = lm(tokens[2:], targets[2:], first.hx)
    torch.testing.assert_close(torch.cat([first.nll, second.nll]), whole.nll)
    torch.testing.assert_close(second.hx, whole.hx)


def test_starts_as_a_plain_lstm():
    config = Config.from_dict(TINY | {"signal": None, "dtype": "float64"})
    plain = build_model(config, V)
    fed = build_model(config.replace(architecture="error-feedback"), V)
    fed.load_state_dict(plain.state_dict(), strict=False)
    tokens = torch.randint(V, (T + 1, B))
    for model in (plain, fed):
        model.eval()
    torch.testing.assert_close(fed(tokens[:-1], tokens[1:]).nll, plain(tokens[:-1], tokens[1:]).nll)


@pytest.mark.parametrize("gradient", ["detached", "exact"])
def test_it_trains_and_is_resumed(tmp_path, monkeypatch, gradient):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text")
    settings = TINY | {"architecture": "error-feedback", "signal": None, "gradient": gradient}
    summary = Trainer(Config.from_dict(settings), text, tmp_path / "whole").train()
    Trainer(Config.from_dict(settings | {"epochs": 1}), text, tmp_path / "parts").train()
    Trainer.resume(tmp_path / "parts", epochs=2).train()
    assert exact_metrics(tmp_path / "whole")[:40] == exact_metrics(tmp_path / "parts")[:40]
    model = load_model(tmp_path / "whole").model
    assert model.rnn.feedback.weight.norm() > 0
    assert summary["test_perplexity"] < 20


def test_it_takes_no_signal():
    with pytest.raises(ValueError, match="takes no signal"):
        Config(architecture="error-feedback", signal="nll")
    with pytest.raises(ValueError, match="error feedback needs targets"):
        make_model("detached")(torch.randint(V, (T, B)))
