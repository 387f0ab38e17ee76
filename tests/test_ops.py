"""torch.ops.fused_recoder itself: opcheck, and arguments that must raise and never crash."""

import pytest
import torch
from conftest import forward_arguments, make_inputs, make_pair
from torch.library import opcheck

ops = torch.ops.fused_recoder
F64 = torch.float64


def arguments_in_use(**changes):
    """Arguments of recode_forward by name, those of a gold signal all in use."""
    rnn, _, decoder = make_pair(signal="nll", step="learned")
    x, (h0, c0), y = make_inputs(rnn)
    given = {
        "input": x, "h0": h0, "c0": c0, "weights": [w for layer in rnn.all_weights for w in layer],
        "decoder_weight": decoder.weight, "decoder_bias": decoder.bias, "step": rnn.step(),
        "targets": y, "mask": torch.rand(4, 3) < 0.7, "lengths": torch.tensor([4, 3, 1]),
        "seed": torch.tensor([3]), "signal": "nll", "dropout": 0.2, "output_dropout": 0.1,
        "gate": torch.tensor([2.0], dtype=F64), "loss": True, "save": True,
        "save_step_grads": True, "save_decoder_grads": True, "trace": True,
    }  # fmt: skip
    return forward_arguments(**given)._asdict() | changes


@pytest.mark.parametrize("signal", ["none", "nll", "surprisal", "entropy"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trace": False, "mask": None, "lengths": None, "seed": None, "dropout": 0.0,
         "output_dropout": 0.0, "save_step_grads": False},
        {"targets": None, "loss": False, "recode_c": False},
        {"save_decoder_grads": False, "decoder_bias": None},
        {"exact": True},
        {"exact": True, "targets": None, "loss": False, "gate": None},
    ],
    ids=["all", "bare", "argmax", "no decoder gradient", "exact", "exact, no loss"],
)  # fmt: skip
def test_opcheck_forward(signal, changes):
    arguments = arguments_in_use(signal=signal, **changes)
    if not arguments["recode_c"]:
        arguments["step"] = arguments["step"][:, :1]
    if not arguments["save_decoder_grads"]:
        arguments["decoder_weight"] = arguments["decoder_weight"].detach()
    if not arguments["save_step_grads"]:
        arguments["step"] = arguments["step"].detach()
    opcheck(ops.recode_forward.default, tuple(arguments.values()))


def backward_arguments(a, saved, *, grad_output, grad_h_n=None, grad_nll=None, output=None):
    return (
        grad_output, grad_h_n, None, grad_nll, None, saved, a["input"], a["h0"], a["c0"],
        a["weights"], a["decoder_weight"], a["decoder_bias"], a["classifiers"], a["step"],
        a["step_network"], a["targets"], a["labels"], a["lengths"], a["seed"], output, a["signal"],
        a["argmax"], a["samples"], a["sample_p"], a["mean_logits"], a["classifier_states"],
        a["recode_h"], a["recode_c"], a["dropout"], a["output_dropout"], a["step_kind"], a["time"],
        a["exact"], True, a["save_step_grads"], a["save_decoder_grads"],
    )  # fmt: skip


@pytest.mark.parametrize("exact", [False, True], ids=["detached", "exact"])
def test_opcheck_backward(exact):
    a = arguments_in_use(exact=exact)
    with torch.no_grad():
        output, h_n, *_, saved = ops.recode_forward(*a.values())
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
    opcheck(ops.signal_gradient.default, (hidden, weight, bias, targets, signal))
    bars = (torch.randn(5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64))
    plain = tuple(t.detach() for t in (hidden, weight, bias))
    opcheck(ops.signal_gradient_backward.default, (*bars, *plain, targets, signal))


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
        ({"step": torch.zeros(2, 3, dtype=F64)}, ValueError, r"step must have shape \[L, S\]"),
        ({"step": torch.full((2, 2), torch.nan, dtype=F64)}, ValueError, "step must be finite"),
        ({"step": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "step must be floating"),
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
        ({"signal": "novelty"}, ValueError, "signal must be none, surprisal"),
        ({"recode_h": False, "recode_c": False}, ValueError, "states must name"),
        ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1"),
        ({"output_dropout": -0.1}, ValueError, "output_dropout must be in"),
        ({"output_dropout": float("nan")}, ValueError, "output_dropout must be in"),
    ],
)
def test_bad_input_raises_and_names_the_argument(changes, error, message):
    with torch.no_grad(), pytest.raises(error, match=message):
        ops.recode_forward(*arguments_in_use(**changes).values())


def test_sparse_and_quantized_tensors_do_not_crash():
    for wrong in (torch.zeros(4, 3, 5, dtype=F64).to_sparse(), None, "x"):
        with torch.no_grad(), pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            ops.recode_forward(*arguments_in_use(input=wrong).values())


def test_backward_refuses_tensors_that_are_not_its_own():
    a = arguments_in_use()
    with torch.no_grad():
        output, *_, saved = ops.recode_forward(*a.values())

        def backward(saved, grad_output=output):
            without_loss = a | {"decoder_weight": None, "decoder_bias": None, "targets": None}
            return ops.recode_backward(
                *backward_arguments(without_loss, saved, grad_output=grad_output)
            )

        backward(saved)
        with pytest.raises(ValueError, match="saved must hold 12"):
            backward(saved[:3])
        with pytest.raises(ValueError, match="saved tensor c "):
            backward([*saved[:2], saved[2][:, :2], *saved[3:]])
        with pytest.raises(ValueError, match="saved tensor gates"):
            backward([saved[0].float(), *saved[1:]])
        a["exact"] = True
        *_, exactly = ops.recode_forward(*arguments_in_use(exact=True).values())
        for chosen in (exactly[11][1:], exactly[11].int(), exactly[11] + 1000):
            with pytest.raises(ValueError, match="saved tensor chosen"):
                ops.recode_backward(
                    *backward_arguments(a, [*exactly[:11], chosen], grad_output=output)
                )
        a["exact"] = False
        with pytest.raises(ValueError, match="grad_output must have shape"):
            backward(saved, output[:2])


def test_zero_stride_and_offset_arguments_are_read_correctly():
    """Expanded, sliced and transposed arguments straight to the op."""
    a = arguments_in_use(dropout=0.0, output_dropout=0.0)
    with torch.no_grad():
        want = ops.recode_forward(*a.values())
        b = dict(a)
        b["input"] = torch.cat([a["input"]] * 2)[4:]
        b["weights"] = [w.t().contiguous().t() if w.dim() == 2 else w for w in a["weights"]]
        b["decoder_weight"] = a["decoder_weight"].t().contiguous().t()
        b["targets"] = a["targets"].t().contiguous().t()
        b["step"] = a["step"].t().contiguous().t()
        got = ops.recode_forward(*b.values())
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
