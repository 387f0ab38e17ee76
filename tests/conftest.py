"""Pairs of fused module and oracle with the same weights, and the measures tests compare by."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fused_recoder as fr
from fused_recoder import _C
from fused_recoder._ops import ForwardArguments
from fused_recoder.spec import RecoderSpec

# Test processes run side by side, one core each; what is about threads asks for them.
torch.set_num_threads(1)

SIGNALS = [None, "nll", "surprisal", "entropy"]
STATES = [("h",), ("c",), ("h", "c")]


def pytest_configure(config):
    """Benchmarks run once, as tests. Not an option in pyproject.toml: without the plugin that knows
    it pytest would not even start."""
    if config.pluginmanager.hasplugin("benchmark") and not config.option.benchmark_enable:
        config.option.benchmark_disable = True


def pytest_ignore_collect(collection_path, config):
    """`pytest -m gpu` needs torch and pytest alone: other files may import what is not there."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return "mark.gpu" not in collection_path.read_text() or None


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_pair(input_size=5, hidden=7, layers=2, vocab=11, dtype=torch.float64, **options):
    """(fused, reference, decoder), sharing one decoder and equal weights."""
    options.setdefault("decoder", nn.Linear(hidden, vocab, dtype=dtype))
    fused = fr.FusedRecodingLSTM(input_size, hidden, layers, dtype=dtype, **options)
    oracle = fr.reference.RecodingLSTM(input_size, hidden, layers, dtype=dtype, **options)
    oracle.load_state_dict(fused.state_dict())
    return fused, oracle, options["decoder"]


def make_inputs(rnn, T=4, B=3, vocab=11, dtype=torch.float64):
    """x [T, B, I], (h0, c0) [L, B, H], all wanting gradients, and targets [T, B]."""
    shape = (rnn.num_layers, B, rnn.hidden_size)
    x = torch.randn(T, B, rnn.input_size, dtype=dtype, requires_grad=True)
    hx = tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    return x, hx, torch.randint(vocab, (T, B))


def run_with_gradients(rnn, x, hx, **arguments):
    """All results of a forward and backward pass, by name."""
    torch.manual_seed(1)
    output, (h_n, c_n), trace = rnn(x, hx, return_trace=True, **arguments)
    results = {"output": output, "h_n": h_n, "c_n": c_n, **trace._asdict()}
    torch.manual_seed(2)
    outs = (output, h_n, c_n)
    cotangents = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outs]
    wanted = {"x": x, "h_0": hx[0], "c_0": hx[1], **dict(rnn.named_parameters())}
    wanted = {n: t for n, t in wanted.items() if t.requires_grad}
    grads = torch.autograd.grad(outs, list(wanted.values()), cotangents, allow_unused=True)
    for (name, tensor), grad in zip(wanted.items(), grads, strict=True):
        results[f"grad {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return {name: value.detach() for name, value in results.items()}


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest deviation, relative to the largest element."""
    assert value.shape == truth.shape, f"{tuple(value.shape)} is not {tuple(truth.shape)}"
    value, truth = value.double(), truth.double()
    scale = truth.abs().max().clamp_min(1e-30)
    return ((value - truth).abs().max() / scale).item()


def assert_all_close(results: dict, truth: dict, tolerance: float = 1e-10):
    assert results.keys() == truth.keys()
    errors = {name: relative_error(results[name], truth[name]) for name in truth}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"


def as_dtype(rnn, decoder, dtype):
    """A copy of the module and the decoder it holds in another precision."""
    rnn, decoder = copy.deepcopy((rnn, decoder))
    return rnn.to(dtype), decoder.to(dtype)


SPEC_FIELDS = {field.name for field in dataclasses.fields(RecoderSpec)}


def forward_arguments(**given) -> ForwardArguments:
    """Arguments of the op recode_forward: tensors and fields of the spec by name, nothing where
    nothing is given. `signal` and `step` are names, their tensors `signal_tensors` and `sizes`."""
    fields = {name: given.pop(name) for name in SPEC_FIELDS & given.keys()}
    lists = {"signal": given.pop("signal_tensors", []), "step": [given.pop("sizes")]}
    optional = dict.fromkeys(
        ("decoder_weight", "decoder_bias", "gate", "targets", "labels", "mask", "lengths", "seed")
    )
    spec = RecoderSpec(**fields).encode()
    return ForwardArguments(**(lists | optional | given), spec=spec)


def saved_by_name(a: ForwardArguments, saved: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the op recode_forward has saved."""
    ensemble = a.decoder_weight is not None and a.decoder_weight.dim() == 3
    has_bias = a.decoder_bias is not None
    layout = _C.saved_layout(a.spec, a.h0.shape[0] > 1, ensemble, has_bias)
    return {name: tensor for (name, *_), tensor in zip(layout, saved, strict=True)}
