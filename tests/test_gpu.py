"""On a GPU: `pytest -m gpu`. The whole matrix of signals and steps against the oracle on `cuda`,
CUDA against the CPU with the same masks, autocast, several devices. Graphs: test_cuda_graph.py."""

import copy

import pytest
import torch
from conftest import assert_all_close, relative_error
from test_language_model import REDUCTIONS, run
from test_reader import READABLE, assert_reads_like_one_call, make_model, make_text
from test_variants import make_batch, make_pair
from variants import PAIRS, SIGNALS

import fused_recoder as fr
from fused_recoder import _module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def on_gpu(value):
    """A copy of a tensor, a model, or a tree of tensors on the GPU; leaves stay leaves."""
    if isinstance(value, torch.Tensor):
        return value.detach().cuda().requires_grad_(value.requires_grad)
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).cuda()
    if isinstance(value, dict):
        return {name: on_gpu(v) for name, v in value.items()}
    return type(value)(on_gpu(v) for v in value) if isinstance(value, (tuple, list)) else value


@pytest.fixture
def same_seed(monkeypatch):
    """Both devices draw the seed of their masks from the CPU's generator."""

    def draw(self, device, generator):
        return torch.randint(2**63 - 1, (1,)).to(device)

    monkeypatch.setattr(_module.RecodingLSTMBase, "_draw_seed", draw)


@pytest.mark.parametrize(("signal", "step"), PAIRS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_agrees_with_the_oracle(signal, step, reduction):
    models = [on_gpu(model) for model in make_pair(signal, step)]
    batch, labels = (on_gpu(part) for part in make_batch(signal))
    arguments = labels | {"reduce": REDUCTIONS[reduction]}
    assert_all_close(*(run(model, *batch, **arguments) for model in models))


@pytest.mark.parametrize("signal", [s for s in SIGNALS if s != "none"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_exact_gradients_agree_with_the_oracle(signal, reduction):
    models = [on_gpu(model) for model in make_pair(signal, "learned", gradient="exact")]
    batch, labels = (on_gpu(part) for part in make_batch(signal))
    arguments = labels | {"reduce": REDUCTIONS[reduction]}
    assert_all_close(*(run(model, *batch, **arguments) for model in models))


@pytest.mark.parametrize("lengths", [None, [5, 2, 1]])
@pytest.mark.parametrize("signal", SIGNALS)
def test_the_cpu_and_the_gpu_agree_with_the_same_masks(signal, lengths, same_seed):
    lm, _ = make_pair(signal, "learned")
    batch, labels = make_batch(signal)
    arguments = labels | {"lengths": None if lengths is None else torch.tensor(lengths)}
    want = run(lm, *batch, **arguments)
    got = run(on_gpu(lm), *on_gpu(batch), **on_gpu(arguments))
    assert_all_close({name: value.cpu() for name, value in got.items()}, want)


@pytest.mark.parametrize("signal", READABLE)
def test_reading_word_by_word(signal):
    lm = on_gpu(make_model(signal))
    assert_reads_like_one_call(lm, *on_gpu(make_text(signal, B=3)))


@pytest.mark.parametrize("stream", [0, 7, 4095])
def test_masks_have_the_same_bits(stream):
    seed = torch.tensor([1234567890123])
    arguments = (stream, 0.3, 2, 3, 17, torch.float32)
    cpu = fr.functional.dropout_mask(seed, *arguments)
    assert torch.equal(fr.functional.dropout_mask(seed.cuda(), *arguments).cpu(), cpu)


def test_nothing_in_the_time_loop_synchronises():
    lm, _ = make_pair("nll", "learned", dtype=torch.float32)
    lm = on_gpu(lm)
    (tokens, targets, _), _ = on_gpu(make_batch("nll")[0]), None
    lm(tokens, targets).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lm(tokens, targets).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_rounds_operands_and_keeps_states(dtype):
    lm, _ = make_pair("nll", dtype=torch.float32)
    lm = on_gpu(lm)
    (tokens, targets, _), _ = make_batch("nll")
    want = lm(tokens.cuda(), targets.cuda())
    with torch.autocast("cuda", dtype):
        out = lm(tokens.cuda(), targets.cuda())
    assert out.hx[0].dtype == out.nll.dtype == torch.float32
    assert relative_error(out.nll, want.nll) < 8 * torch.finfo(dtype).eps


def test_tensors_on_different_devices_are_refused_by_name():
    lm, _ = make_pair("nll")
    lm = on_gpu(lm)
    (tokens, targets, _), _ = make_batch("nll")
    with pytest.raises(ValueError, match="targets must be on cuda"):
        lm(tokens.cuda(), targets)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices here")
def test_a_device_that_is_not_the_current_one():
    lm, _ = make_pair("nll", "learned")
    (tokens, targets, _), _ = make_batch("nll")
    results = []
    for device in ("cuda:0", "cuda:1"):
        model = copy.deepcopy(lm).to(device)
        out = model(tokens.to(device), targets.to(device))
        out.loss.backward()
        assert out.nll.device == torch.device(device)
        results.append([out.nll.cpu(), *(p.grad.cpu() for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_another_stream_than_the_default_one():
    lm, _ = make_pair("nll", "learned")
    lm = on_gpu(lm)
    (tokens, targets, _), _ = make_batch("nll")
    tokens, targets = tokens.cuda(), targets.cuda()
    want = lm(tokens, targets).nll
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = lm(tokens, targets).nll
    stream.synchronize()
    assert torch.equal(got, want)
