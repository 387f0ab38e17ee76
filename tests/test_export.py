"""What leaves the package: torch.export, AOTInductor, one step in plain operations and in ONNX,
function transforms and FSDP2."""

import copy
import importlib.util
import io
from pathlib import Path

import pytest
import torch

import fused_recoder as fr
from fused_recoder import signals, steps

EXAMPLE = Path(__file__).parents[1] / "examples" / "export_onnx.py"
TOKENS = (torch.arange(18) ** 2 % 31).view(6, 3)  # [T + 1, B]


def make(signal="nll", step=0.5, **options):
    return fr.RecodingLanguageModel(31, 8, 8, 2, signal=signal, step=step, **options).eval()


def through_a_file(module, *arguments, **named):
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, arguments, named), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


@pytest.mark.parametrize("trace", [False, True])
def test_an_exported_model_can_be_saved(trace):
    lm, named = make(step="learned"), {"return_trace": trace}
    loaded = through_a_file(lm, TOKENS[:-1], TOKENS[1:], **named)
    got, want = (m(TOKENS[:-1], TOKENS[1:], **named) for m in (loaded, lm))
    assert type(got) is type(want)
    assert type(got.trace) is type(want.trace)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("signal", ["nll", "entropy"])
def test_an_exported_rnn_can_be_saved(signal):
    rnn, x = make(signal).rnn, torch.randn(5, 3, 8)
    loaded = through_a_file(rnn, x, targets=TOKENS[1:])
    torch.testing.assert_close(
        loaded(x, targets=TOKENS[1:]), rnn(x, targets=TOKENS[1:]), rtol=0, atol=0
    )


STEPS = {"fixed": 0.5, "learned": "learned", "lipschitz": "lipschitz"}


@pytest.mark.parametrize("states", [("h",), ("c",), ("h", "c")], ids="".join)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    "signal",
    ["nll", "surprisal", "entropy", signals.NLL("argmax"), None],
    ids=["nll", "surprisal", "entropy", "argmax", "none"],
)
def test_a_step_in_plain_operations_is_that_of_the_engine(signal, step, states):
    lm = make(signal, step, states=states, bias=states != ("c",), dtype=torch.float64)
    plain = fr.export.ReaderStep(lm)
    targets, hx = TOKENS[1:].clone(), None
    targets[2, 1] = -100
    h, c = torch.randn(2, 2, 3, 8, dtype=torch.float64).unbind()
    hx = (h, c)
    for word, following in zip(TOKENS[:-1], targets, strict=True):
        log_probabilities, h, c = plain(word, following, h, c)
        out = lm(word[None], following[None], hx, logits=True)
        hx = out.hx
        want = (out.logits[0].log_softmax(-1), *hx)
        torch.testing.assert_close((log_probabilities, h, c), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"signal": signals.MCDropout(num_samples=2)}, "signal"),
        ({"step": "predicted"}, "step"),
        ({"step": steps.Backtracking()}, "step"),
        ({"gate": 1.0}, "gate"),
    ],
    ids=lambda o: "_".join(o) if isinstance(o, dict) else o,
)
def test_a_step_that_is_not_written_out_is_refused(options, name):
    with pytest.raises(NotImplementedError, match=f"^{name} must be"):
        fr.export.ReaderStep(make(**options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_onnxruntime_agrees_with_the_reader(signal, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("export_onnx", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    lm, words = make(signal), TOKENS[:, 0]
    example.export(lm, tmp_path / "step.onnx")
    reader = lm.reader()
    want = torch.cat([reader.feed(word.view(1)) for word in words])
    got = torch.from_numpy(example.read(tmp_path / "step.onnx", words, 2, 8))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    plain = make(signal=None)
    plain.load_state_dict(lm.state_dict(), strict=False)
    reader = plain.reader()
    without = torch.cat([reader.feed(word.view(1)) for word in words])
    assert (got - without).abs().max() > 1e-3  # it recodes


def loss_of(lm, weight):
    named = {"rnn.weight_hh_l0": weight}
    return torch.func.functional_call(lm, named, (TOKENS[:-1], TOKENS[1:])).loss


def test_transforms_of_torch_func_are_refused_and_the_reference_has_grad():
    lm = make(dtype=torch.float64)
    oracle = fr.reference.RecodingLanguageModel(31, 8, 8, 2, step=0.5, dtype=torch.float64).eval()
    oracle.load_state_dict(lm.state_dict())
    weight = lm.rnn.weight_hh_l0
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda w: loss_of(lm, w))(weight)
    got = torch.func.grad(lambda w: loss_of(oracle, w))(weight.detach())
    (want,) = torch.autograd.grad(lm(TOKENS[:-1], TOKENS[1:]).loss, weight)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_hooks_on_the_rnn_of_a_language_model_fire():
    lm, seen = make(), []
    lm.rnn.register_forward_hook(lambda *_: seen.append("forward"))
    lm.rnn.register_full_backward_hook(lambda *_: seen.append("backward"))
    lm(TOKENS[:-1], TOKENS[1:]).loss.backward()
    assert seen == ["forward", "backward"]


@pytest.fixture
def mesh(tmp_path):
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def sharded(lm, mesh, *parts):
    from torch.distributed.fsdp import fully_shard

    for part in parts:
        fully_shard(getattr(lm, part), mesh=mesh)
    return fully_shard(lm, mesh=mesh)


@pytest.mark.parametrize("parts", [(), ("rnn",), ("encoder", "rnn")], ids=lambda p: "_".join(p))
def test_fully_sharded_models_have_the_same_gradients(mesh, parts):
    lm = make(step="learned")
    other = sharded(copy.deepcopy(lm), mesh, *parts)
    for model in (lm, other):
        model(TOKENS[:-1], TOKENS[1:]).loss.backward()
    for ours, theirs in zip(lm.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.full_tensor(), ours.grad)


def test_a_decoder_that_is_sharded_by_itself_is_refused(mesh):
    lm = sharded(make(), mesh, "rnn", "decoder")
    with pytest.raises(NotImplementedError, match="decoder must not be sharded by itself"):
        lm(TOKENS[:-1], TOKENS[1:])


@pytest.mark.parametrize("signal", ["nll", None])
def test_aot_inductor_runs_the_model(signal, tmp_path):
    lm = make(signal)
    with torch.no_grad():
        program = torch.export.export(lm, (TOKENS[:-1], TOKENS[1:]))
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "lm.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        compiled = torch._inductor.aoti_load_package(path)
        got, want = (m(TOKENS[:-1], TOKENS[1:]) for m in (compiled, lm))
    torch.testing.assert_close(got.nll, want.nll)
    torch.testing.assert_close(got.hx, want.hx)
