"""The whole extension on CUDA's kernels, which the shim of tests/emu runs on CPU tensors: every
signal and step against the oracle, forward and backward, as the engine does it on a GPU."""

import pytest
import test_exact
import torch
from conftest import assert_all_close, make_inputs, relative_error, run_with_gradients
from emu import build
from emu.backend import ORDERS, kernels_of_cuda, unchecked_launches
from test_language_model import REDUCTIONS, run
from test_reader import READABLE, assert_reads_like_one_call, make_model, make_text
from test_variants import V, make_batch
from test_variants import make_pair as make_models
from variants import PAIRS, SIGNALS, STEPS, classifies, has_own_masks
from variants import build as build_variant

import fused_recoder as fr

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

H = 7


def make_rnns(signal, step, layers=2, **options):
    rnns = []
    for cls in (fr.FusedRecodingLSTM, fr.reference.RecodingLSTM):
        torch.manual_seed(4)
        kind, decoder = build_variant(signal, H, V)
        rnns.append(
            cls(5, H, layers, decoder=decoder, signal=kind, step=STEPS[step](),
                dtype=torch.float64, **options)
        )  # fmt: skip
    rnns[1].load_state_dict(rnns[0].state_dict())
    return rnns


@pytest.mark.parametrize("host_reads", [False, True], ids=["blind", "seeing"])
@pytest.mark.parametrize(("signal", "step"), PAIRS)
def test_lstm_agrees_with_the_oracle(signal, step, host_reads):
    own = has_own_masks(signal)
    rnns = make_rnns(signal, step, **({} if own else {"dropout": 0.3, "output_dropout": 0.2}))
    x, hx, targets = make_inputs(rnns[0], vocab=V)
    targets[1, 2] = -100
    arguments = {"targets": targets, "lengths": torch.tensor([4, 3, 1])}
    if classifies(signal):
        arguments["labels"] = torch.randint(2, targets.shape)
    with kernels_of_cuda(host_reads) as launches:
        before = launches()
        got, want = (run_with_gradients(rnn, x, hx, **arguments) for rnn in rnns)
        assert launches() > before or signal.startswith("custom")
    assert_all_close(got, want)


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith("custom")])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_language_model_agrees_with_the_oracle(signal, reduction):
    for step, lengths in (("learned", None), ("predicted", [5, 2, 1])):
        models = make_models(signal, step)
        batch, labels = make_batch(signal)
        arguments = labels | {
            "lengths": None if lengths is None else torch.tensor(lengths),
            "reduce": REDUCTIONS[reduction],
        }
        with kernels_of_cuda():
            assert_all_close(*(run(model, *batch, **arguments) for model in models))


@pytest.mark.parametrize("signal", test_exact.FUSED)
def test_exact_gradients_agree_with_the_oracle(signal):
    for step, lengths in (("learned", [4, 2, 1]), ("predicted", None)):
        dropout = 0.0 if has_own_masks(signal) else 0.3
        pair = test_exact.make_pair(signal, step, dropout=dropout, output_dropout=dropout)
        lengths = None if lengths is None else torch.tensor(lengths)
        with kernels_of_cuda():
            test_exact.compare(*pair, signal, lengths=lengths)


@pytest.mark.parametrize("signal", test_exact.FUSED)
def test_exact_gradients_of_language_models_agree_with_the_oracle(signal):
    models = make_models(signal, "learned", gradient="exact")
    batch, labels = make_batch(signal)
    with kernels_of_cuda():
        for reduction in REDUCTIONS.values():
            assert_all_close(*(run(m, *batch, reduce=reduction, **labels) for m in models))


@pytest.mark.parametrize("options", [{"states": ("h",)}, {"states": ("c",)}, {"gate": 0.5},
                                     {"probability": 0.5}], ids=str)  # fmt: skip
@pytest.mark.parametrize("signal", ["nll", "mc-shared", "variational", "classifier"])
def test_options_agree_with_the_oracle(signal, options):
    if signal == "classifier" and options.get("states") == ("c",):
        pytest.skip("this classifier reads h")
    models = make_models(signal, "backtracking", **options)
    batch, labels = make_batch(signal)
    with kernels_of_cuda():
        assert_all_close(*(run(model, *batch, **labels) for model in models))


@pytest.mark.parametrize("signal", READABLE)
@pytest.mark.parametrize("step", ["fixed", "backtracking"])
def test_reading_word_by_word(signal, step):
    for batch_size, probability in ((1, 1.0), (3, (0.5, 0.5))):
        lm = make_model(signal, step, probability=probability)
        tokens, labels = make_text(signal, T=4, B=batch_size)
        with kernels_of_cuda():
            assert_reads_like_one_call(lm, tokens, labels)


@pytest.mark.parametrize("kind", ["nll", "surprisal", "entropy"])
def test_signal_gradient_and_its_derivatives(kind):
    hidden = torch.randn(6, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -100, V - 1, 5, 5])

    def call(*tensors):
        return fr.functional.signal_gradient(*tensors, targets, signal=kind)

    with kernels_of_cuda():
        got = call(hidden, weight, bias)
        assert torch.autograd.gradcheck(call, (hidden, weight, bias))
    for value, truth in zip(got, call(hidden, weight, bias), strict=True):
        assert relative_error(value, truth) < 1e-12


@pytest.mark.parametrize("signal", ["nll", "mc-unit", "mc-shared", "ensemble"])
def test_the_order_of_threads_changes_nothing(signal):
    lm, _ = make_models(signal, "learned")
    batch, _ = make_batch(signal)
    results = []
    for order in ORDERS:
        with kernels_of_cuda(order=order):
            results.append(run(lm, *batch))
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("signal", ["nll", "entropy", "mc-unit", "mc-shared", "mc-weight"])
def test_larger_shapes_in_float32_agree_with_the_cpu(signal):
    torch.manual_seed(0)
    kind, _ = build_variant(signal, 40, 301, torch.float32)
    lm = fr.RecodingLanguageModel(301, 12, 40, signal=kind, step=0.5)
    tokens = torch.randint(301, (4, 5))
    results = []
    for run_on_cuda in (True, False):
        torch.manual_seed(1)
        if run_on_cuda:
            with kernels_of_cuda():
                results.append(lm(tokens[:-1], tokens[1:]).nll)
        else:
            results.append(lm(tokens[:-1], tokens[1:]).nll)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_target_out_of_range_is_caught_by_an_assert():
    lm, _ = make_models("nll")
    (tokens, targets, hx), _ = make_batch("nll")
    targets[2, 1] = V
    with kernels_of_cuda(), pytest.raises(RuntimeError, match="targets out of range"):
        lm(tokens, targets, hx)


@pytest.mark.parametrize("signal", READABLE)
def test_a_reader_asks_for_the_errors_of_all_its_launches(signal):
    """Else a kernel that could not be launched would be blamed on some later operation."""
    lm = make_model(signal, "backtracking", probability=0.5)
    tokens, labels = make_text(signal, T=2, B=3)
    with kernels_of_cuda() as launches:
        reader = lm.reader(3)
        assert unchecked_launches() == 0
        for t, word in enumerate(tokens[:-1]):
            before = launches()
            reader.feed(word, None if labels is None else labels[t])
            assert launches() > before
            assert unchecked_launches() == 0
        if reader._reader.pending():
            reader.finish(tokens[-1])
            assert unchecked_launches() == 0


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith("custom")])
def test_forward_and_backward_ask_for_the_errors_of_all_their_launches(signal):
    for gradient, step in (("detached", "predicted"), ("exact", "learned")):
        lm, _ = make_models(signal, step, gradient=gradient)
        batch, labels = make_batch(signal)
        with kernels_of_cuda() as launches:
            before = launches()
            loss = lm(*batch, **labels).loss
            assert unchecked_launches() == 0
            loss.backward()
            assert unchecked_launches() == 0
            assert launches() > before
