"""FusedRecodingLSTM as a citizen of PyTorch: a drop-in for nn.LSTM that can be saved, copied,
moved, packed and compiled."""

import copy
import io
import pickle

import pytest
import torch
from conftest import make_inputs, make_pair
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import fused_recoder as fr


class Model(nn.Module):
    """The usual word-level language model, with its LSTM exchanged."""

    def __init__(self, rnn_class=fr.FusedRecodingLSTM, tied=False, dtype=None, **options):
        super().__init__()
        self.encoder = nn.Embedding(11, 7, dtype=dtype)
        self.decoder = nn.Linear(7, 11, dtype=dtype)
        if tied:
            self.decoder.weight = self.encoder.weight
        self.rnn = rnn_class(7, 7, 2, decoder=self.decoder, dtype=dtype, **options)

    def forward(self, tokens, targets, hx=None):
        output, hx = self.rnn(self.encoder(tokens), hx, targets=targets)
        return nn.functional.cross_entropy(self.decoder(output).flatten(0, 1), targets.flatten())


TOKENS = torch.arange(12).reshape(4, 3) % 11
TARGETS = (TOKENS * 3 + 1) % 11


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"signal": None}, {"signal": "nll", "step": 0}, {"signal": "entropy", "step": 0}]
)
def test_without_recoding_it_is_nn_lstm(layers, options, threads):
    lstm = nn.LSTM(5, 7, layers, dtype=torch.float64)
    decoder = nn.Linear(7, 11, dtype=torch.float64)
    ours = fr.FusedRecodingLSTM.from_lstm(lstm, decoder, **options)
    x, hx, y = make_inputs(ours)
    torch.testing.assert_close(ours(x, hx, targets=y), lstm(x, hx), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours(x, targets=y), lstm(x), rtol=1e-12, atol=1e-14)
    cotangent = torch.randn(4, 3, 7, dtype=torch.float64)
    wanted = [x, *hx, *lstm.parameters()]
    got = torch.autograd.grad(ours(x, hx, targets=y)[0], wanted, cotangent)
    want = torch.autograd.grad(lstm(x, hx)[0], wanted, cotangent)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_initialisation_and_parameter_names_are_those_of_nn_lstm():
    torch.manual_seed(5)
    lstm = nn.LSTM(5, 7, 2)
    torch.manual_seed(5)
    ours = fr.FusedRecodingLSTM(5, 7, 2, decoder=None, signal=None)
    assert ours.state_dict().keys() == lstm.state_dict().keys()
    for name, value in lstm.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    ours.load_state_dict(nn.LSTM(5, 7, 2).state_dict())


def test_from_lstm_shares_weights_and_settings():
    lstm = nn.LSTM(5, 7, 2, batch_first=True, dropout=0.3, bias=False).eval()
    ours = fr.FusedRecodingLSTM.from_lstm(lstm, nn.Linear(7, 11), signal="entropy", step=0.2)
    assert ours.weight_hh_l1 is lstm.weight_hh_l1
    assert (ours.batch_first, ours.dropout, ours.bias, ours.training) == (True, 0.3, False, False)
    for unsupported in (nn.LSTM(5, 7, bidirectional=True), nn.LSTM(5, 7, proj_size=3)):
        with pytest.raises(NotImplementedError):
            fr.FusedRecodingLSTM.from_lstm(unsupported, nn.Linear(7, 11))


@pytest.mark.parametrize("name", ["bidirectional", "proj_size"])
def test_unsupported_options_of_nn_lstm_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        fr.FusedRecodingLSTM(5, 7, decoder=nn.Linear(7, 11), **{name: 1})
    fr.FusedRecodingLSTM(5, 7, decoder=nn.Linear(7, 11), **{name: 0})


def test_arguments_of_nn_lstm_may_come_by_position():
    given = (5, 7, 2, False, True, 0.25)
    ours, lstm = fr.FusedRecodingLSTM(*given, decoder=nn.Linear(7, 11)), nn.LSTM(*given)
    for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size"):
        assert getattr(ours, name) == getattr(lstm, name)
    assert ours.flatten_parameters() is None


def test_the_decoder_is_held_but_not_registered():
    model = Model(step="learned")
    assert model.rnn.decoder is model.decoder
    assert set(model.rnn.state_dict()) == {
        *(f"{k}_l{n}" for n in (0, 1) for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
        "step.rho",
    }
    ids = [id(p) for p in (*model.rnn.parameters(), *model.decoder.parameters())]
    assert len(ids) == len(set(ids))
    assert model.rnn.step.rho.no_weight_decay


def test_deep_copies_share_the_copied_decoder():
    model = copy.deepcopy(Model())
    assert model.rnn.decoder is model.decoder
    alone = copy.deepcopy(model.rnn)
    assert alone.decoder is not model.decoder
    with torch.no_grad():
        model.decoder.weight.fill_(0.5)
    assert (model.rnn.decoder.weight == 0.5).all()


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickling_keeps_them_shared(how):
    model = Model(signal="surprisal", step="learned")
    if how == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    assert again.rnn.decoder is again.decoder
    assert torch.equal(again(TOKENS, TARGETS), model(TOKENS, TARGETS))


@pytest.mark.parametrize(
    "options",
    [
        {"step": "learned"},
        {"signal": "surprisal", "step": "backtracking", "gate": 0.5},
        {"signal": "entropy", "step": "predicted"},
        {"signal": fr.signals.MCDropout(num_samples=2), "step": "learned"},
        {"signal": fr.signals.Variational(num_samples=2)},
        {"signal": "ensemble", "decoder": fr.EnsembleDecoder(7, 11, num_members=2)},
        {"signal": [fr.signals.Classifier(torch.ones(7))]},
        {"signal": None},
    ],
    ids=lambda o: f"{type(o['signal']).__name__}_{o.get('signal')}" if "signal" in o else "nll",
)
def test_a_model_saved_whole_is_loaded_without_further_ado(options, tmp_path):
    """As torch.load does by default, which builds registered classes alone."""
    model = fr.RecodingLanguageModel(11, 7, 7, 2, **options).eval()
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=True)
    assert again.rnn.decoder is again.decoder
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_the_recoder_follows_an_exchanged_decoder():
    """Also in models that are not ours: the new one is trained and recoded for."""
    for model in (Model(), fr.RecodingLanguageModel(11, 7, 7, 2)):
        new = nn.Linear(7, 11)
        model.decoder = new
        assert model.rnn.decoder is new
        copied = copy.deepcopy(model)
        copied.decoder = nn.Linear(7, 11)
        assert copied.rnn.decoder is copied.decoder
        assert model.rnn.decoder is new
        with pytest.raises((TypeError, ValueError), match="decoder must"):
            model.decoder = nn.Linear(8, 11)
        assert model.decoder is model.rnn.decoder is new


def test_exchanging_something_else_leaves_the_recoder_alone():
    model, other = Model(), Model()
    decoder = model.rnn.decoder
    model.encoder = nn.Embedding(11, 7)
    other.decoder = nn.Linear(7, 11)
    assert model.rnn.decoder is decoder


@pytest.mark.parametrize("make", [Model, lambda: fr.RecodingLanguageModel(11, 7, 7, 2)])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantizing_is_refused(make):
    model = make()
    with pytest.raises(NotImplementedError, match="a model that recodes cannot be quantized"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert type(model.decoder) is nn.Linear


def test_state_dict_round_trip():
    model, other = Model(step="learned"), Model(step="learned")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS, TARGETS), model(TOKENS, TARGETS))


def test_moving_to_another_dtype_moves_the_step():
    model = Model(step=0.25).double()
    assert model.rnn.step().dtype == torch.float64
    assert torch.isfinite(model(TOKENS, TARGETS))


def test_functional_call_swaps_the_decoder_too():
    model = Model(dtype=torch.float64)
    other = Model(dtype=torch.float64)
    swapped = torch.func.functional_call(model, dict(other.named_parameters()), (TOKENS, TARGETS))
    torch.testing.assert_close(swapped, other(TOKENS, TARGETS), rtol=1e-13, atol=0)
    assert not torch.allclose(swapped, model(TOKENS, TARGETS))


def test_a_replica_uses_its_own_weights_and_copies_the_decoder():
    """What nn.DataParallel does, by hand: there is one device here."""
    model = Model(dtype=torch.float64)
    replica = model.rnn._replicate_for_data_parallel()
    for name, p in model.rnn.named_parameters():
        setattr(replica, name, p.clone())
    x = model.encoder(TOKENS)
    output, _ = replica(x, targets=TARGETS)
    torch.testing.assert_close(output, model.rnn(x, targets=TARGETS)[0])


@pytest.mark.parametrize("signal", ["nll", "entropy"])
def test_tied_weights_get_their_gradient_from_every_use(signal):
    ours = Model(tied=True, signal=signal, dtype=torch.float64)
    oracle = Model(fr.reference.RecodingLSTM, tied=True, signal=signal, dtype=torch.float64)
    oracle.load_state_dict(ours.state_dict())
    for m in (ours, oracle):
        m(TOKENS, TARGETS).backward()
    got, want = ours.encoder.weight.grad, oracle.encoder.weight.grad
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_no_label_leaks_into_the_prediction_of_its_own_step():
    for signal in ("nll", "surprisal"):
        rnn, _, _ = make_pair(signal=signal, step=5.0)
        x, hx, y = make_inputs(rnn)
        output, _ = rnn(x, hx, targets=y)
        changed = y.clone()
        changed[2] = (y[2] + 1) % 11
        other, _ = rnn(x, hx, targets=changed)
        assert torch.equal(other[:3], output[:3])
        assert not torch.equal(other[3], output[3])


def test_output_is_recoded_for_signals_without_labels():
    rnn, _, _ = make_pair(signal="entropy", layers=1)
    x, hx, y = make_inputs(rnn)
    output, (h_n, _) = rnn(x, hx)
    assert torch.equal(output[-1], h_n[-1])
    rnn, _, _ = make_pair(signal="nll", layers=1)
    output, (h_n, _) = rnn(x, hx, targets=y)
    assert not torch.equal(output[-1], h_n[-1])


@pytest.mark.parametrize("signal", [None, "nll", "entropy"])
def test_batch_first_and_unbatched_are_views_of_the_same(signal):
    rnn, _, _ = make_pair(signal=signal)
    x, (h0, c0), y = make_inputs(rnn)
    mask = torch.rand(4, 3) < 0.5
    output, (h_n, c_n), trace = rnn(x, (h0, c0), targets=y, recode_mask=mask, return_trace=True)
    rnn.batch_first = True
    turned, states, turned_trace = rnn(
        x.transpose(0, 1), (h0, c0), targets=y.t(), recode_mask=mask.t(), return_trace=True
    )
    torch.testing.assert_close(turned.transpose(0, 1), output, rtol=0, atol=0)
    torch.testing.assert_close(states, (h_n, c_n), rtol=0, atol=0)
    torch.testing.assert_close(turned_trace, trace, rtol=0, atol=0)
    rnn.batch_first = False
    for b in range(3):
        one, (h_1, c_1), trace_1 = rnn(
            x[:, b], (h0[:, b], c0[:, b]), targets=y[:, b], recode_mask=mask[:, b],
            return_trace=True,
        )  # fmt: skip
        torch.testing.assert_close(one, output[:, b], rtol=1e-13, atol=1e-15)
        torch.testing.assert_close((h_1, c_1), (h_n[:, b], c_n[:, b]), rtol=1e-13, atol=1e-15)
        for got, want in zip(trace_1, trace, strict=True):
            torch.testing.assert_close(got, want[..., b], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("signal", ["nll", "entropy"])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("packed_targets", [True, False])
def test_packed_sequences(signal, sort, packed_targets):
    """Equals reading every sequence alone, and is packed like the input."""
    rnn, _, _ = make_pair(signal=signal)
    lengths = [5, 3, 1] if sort else [1, 5, 3]
    xs = [torch.randn(n, 5, dtype=torch.float64) for n in lengths]
    ys = [torch.randint(11, (n,)) for n in lengths]
    packed = pack_sequence(xs, enforce_sorted=sort)
    targets = pack_sequence(ys, enforce_sorted=sort)
    if not packed_targets:
        targets = pad_packed_sequence(targets, padding_value=3)[0]
    output, (h_n, c_n) = rnn(packed, targets=targets)
    like, _ = nn.LSTM(5, 7, dtype=torch.float64)(packed)
    for got, want in zip(output[1:], like[1:], strict=True):
        assert (got is None and want is None) or torch.equal(got, want)
    padded, _ = pad_packed_sequence(output)
    for b, n in enumerate(lengths):
        alone, (h_1, c_1) = rnn(xs[b], targets=ys[b])
        torch.testing.assert_close(padded[:n, b], alone, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((h_n[:, b], c_n[:, b]), (h_1, c_1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("signal", ["nll", "entropy"])
def test_ragged_gradients_are_those_of_the_sequences_alone(signal):
    rnn, _, _ = make_pair(signal=signal, step="learned")
    x, _, y = make_inputs(rnn, T=5)
    lengths = torch.tensor([2, 5, 1])
    output, (h_n, _) = rnn(x, targets=y, lengths=lengths)
    parameters = list(rnn.parameters())
    together = torch.autograd.grad(output.square().sum() + h_n.sum(), [x, *parameters])
    alone = []
    for b, n in enumerate(lengths):
        out, (h, _) = rnn(x[:n, b], targets=y[:n, b])
        alone.append(torch.autograd.grad(out.square().sum() + h.sum(), [x, *parameters]))
    summed = [sum(g) for g in zip(*alone, strict=True)]
    torch.testing.assert_close(list(together), summed, rtol=1e-10, atol=1e-13)
    assert (output[2:, 0] == 0).all()


def test_padding_may_hold_anything():
    rnn, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    lengths = torch.tensor([4, 2, 1])
    want = rnn(x, hx, targets=y, lengths=lengths)
    x2, y2 = x.detach().clone(), y.clone()
    x2[2:, 1], x2[1:, 2] = torch.nan, torch.inf
    y2[2:, 1], y2[1:, 2] = 10**6, -7
    torch.testing.assert_close(rnn(x2, hx, targets=y2, lengths=lengths), want, rtol=0, atol=0)


def test_masked_and_ignored_positions_are_not_recoded():
    rnn, _, _ = make_pair(signal="nll", layers=1)
    plain, _, _ = make_pair(signal=None, layers=1)
    plain.load_state_dict(rnn.state_dict())
    x, hx, y = make_inputs(rnn)
    nowhere = torch.zeros(4, 3, dtype=torch.bool)
    got = rnn(x, hx, targets=y, recode_mask=nowhere)
    torch.testing.assert_close(got, plain(x, hx), rtol=0, atol=0)
    got = rnn(x, hx, targets=torch.full_like(y, -100))
    torch.testing.assert_close(got, plain(x, hx), rtol=0, atol=0)
    _, _, trace = rnn(x, hx, targets=y, recode_mask=nowhere, return_trace=True)
    assert (trace.step_size == 0).all()
    assert (trace.grad_norm == 0).all()
    torch.testing.assert_close(trace.delta_after, trace.delta)


def test_under_no_grad_nothing_is_saved():
    rnn, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)

    def boom(_):
        raise AssertionError("a tensor was saved")

    with torch.autograd.graph.saved_tensors_hooks(boom, lambda t: t):
        with torch.no_grad():
            output, _ = rnn(x, hx, targets=y)
        with pytest.raises(AssertionError, match="saved"):
            rnn(x, hx, targets=y)
    assert output.grad_fn is None


@pytest.mark.parametrize("signal", [None, "nll", "surprisal", "entropy"])
@pytest.mark.parametrize("lengths", [None, [4, 2, 1]])
def test_compiled_and_eager_agree(signal, lengths):
    torch._dynamo.reset()
    rnn, _, _ = make_pair(signal=signal, step="learned")
    x, hx, y = make_inputs(rnn)
    lengths = None if lengths is None else torch.tensor(lengths)
    compiled = torch.compile(rnn, fullgraph=True)
    wanted = [x, *hx, *(p for p in rnn.parameters() if p is not rnn.step.rho or signal)]
    results = []
    for m in (rnn, compiled):
        output, (h_n, c_n) = m(x, hx, targets=y, lengths=lengths)
        loss = output.square().sum() + h_n.sum() + c_n.prod()
        results.append((output, h_n, c_n, torch.autograd.grad(loss, wanted)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-13)


def test_compiled_language_model_step():
    torch._dynamo.reset()
    model = Model(dtype=torch.float64, signal="surprisal")
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS, TARGETS), model(TOKENS, TARGETS))


def test_repr_names_what_matters():
    rnn, _, _ = make_pair(signal="surprisal", step=0.3, states="c", dropout=0.1)
    text = repr(rnn)
    for part in ("5, 7", "num_layers=2", "dropout=0.1", "states=('c',)", "Surprisal", "Fixed(0.3)"):
        assert part in text
    assert "Linear" not in text  # the decoder belongs to someone else


def test_trace_has_the_documented_shapes():
    rnn, _, _ = make_pair(signal="nll", layers=3)
    x, hx, y = make_inputs(rnn)
    _, _, trace = rnn(x, hx, targets=y, return_trace=True)
    assert trace.delta.shape == trace.delta_after.shape == (4, 3)
    assert trace.step_size.shape == trace.grad_norm.shape == (3, 2, 4, 3)
    assert not any(t.requires_grad for t in trace)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("beyond", [0, 2])
def test_targets_of_a_packed_input_may_be_padded_as_it_was(batch_first, beyond):
    """Also where the batch was padded beyond its longest sequence."""
    rnn, _, _ = make_pair(signal="nll", batch_first=batch_first)
    lengths = torch.tensor([2, 4, 1])
    x = torch.randn(3, 4 + beyond, 5, dtype=torch.float64)
    y = torch.randint(11, (3, 4 + beyond))
    if not batch_first:
        x, y = x.transpose(0, 1), y.t()
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
    output, states = rnn(packed, targets=y)
    want, want_states = rnn(x, targets=y, lengths=lengths)
    padded, _ = pad_packed_sequence(output, batch_first, total_length=4 + beyond)
    torch.testing.assert_close(padded, want)
    torch.testing.assert_close(states, want_states)
    with pytest.raises(ValueError, match="targets must have shape"):
        rnn(packed, targets=y[:2, :2])


def test_packing_accepts_a_mask():
    rnn, oracle, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    packed = pack_padded_sequence(x, torch.tensor([4, 3, 2]))
    mask = torch.rand(4, 3) < 0.5
    got, want = (m(packed, hx, targets=y, recode_mask=mask) for m in (rnn, oracle))
    torch.testing.assert_close(got[0].data, want[0].data, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-13)


def test_fake_tensors_give_shapes():
    with FakeTensorMode():
        rnn = fr.FusedRecodingLSTM(3, 4, 2, decoder=nn.Linear(4, 7))
        output, (h, c) = rnn(torch.randn(5, 2, 3), targets=torch.zeros(5, 2, dtype=torch.int64))
    assert (output.shape, h.shape, c.shape) == ((5, 2, 4), (2, 2, 4), (2, 2, 4))


def test_is_built_without_memory():
    rnn = fr.FusedRecodingLSTM(3, 4, 2, decoder=nn.Linear(4, 7), device="meta")
    assert all(t.is_meta for t in (rnn.weight_hh_l1, rnn.step()))
