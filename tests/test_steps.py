"""Step sizes and gates: their guarantees, their bounds, what they leave alone."""

import copy
import pickle

import pytest
import torch
from conftest import make_inputs
from test_signals import make_pair
from torch import nn
from variants import SIGNALS, STEPS, build, classifies

import fused_recoder as fr
from fused_recoder import steps
from fused_recoder._versions import Versions
from fused_recoder.signals.formulas import entropy, log_mean_softmax
from fused_recoder.signals.mixture import mixture_bound

BOUNDED = [s for s in SIGNALS if s != "none" and not s.startswith("custom")]
ROUNDING = 1e-12


def traced(rnn, T=15, B=6, vocab=11, **arguments):
    x, hx, y = make_inputs(rnn, T, B, vocab)
    return rnn(x, hx, targets=y, return_trace=True, **arguments)[2]


def labelled(signal, T=15, B=6):
    return {"labels": torch.randint(2, (T, B))} if classifies(signal) else {}


@pytest.mark.parametrize("signal", BOUNDED)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0], ids="decoder{}".format)
def test_a_lipschitz_step_never_raises_the_signal(signal, spread):
    if signal == "classifiers":
        pytest.skip("one of them reads c")
    rnn, _, decoder = make_pair(signal, "lipschitz", states=("h",))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(spread)
    trace = traced(rnn, **labelled(signal))
    assert (trace.delta_after <= trace.delta + ROUNDING).all()
    assert (trace.delta_after < trace.delta).double().mean() > 0.5
    assert (trace.step_size > 0).any()


@pytest.mark.parametrize("signal", [s for s in SIGNALS if s != "none"])
@pytest.mark.parametrize("states", [("h",), ("c",), ("h", "c")], ids="".join)
def test_backtracking_never_raises_the_signal(signal, states):
    if signal == "classifiers" and states != ("h", "c"):
        pytest.skip("they read h and c")
    if signal == "classifier" and "h" not in states:
        pytest.skip("it reads h")
    rnn, _, _ = make_pair(signal, "backtracking", states=states)
    rnn.step.value.fill_(1024.0)
    rnn.step.trials = 14
    trace = traced(rnn, **labelled(signal))
    assert (trace.delta_after <= trace.delta).all()
    assert (trace.delta_after < trace.delta).double().mean() > 0.5
    sizes = trace.step_size.unique()
    allowed = torch.tensor([0.0, *(1024 * 0.5**i for i in range(14))], dtype=torch.float64)
    assert torch.isin(sizes, allowed).all()
    if signal == "nll" and "h" in states:
        # It did have to look. (Entropies and bounded signals fall with the largest of steps.)
        assert sizes[sizes > 0].min() < 1024


def test_backtracking_takes_larger_steps_than_the_bound_allows():
    sizes = {}
    for step in ("lipschitz", "backtracking"):
        rnn, _, _ = make_pair("nll", step, states=("h",))
        sizes[step] = traced(rnn).step_size.mean()
    assert sizes["backtracking"] > 2 * sizes["lipschitz"]


def curvature(delta, h):
    """The largest eigenvalue of d^2(delta)/dh^2."""
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(delta, h)).max()


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_bounds_are_above_every_curvature_found(signal):
    """States and decoders of all sizes, and states pushed towards large curvature."""
    signal, closest = fr.signals.as_signal(signal), 0.0
    for seed in range(60):
        torch.manual_seed(seed)
        vocab, hidden = (2, 3, 5, 40)[seed % 4], (1, 2, 6)[seed % 3]
        weight = torch.randn(vocab, hidden, dtype=torch.float64) * 10 ** (seed % 5 / 2 - 1)
        bias = torch.randn(vocab, dtype=torch.float64) * (seed % 4)
        y = torch.tensor([seed % vocab])
        h = torch.randn(hidden, dtype=torch.float64)

        def delta(h, weight=weight, bias=bias, y=y):
            return signal.value((weight @ h + bias).unsqueeze(0), y).squeeze(0)

        limit = signal.bound(weight)
        for _ in range(15):
            found = curvature(delta, h)
            assert found <= limit
            closest = max(closest, (found / limit).item())
            h = h + torch.randn_like(h) / weight.norm()
    assert closest > 0.05  # and they are not absurdly far above


@pytest.mark.parametrize("samples", [2, 5])
def test_the_bound_of_a_mixture_is_above_every_curvature_found(samples):
    closest = 0.0
    for seed in range(30):
        torch.manual_seed(seed)
        vocab, hidden = (2, 5, 40)[seed % 3], (1, 3)[seed % 2]
        weights = torch.randn(samples, vocab, hidden, dtype=torch.float64) * (1 + seed % 5)
        h = torch.randn(hidden, dtype=torch.float64)

        def delta(h, weights=weights):
            return entropy(log_mean_softmax(weights @ h))

        limit = mixture_bound(weights, samples)
        for _ in range(15):
            found = curvature(delta, h)
            assert found <= limit
            closest = max(closest, (found / limit).item())
            h = h + torch.randn_like(h) / weights.norm()
    assert closest > 0.01


def test_lipschitz_follows_the_decoder_and_is_computed_only_when_it_changes(monkeypatch):
    rnn, _, decoder = make_pair("nll", "lipschitz")
    calls = []
    original = rnn.signal.bounds
    monkeypatch.setattr(rnn.signal, "bounds", lambda rnn: calls.append(1) or original(rnn))
    first = traced(rnn).step_size[0, 0, 0, 0]
    traced(rnn)
    assert len(calls) == 1
    with torch.no_grad():
        decoder.weight.mul_(2)
    second = traced(rnn).step_size[0, 0, 0, 0]
    assert len(calls) == 2
    torch.testing.assert_close(second, first / 4, rtol=1e-12, atol=0)


class Scaled(nn.Module):
    """A parametrization that another value can be put into."""

    factor = 1.0

    def forward(self, weight):
        return weight * self.factor


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
def test_lipschitz_follows_a_parametrized_decoder(cls):
    """Its weight is made anew at every access, and often at the same place."""
    decoder = nn.Linear(7, 11, dtype=torch.float64)
    scaled = Scaled()
    nn.utils.parametrize.register_parametrization(decoder, "weight", scaled)
    rnn = cls(5, 7, 2, decoder=decoder, signal="nll", step="lipschitz", dtype=torch.float64)
    first = rnn.step.sizes(rnn).clone()
    for factor in (2.0, 4.0, 8.0):
        scaled.factor = factor
        torch.testing.assert_close(rnn.step.sizes(rnn), first / factor**2, rtol=1e-12, atol=0)
    trace = traced(rnn)
    torch.testing.assert_close(trace.step_size[0, 0, 0, 0], first[0, 0] / 64, rtol=1e-12, atol=0)


def test_versions_know_a_tensor_from_another_at_its_place():
    weight = torch.zeros(3)
    versions = Versions([weight])
    assert versions.hold_for([weight])
    assert not versions.hold_for([weight.detach()])  # the same memory, the same version
    assert not versions.hold_for([])
    weight.add_(1)
    assert not versions.hold_for([weight])
    parameter = nn.Parameter(torch.zeros(3))
    versions = Versions([parameter])
    parameter.data = torch.ones(3)
    assert not versions.hold_for([parameter])


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
def test_lipschitz_trains_after_inference(cls):
    rnn = cls(5, 7, decoder=nn.Linear(7, 11), signal="nll", step="lipschitz")
    x, y = torch.randn(4, 3, 5), torch.randint(11, (4, 3))
    with torch.inference_mode():
        inferred, _ = rnn(x, targets=y)
    output, _ = rnn(x, targets=y)
    assert torch.equal(output, inferred)
    output.sum().backward()
    assert rnn.weight_hh_l0.grad.abs().sum() > 0


def test_lipschitz_reads_weights_made_in_inference_mode_every_time():
    with torch.inference_mode():
        decoder = nn.Linear(7, 11, dtype=torch.float64)
        rnn = fr.FusedRecodingLSTM(5, 7, decoder=decoder, step="lipschitz", dtype=torch.float64)
        first = rnn.step.sizes(rnn).clone()
        decoder.weight.mul_(2)
        torch.testing.assert_close(rnn.step.sizes(rnn), first / 4, rtol=1e-12, atol=0)


def test_what_lipschitz_knows_is_not_saved():
    rnn, _, decoder = make_pair("nll", "lipschitz")
    traced(rnn)
    alone = copy.deepcopy(rnn.step)
    assert alone._known is None
    assert rnn.step._known is not None
    assert len(pickle.dumps(rnn.step)) < 4 * decoder.weight.nbytes + 1000


def test_lipschitz_allows_for_output_dropout():
    rnn, _, _ = make_pair("nll", "lipschitz", states=("h",), output_dropout=0.6)
    trace = traced(rnn)
    assert (trace.delta_after <= trace.delta + ROUNDING).all()
    training = trace.step_size[0, 0, 0, 0]
    rnn.eval()
    evaluation = traced(rnn).step_size[0, 0, 0, 0]
    torch.testing.assert_close(evaluation, training / 0.4**2, rtol=1e-12, atol=0)


def test_lipschitz_knows_its_limits():
    rnn, _, _ = make_pair("custom", "fixed")
    with pytest.raises(ValueError, match="no bound for the signal 'custom'"):
        steps.Lipschitz().sizes(rnn)


EXACT = {
    "number": lambda: 0.3,
    "dict": lambda: {"h": 0.3, "c": 0.3},
    "tensor": lambda: torch.full((2, 2), 0.3, dtype=torch.float64),
    "learned": lambda: steps.Learned(0.3),
    "backtracking": lambda: steps.Backtracking(0.3),
}


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
@pytest.mark.parametrize("step", EXACT)
def test_a_step_is_as_exact_as_its_module(cls, step):
    decoder = nn.Linear(7, 11, dtype=torch.float64)
    built = cls(5, 7, 2, decoder=decoder, step=EXACT[step](), dtype=torch.float64)
    made_double = cls(5, 7, 2, decoder=decoder, step=EXACT[step]()).double()
    there_and_back = cls(5, 7, 2, decoder=decoder, step=EXACT[step]()).half().double()
    from_meta = cls(
        5, 7, 2, decoder=decoder, step=EXACT[step](), device="meta", dtype=torch.float64
    )
    from_meta.to_empty(device="cpu")
    for rnn in (built, made_double, there_and_back, from_meta, copy.deepcopy(made_double)):
        sizes = rnn.step()
        assert sizes.dtype == torch.float64
        assert (sizes - 0.3).abs().max() < 1e-15
    assert built.float().step().dtype == torch.float32


@pytest.mark.parametrize("step", EXACT)
def test_what_somebody_put_into_a_step_stays(step):
    rnn = fr.FusedRecodingLSTM(5, 7, 2, decoder=nn.Linear(7, 11), step=EXACT[step]())
    (held,) = [*rnn.step.parameters(), *rnn.step.buffers()]
    with torch.no_grad():
        held[1, 0] = 0.7
    before = held.detach().clone()
    rnn.double()
    (held,) = [*rnn.step.parameters(), *rnn.step.buffers()]
    assert torch.equal(held, before.double())


def test_a_step_moves_between_devices_before_and_after_it_is_bound():
    step = steps.Learned(0.3).double()
    rnn = fr.FusedRecodingLSTM(5, 7, decoder=nn.Linear(7, 11), step=step)
    assert rnn.step().dtype == torch.float32
    assert rnn.to("meta").step().is_meta


def test_predicted_steps_see_their_own_state_and_train():
    rnn, _, _ = make_pair("nll", "predicted")
    x, hx, y = make_inputs(rnn)
    _, (h_n, _), trace = rnn(x, hx, targets=y, return_trace=True)
    assert (trace.step_size > 0).all()
    assert trace.step_size.flatten().unique().numel() > trace.step_size.numel() / 2
    (h_n.square().sum()).backward()
    assert all(p.grad.norm() > 0 for p in rnn.step.networks[3].parameters())
    assert all(p.no_weight_decay for p in rnn.step.parameters())


def test_predicted_steps_start_near_init():
    rnn = fr.FusedRecodingLSTM(
        5, 7, decoder=nn.Linear(7, 11), step=steps.Predicted((30, 10), init=0.3)
    )
    x, y = torch.randn(10, 20, 5), torch.randint(11, (10, 20))
    _, _, trace = rnn(x, targets=y, return_trace=True)
    assert 0.15 < trace.step_size.mean() < 0.6


def test_state_dicts_hold_the_step():
    rnn, _, _ = make_pair("nll", "predicted")
    extra = set(rnn.state_dict()) - set(nn.LSTM(5, 7, 2).state_dict())
    assert extra
    assert all(name.startswith("step.") for name in extra)


# ----------------------------------------------------------------------------- gate and probability


def test_a_gate_recodes_only_above_its_threshold():
    rnn, _, _ = make_pair("nll", "fixed", gate=2.4)
    trace = traced(rnn)
    opened = trace.delta > 2.4
    assert 0.05 < opened.double().mean() < 0.95
    assert ((trace.step_size[0, 0] > 0) == opened).all()
    assert torch.equal(trace.skipped, ~opened)
    assert trace.skipped_fraction == (~opened).double().mean()
    assert torch.equal(trace.delta_after[~opened], trace.delta[~opened])


def test_a_quantile_gate_follows_training_and_is_saved():
    rnn, _, _ = make_pair("nll", "fixed", gate=fr.Gate(quantile=0.7, momentum=0.5))
    rnn.eval()
    assert traced(rnn).skipped_fraction == 0  # nothing known yet
    assert torch.isinf(rnn.gate.threshold).all()
    rnn.train()
    for _ in range(15):
        traced(rnn)
    rnn.eval()
    threshold = rnn.gate.threshold.clone()
    skipped = torch.stack([traced(rnn).skipped_fraction for _ in range(10)]).mean()
    assert abs(skipped - 0.7) < 0.1
    assert torch.equal(rnn.gate.threshold, threshold)
    other, _, _ = make_pair("nll", "fixed", gate=fr.Gate(quantile=0.7))
    other.load_state_dict(rnn.state_dict())
    assert torch.equal(other.gate.threshold, threshold)


def test_a_gate_ignores_what_does_not_count():
    gate = fr.Gate(quantile=0.5)
    delta = torch.tensor([[1.0, 100.0], [2.0, 3.0]])
    gate.update(delta, torch.tensor([[True, False], [True, True]]))
    assert gate.threshold.item() == 2.0
    gate.update(delta, torch.zeros(2, 2, dtype=torch.bool))  # nothing to learn from
    assert gate.threshold.item() == 2.0


def test_probability_recodes_a_share_in_training_and_all_in_evaluation():
    rnn, oracle, _ = make_pair("nll", "fixed", probability=0.3)
    trace = traced(rnn, T=60, B=20)
    assert abs(trace.skipped_fraction - 0.7) < 4 * (0.21 / 1200) ** 0.5
    rnn.eval()
    assert traced(rnn).skipped_fraction == 0
    rnn.probability = (1.0, 0.5)
    assert abs(traced(rnn, T=60, B=20).skipped_fraction - 0.5) < 0.06
    rnn.probability = 0.5  # a schedule may change it
    oracle.probability = 0.5
    rnn.train()
    x, hx, y = make_inputs(rnn)
    results = []
    for module in (rnn, oracle):
        torch.manual_seed(3)
        results.append(module(x, hx, targets=y)[1])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: fr.signals.MCDropout(0), ValueError, "num_samples must be .* got 0"),
        (lambda: fr.signals.MCDropout(2.5), ValueError, "num_samples must be"),
        (lambda: fr.signals.MCDropout(2, 1.0), ValueError, r"p must be in \[0, 1\), got 1.0"),
        (lambda: fr.signals.MCDropout(2, -0.1), ValueError, "p must be in"),
        (lambda: fr.signals.MCDropout(2, 0.1, "row"), ValueError, "mask must be 'unit'"),
        (lambda: fr.signals.MCDropout(prior_scale=-1), ValueError, "prior_scale must be positive"),
        (lambda: fr.signals.Variational(0), ValueError, "num_samples must be"),
        (lambda: fr.signals.Variational(2, 1.5), ValueError, "p must be in"),
        (lambda: fr.signals.Classifier(torch.zeros(2, 2, 2)), ValueError, "weight must be"),
        (lambda: fr.signals.Classifier(torch.zeros(3, 7), torch.zeros(2)), ValueError, "bias must"),
        (lambda: fr.signals.Classifier(torch.zeros(7), state="x"), ValueError, "state must be"),
        (lambda: fr.signals.Custom("nll"), TypeError, "fn must be callable"),
        (lambda: fr.EnsembleDecoder(7, 11, 0), ValueError, "num_members must be a positive int"),
        (lambda: fr.EnsembleDecoder(7, 11, prior_scale=0.0), ValueError, "prior_scale must be"),
        (lambda: fr.EnsembleDecoder(7, 11, predict="max"), ValueError, "predict must be"),
        (lambda: fr.EnsembleDecoder(7, 11, anchor="none"), ValueError, "anchor must be"),
        (lambda: fr.EnsembleDecoder(7, 11).anchor_loss(), ValueError, "needs dataset_size"),
        (lambda: steps.Predicted((0,)), ValueError, "hidden must be positive ints"),
        (lambda: steps.Predicted(init=-1.0), ValueError, "init must be positive"),
        (lambda: steps.Lipschitz(0.0), ValueError, "safety must be in"),
        (lambda: steps.Backtracking(float("nan")), ValueError, "initial must be positive"),
        (lambda: steps.Backtracking(shrink=1.0), ValueError, "shrink must be in"),
        (lambda: steps.Backtracking(trials=0), ValueError, "trials must be a positive int"),
        (lambda: fr.Gate(), ValueError, "either threshold or quantile"),
        (lambda: fr.Gate(quantile=2.0), ValueError, "quantile must be in"),
        (lambda: fr.Gate(float("nan")), ValueError, "threshold must be a number"),
    ],
)
def test_bad_objects(build, error, message):
    with pytest.raises(error, match=message):
        build()


CLASSIFIER = fr.signals.Classifier(torch.zeros(7))


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"signal": "ensemble"}, TypeError, "needs decoder=EnsembleDecoder.*got Linear"),
        ({"decoder": fr.EnsembleDecoder(7, 11)}, ValueError, "use Ensemble"),
        ({"decoder": fr.EnsembleDecoder(8, 11), "signal": "ensemble"}, ValueError,
         "decoder must read hidden_size = 7"),
        ({"signal": "variational", "dropout": 0.1}, ValueError, "masks of its own"),
        ({"signal": fr.signals.Classifier(torch.zeros(8))}, ValueError, "hidden_size = 7"),
        ({"signal": fr.signals.Classifier(torch.zeros(7), layer=2)}, ValueError, "reads layer 2"),
        ({"signal": CLASSIFIER, "states": "c"}, ValueError, "reads state 'h', but states are"),
        ({"signal": [CLASSIFIER, CLASSIFIER]}, ValueError, "read the same state"),
        ({"signal": []}, TypeError, "list of Classifier"),
        ({"signal": ["nll"]}, TypeError, "list of Classifier"),
        ({"gate": "high"}, TypeError, "gate must be a number"),
        ({"probability": 0.0}, ValueError, "probability must be in"),
        ({"probability": (0.5, 1.5)}, ValueError, "probability must be in"),
    ],
)  # fmt: skip
def test_bad_combinations(cls, options, error, message):
    with pytest.raises(error, match=message):
        cls(**({"input_size": 5, "hidden_size": 7, "decoder": nn.Linear(7, 11)} | options))


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
def test_bad_labels_and_states(cls):
    x = torch.zeros(4, 3, 5)
    rnn = cls(5, 7, decoder=nn.Linear(7, 11), signal=CLASSIFIER)
    with pytest.raises(ValueError, match="labels must be given"):
        rnn(x)
    with pytest.raises(TypeError, match=r"labels must be a torch\.int64"):
        rnn(x, labels=torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"labels must have shape \(4, 3\)"):
        rnn(x, labels=torch.zeros(3, 4).long())
    if cls is fr.FusedRecodingLSTM:
        with pytest.raises(ValueError, match=r"labels must be in \[0, 2\) or -100, got 2"):
            rnn(x, labels=torch.full((4, 3), 2))
    rnn = cls(5, 7, decoder=nn.Linear(7, 11), signal=fr.signals.Variational(4))
    other = torch.zeros(1, 15, 7)  # of K = 5
    with pytest.raises(ValueError, match=r"must have shape \(1, 3, 7\) or \(1, 12, 7\)"):
        rnn(x, (other, other))


def test_prior_scale_draws_the_decoder_anew():
    decoder = nn.Linear(50, 400)
    before = decoder.weight.clone()
    fr.FusedRecodingLSTM(5, 50, decoder=decoder, signal=fr.signals.MCDropout(prior_scale=0.3))
    assert not torch.equal(decoder.weight, before)
    assert abs(decoder.weight.var() - 0.3) < 0.02
    lm = fr.RecodingLanguageModel(400, 5, 50, signal=fr.signals.MCDropout(prior_scale=0.3))
    assert abs(lm.decoder.weight.var() - 0.3) < 0.02
    lm = fr.RecodingLanguageModel(400, 5, 50, signal="mc_dropout")
    assert lm.decoder.weight.abs().max() <= 0.1


def test_custom_functions_see_logits_hidden_and_targets():
    seen = []

    def fn(logits, hidden, targets):
        seen.append((logits.shape, hidden.shape, targets))
        return logits.square().sum(-1)

    for sees_targets in (True, False):
        kind = fr.signals.Custom(fn, sees_targets=sees_targets)
        rnn = fr.FusedRecodingLSTM(5, 7, decoder=nn.Linear(7, 11), signal=kind)
        y = torch.randint(11, (2, 3))
        rnn(torch.randn(2, 3, 5), targets=y)
        assert seen[0][:2] == ((3, 11), (3, 7))
        assert torch.equal(seen[0][2], y[0]) if sees_targets else seen[0][2] is None
        seen.clear()


def test_every_variant_is_copied_pickled_and_shown():
    for name in SIGNALS:
        for step in STEPS:
            kind, decoder = build(name, 7, 11, torch.float32)
            rnn = fr.FusedRecodingLSTM(
                5, 7, 2, decoder=decoder, signal=kind, step=STEPS[step](), gate=0.5, probability=0.5
            )
            for other in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
                assert other.state_dict().keys() == rnn.state_dict().keys()
                assert repr(other) == repr(rnn)
