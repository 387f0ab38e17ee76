"""torch.ops.fused_recoder itself: opcheck, and arguments that must raise and never crash."""

import pytest
import torch
from conftest import forward_arguments, make_inputs, make_pair, saved_by_name
from torch.library import opcheck

from fused_recoder.spec import RecoderSpec, decode

ops = torch.ops.fused_recoder
F64 = torch.float64


def arguments_in_use(**changes):
    """Arguments of recode_forward, those of a gold signal all in use."""
    rnn, _, decoder = make_pair(signal="nll", step="learned")
    x, (h0, c0), y = make_inputs(rnn)
    given = {
        "input": x, "h0": h0, "c0": c0, "weights": [w for layer in rnn.all_weights for w in layer],
        "decoder_weight": decoder.weight, "decoder_bias": decoder.bias, "sizes": rnn.step(),
        "targets": y, "mask": torch.rand(4, 3) < 0.7, "lengths": torch.tensor([4, 3, 1]),
        "seed": torch.tensor([3]), "signal": "nll", "dropout": 0.2, "output_dropout": 0.1,
        "gate": torch.tensor([2.0], dtype=F64), "loss": True, "save": True, "step_grad": True,
        "decoder_grad": True, "trace": True,
    }  # fmt: skip
    return forward_arguments(**(given | changes))


@pytest.mark.parametrize("signal", ["none", "nll", "surprisal", "entropy"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trace": False, "mask": None, "lengths": None, "seed": None, "dropout": 0.0,
         "output_dropout": 0.0, "step_grad": False},
        {"targets": None, "argmax": True, "loss": False, "recode_c": False},
        {"decoder_grad": False, "decoder_bias": None},
        {"exact": True},
        {"exact": True, "targets": None, "argmax": True, "loss": False, "gate": None},
    ],
    ids=["all", "bare", "argmax", "no decoder gradient", "exact", "exact, no loss"],
)  # fmt: skip
def test_opcheck_forward(signal, changes):
    a = arguments_in_use(signal=signal, **changes)
    spec = decode(a.spec)
    if not spec.recode_c:
        a = a._replace(step=[a.step[0][:, :1]])
    if not spec.decoder_grad:
        a = a._replace(decoder_weight=a.decoder_weight.detach())
    if not spec.step_grad:
        a = a._replace(step=[a.step[0].detach()])
    opcheck(ops.recode_forward.default, tuple(a))


def backward_arguments(a, saved, *, grad_output, grad_h_n=None, grad_nll=None, output=None):
    """Of recode_backward, for arguments `a` of recode_forward."""
    return (
        grad_output, grad_h_n, None, grad_nll, None, saved, output, a.input, a.h0, a.c0, a.weights,
        a.decoder_weight, a.decoder_bias, a.signal, a.step, a.targets, a.labels, a.lengths, a.seed,
        decode(a.spec).replace(input_grad=True).encode(),
    )  # fmt: skip


def test_ops_take_tensors_and_one_spec():
    for op, limit in ((ops.recode_forward, 16), (ops.recode_backward, 22)):
        assert len(op.default._schema.arguments) <= limit


@pytest.mark.parametrize("exact", [False, True], ids=["detached", "exact"])
def test_opcheck_backward(exact):
    a = arguments_in_use(exact=exact)
    with torch.no_grad():
        output, h_n, *_, saved = ops.recode_forward(*a)
        grad_nll = torch.randn(4, 3, dtype=F64)
        arguments = backward_arguments(
            a, saved, grad_output=torch.randn_like(output), grad_h_n=torch.randn_like(h_n),
            grad_nll=grad_nll, output=output,
        )  # fmt: skip
        opcheck(ops.recode_backward.default, arguments)


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_opcheck_signal_gradient(signal):
    hidden = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -100, 10, 5])
    opcheck(ops.signal_gradient.default, (hidden, weight, bias, targets, f"signal={signal}"))
    bars = (torch.randn(5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64))
    plain = tuple(t.detach() for t in (hidden, weight, bias))
    opcheck(ops.signal_gradient_backward.default, (*bars, *plain, targets, f"signal={signal}"))


def test_opcheck_dropout_mask():
    opcheck(ops.dropout_mask.default, (torch.tensor([9]), 1, 2, 0.3, 0, 2, 3, 5, torch.float32))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input": torch.zeros(4, 3, dtype=F64)}, ValueError, r"input must have shape \[T, B, I\]"),
        ({"input": torch.zeros(0, 3, 5, dtype=F64)}, ValueError, "at least one time step"),
        ({"input": torch.zeros(4, 0, 5, dtype=F64)}, ValueError, "at least one batch row"),
        ({"input": torch.zeros(4, 3, 0, dtype=F64)}, ValueError, "at least one feature"),
        ({"input": torch.zeros(4, 3, 5, dtype=torch.int64)}, TypeError, "input must be float32"),
        ({"input": torch.zeros(4, 3, 5, dtype=torch.complex64)}, TypeError, "input must be"),
        ({"input": torch.zeros(4, 3, 6, dtype=F64)}, ValueError, "weight_ih_l0 must have shape"),
        ({"input": torch.zeros(4, 3, 5)}, TypeError, "dtype"),
        ({"h0": torch.zeros(2, 2, 7, dtype=F64)}, ValueError, "h0 must have shape"),
        ({"h0": torch.zeros(2, 3, 7, dtype=F64, device="meta")}, ValueError, "h0 must be on cpu"),
        ({"c0": torch.zeros(1, 3, 7, dtype=F64)}, ValueError, "c0 must have shape"),
        ({"c0": torch.zeros(2, 3, 7)}, TypeError, "c0 must have dtype"),
        ({"weights": []}, ValueError, "weights must hold"),
        ({"weights": [torch.zeros(28, 5, dtype=F64)] * 3}, ValueError, "weights must hold"),
        ({"decoder_weight": None}, ValueError, "decoder_weight must be given"),
        ({"decoder_weight": torch.zeros(11, 8, dtype=F64)}, ValueError, "decoder_weight must have"),
        ({"decoder_weight": torch.zeros(0, 7, dtype=F64)}, ValueError, "decoder_weight must have"),
        ({"decoder_weight": torch.zeros(11, 7)}, TypeError, "decoder_weight must have dtype"),
        ({"decoder_bias": torch.zeros(7, dtype=F64)}, ValueError, "decoder_bias must have shape"),
        ({"sizes": torch.zeros(2, 3, dtype=F64)}, ValueError, r"step must have shape \[L, S\]"),
        ({"sizes": torch.full((2, 2), torch.nan, dtype=F64)}, ValueError, "step must be finite"),
        ({"sizes": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "step must be floating"),
        ({"targets": torch.full((4, 3), 11)}, ValueError, r"in \[0, 11\) or -100, got 11"),
        ({"targets": torch.full((4, 3), -1)}, ValueError, "got -1"),
        ({"targets": torch.zeros(3, 4, dtype=torch.int64)}, ValueError, "targets must have shape"),
        ({"targets": torch.zeros(4, 3)}, TypeError, "targets must be int64"),
        ({"targets": torch.zeros(4, 3, dtype=torch.int32)}, TypeError, "targets must be int64"),
        ({"mask": torch.zeros(4, 3)}, TypeError, "recode_mask must be bool"),
        ({"mask": torch.zeros(4, 2, dtype=torch.bool)}, ValueError, "recode_mask must have shape"),
        ({"lengths": torch.tensor([4, 3])}, ValueError, "lengths must have shape"),
        ({"lengths": torch.tensor([4, 3, 0])}, ValueError, "lengths must be between 1 and T = 4"),
        ({"lengths": torch.tensor([5, 3, 1])}, ValueError, "lengths must be between"),
        ({"lengths": torch.tensor([4.0, 3, 1])}, TypeError, "lengths must be int64"),
        ({"targets": None}, ValueError, "targets must be given for a loss"),
        ({"seed": None}, ValueError, "seed must be given"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, ValueError, "seed must have shape"),
        ({"seed": torch.zeros(1)}, TypeError, "seed must be int64"),
        ({"signal": "novelty"}, ValueError, "signal must be one of none, nll, surprisal"),
        ({"recode_h": False, "recode_c": False}, ValueError, "states must name"),
        ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1"),
        ({"output_dropout": -0.1}, ValueError, "output_dropout must be in"),
        ({"output_dropout": float("nan")}, ValueError, "output_dropout must be in"),
    ],
)
def test_bad_input_raises_and_names_the_argument(changes, error, message):
    with torch.no_grad(), pytest.raises(error, match=message):
        ops.recode_forward(*arguments_in_use(**changes))


def test_sparse_and_quantized_tensors_do_not_crash():
    for wrong in (torch.zeros(4, 3, 5, dtype=F64).to_sparse(), None, "x"):
        with torch.no_grad(), pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            ops.recode_forward(*arguments_in_use(input=wrong))


def test_backward_refuses_tensors_that_are_not_its_own():
    a = arguments_in_use(loss=False, decoder_grad=False)
    with torch.no_grad():
        output, *_, saved = ops.recode_forward(*a)

        def backward(saved, grad_output=output, a=a):
            return ops.recode_backward(*backward_arguments(a, saved, grad_output=grad_output))

        def changed(name, change, a=a, saved=saved):
            tensors = saved_by_name(a, saved)
            return list((tensors | {name: change(tensors[name])}).values())

        backward(saved)
        with pytest.raises(ValueError, match="saved must hold layer_inputs, got 3 tensors"):
            backward(saved[:3])
        with pytest.raises(ValueError, match="saved tensor c "):
            backward(changed("c", lambda c: c[:, :2]))
        with pytest.raises(ValueError, match="saved tensor gates"):
            backward(changed("gates", torch.Tensor.float))
        exact = arguments_in_use(exact=True)
        *_, exactly = ops.recode_forward(*exact)
        for change in (lambda t: t[1:], torch.Tensor.int, lambda t: t + 1000):
            with pytest.raises(ValueError, match="saved tensor chosen"):
                backward(changed("chosen", change, exact, exactly), a=exact)
        with pytest.raises(ValueError, match="grad_output must have shape"):
            backward(saved, output[:2])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("signals=nll", "signals"),
        ("exact=maybe", "exact"),
        ("samples=3.5", "samples"),
        ("dropout=x", "dropout"),
        ("dropout", "dropout"),
    ],
)
def test_a_spec_that_cannot_be_read_names_the_field(spec, message):
    with pytest.raises(ValueError, match=message):
        ops.recode_forward(*arguments_in_use()._replace(spec=spec))


def test_a_spec_survives_its_encoding():
    spec = RecoderSpec(
        signal="classifiers", classifier_states=(0, 3), sample_p=0.1, samples=3, exact=True
    )
    assert decode(spec.encode()) == spec
    assert decode(RecoderSpec().encode()) == RecoderSpec()


def test_zero_stride_and_offset_arguments_are_read_correctly():
    """Expanded, sliced and transposed arguments straight to the op."""
    a = arguments_in_use(dropout=0.0, output_dropout=0.0)
    with torch.no_grad():
        want = ops.recode_forward(*a)
        b = a._replace(
            input=torch.cat([a.input] * 2)[4:],
            weights=[w.t().contiguous().t() if w.dim() == 2 else w for w in a.weights],
            decoder_weight=a.decoder_weight.t().contiguous().t(),
            targets=a.targets.t().contiguous().t(),
            step=[a.step[0].t().contiguous().t()],
        )
        got = ops.recode_forward(*b)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
