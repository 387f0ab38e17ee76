"""The hand-written backward pass against finite differences, not only against autograd."""

import pytest
import torch
from conftest import (
    SIGNALS,
    STATES,
    forward_arguments,
    make_inputs,
    make_pair,
    relative_error,
    saved_by_name,
)

import fused_recoder as fr


def replayed_lstm(rnn, shifts, masks, live, x, h0, c0, steps, weights):
    """The module's forward pass with its recoding gradients (`shifts` [L, S, T, B, H]), dropout
    masks and lengths replayed as constants."""
    h, c, outputs = list(h0.unbind(0)), list(c0.unbind(0)), []
    per_layer = len(weights) // rnn.num_layers
    for t in range(x.shape[0]):
        below = x[t]
        for l in range(rnn.num_layers):
            w_ih, w_hh, b_ih, b_hh = weights[l * per_layer : (l + 1) * per_layer]
            i, f, g, o = (below @ w_ih.t() + h[l] @ w_hh.t() + b_ih + b_hh).chunk(4, 1)
            cell = f.sigmoid() * c[l] + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            below = hidden if masks[l] is None else hidden * masks[l][t]
            new = {"h": hidden, "c": cell}
            if shifts is not None:
                for s, name in enumerate(rnn.states):
                    new[name] = new[name] - steps[l, s] * shifts[l, s, t]
            inside = live[t].unsqueeze(1)
            h[l] = torch.where(inside, new["h"], h[l])
            c[l] = torch.where(inside, new["c"], c[l])
        if shifts is not None and not rnn.signal.reads_target:
            below = h[-1] if masks[-1] is None else h[-1] * masks[-1][t]
        outputs.append(torch.where(inside, below, 0))
    return torch.stack(outputs), torch.stack(h), torch.stack(c)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("states", STATES, ids="".join)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_detached_backward_is_the_derivative_with_the_recoder_replayed(
    signal, states, layers, dropout
):
    rnn, _, decoder = make_pair(
        input_size=2, hidden=3, layers=layers, vocab=5, signal=signal, states=states,
        step="learned", dropout=dropout, output_dropout=dropout,
    )  # fmt: skip
    x, (h0, c0), y = make_inputs(rnn, T=3, B=2, vocab=5)
    lengths, seed = torch.tensor([3, 2]), torch.tensor([17])
    live = torch.arange(3).unsqueeze(1) < lengths
    between = dropout if layers > 1 else 0.0
    weights = [w for layer in rnn.all_weights for w in layer]

    def arguments(x, h0, c0, steps, *weights):
        return forward_arguments(
            input=x, h0=h0, c0=c0, weights=weights, decoder_weight=decoder.weight,
            decoder_bias=decoder.bias, sizes=steps, targets=y, lengths=lengths, seed=seed,
            signal=signal or "none", recode_h="h" in states, recode_c="c" in states,
            dropout=between, output_dropout=dropout, save=True, step_grad=True,
        )  # fmt: skip

    def fused(*inputs):
        return torch.ops.fused_recoder.recode_forward(*arguments(*inputs))

    steps = rnn.step().detach().requires_grad_()
    inputs = (x, h0, c0, steps, *weights)
    *_, saved = fused(*inputs)
    shifts = saved_by_name(arguments(*inputs), saved)["step_grads"] if signal else None
    masks = [
        None if p == 0 else fr.functional.dropout_mask(seed, stream, p, 3, 2, 3, torch.float64)
        for stream, p in [(1 + l, between) for l in range(layers - 1)] + [(0, dropout)]
    ]

    class Replay(torch.autograd.Function):
        """Forward: the replay. Backward: the engine's."""

        @staticmethod
        def forward(ctx, x, h0, c0, steps, *weights):
            ctx.save_for_backward(x, h0, c0, steps, *weights)
            return replayed_lstm(rnn, shifts, masks, live, x, h0, c0, steps, weights)

        @staticmethod
        def backward(ctx, *cotangents):
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                outputs = fused(*inputs)[:3]
                return torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True)

    for got, want in zip(Replay.apply(*inputs), fused(*inputs), strict=False):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(Replay.apply, inputs)


def test_only_some_outputs_or_inputs_need_gradients():
    rnn, oracle, _ = make_pair(signal="entropy", step="learned")
    x, hx, y = make_inputs(rnn)
    x = x.detach()
    for pick in (0, 1, 2):
        grads = []
        for m in (rnn, oracle):
            output, (h_n, c_n) = m(x, hx, targets=y)
            loss = (output, h_n, c_n)[pick].square().sum()
            wanted = [m.weight_hh_l0, m.step.rho, hx[0]]
            grads.append(torch.autograd.grad(loss, wanted))
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)


def test_frozen_weights_still_train_the_step():
    rnn, oracle, _ = make_pair(signal="nll", step="learned")
    for m in (rnn, oracle):
        for name, p in m.named_parameters():
            p.requires_grad_(name.startswith("step"))
    x, hx, y = make_inputs(rnn)
    x, hx = x.detach(), tuple(s.detach() for s in hx)
    grads = [
        torch.autograd.grad(m(x, hx, targets=y)[0].square().sum(), m.step.rho)[0]
        for m in (rnn, oracle)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("signal", ["nll", "entropy", None])
def test_a_decoder_trains_on_a_frozen_rnn(signal):
    """In detached mode the decoder is a constant of the recoder: nothing arrives there."""
    rnn, oracle, decoder = make_pair(signal=signal)
    x, _, y = make_inputs(rnn)
    grads = []
    for m in (rnn, oracle):
        m.requires_grad_(False)
        output, _ = m(x.detach(), targets=y)
        loss = torch.nn.functional.cross_entropy(decoder(output).flatten(0, 1), y.flatten())
        grads.append(torch.autograd.grad(loss, decoder.weight)[0])
    assert relative_error(*grads) < 1e-10


def test_second_derivatives_are_refused_with_a_way_out():
    rnn, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    output, _ = rnn(x, hx, targets=y)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"reference\.RecodingLSTM"):
        grad.sum().backward()


def test_gradient_of_an_unsaved_forward_is_refused():
    rnn, _, decoder = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    weights = [w for layer in rnn.all_weights for w in layer]
    arguments = forward_arguments(
        input=x, h0=hx[0], c0=hx[1], weights=weights, decoder_weight=decoder.weight,
        decoder_bias=decoder.bias, sizes=rnn.step(), targets=y, signal="nll",
    )  # fmt: skip
    output, *_ = torch.ops.fused_recoder.recode_forward(*arguments)
    with pytest.raises(RuntimeError, match="save=False"):
        output.sum().backward()


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
@pytest.mark.parametrize("states", [("h",), ("h", "c")], ids="".join)
def test_a_small_step_does_not_raise_the_signal(signal, states):
    """The thesis's first theorem, for a step small enough for any of these decoders."""
    rnn, _, _ = make_pair(hidden=16, vocab=50, signal=signal, states=states, step=1e-2)
    x, hx, y = make_inputs(rnn, T=20, B=8, vocab=50)
    _, _, trace = rnn(x, hx, targets=y, return_trace=True)
    assert (trace.delta_after <= trace.delta + 1e-12).all()
    assert (trace.delta_after < trace.delta).double().mean() > 0.95


def test_recoding_only_c_lowers_the_signal_of_the_state_it_would_have_given():
    rnn, _, _ = make_pair(hidden=16, vocab=50, signal="nll", states="c", step=1e-2)
    x, hx, y = make_inputs(rnn, T=20, B=8, vocab=50)
    _, _, trace = rnn(x, hx, targets=y, return_trace=True)
    assert (trace.delta_after <= trace.delta + 1e-12).all()
    assert (trace.delta_after < trace.delta).any()
