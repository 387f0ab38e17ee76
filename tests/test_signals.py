"""Every signal with every step: the fused engine against the oracle, with the same masks."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import STATES, assert_all_close, make_inputs, run_with_gradients
from variants import PAIRS, SIGNALS, STEPS, build, classifies, has_own_masks

import fused_recoder as fr

H, V, I = 7, 11, 5
ROOT = Path(__file__).parent.parent


def make_pair(signal, step, layers=2, dtype=torch.float64, hidden=H, vocab=V, **options):
    """Fused and reference modules with equal weights and one decoder."""
    torch.manual_seed(5)
    kind, decoder = build(signal, hidden, vocab, dtype)
    pair = []
    for cls in (fr.FusedRecodingLSTM, fr.reference.RecodingLSTM):
        torch.manual_seed(6)
        pair.append(
            cls(I, hidden, layers, decoder=decoder, signal=kind, step=STEPS[step](), dtype=dtype,
                **options)
        )  # fmt: skip
    pair[1].load_state_dict(pair[0].state_dict())
    return *pair, decoder


def make_arguments(signal, T=4, B=3, vocab=V):
    y = torch.randint(vocab, (T, B))
    y[1, 1] = -100
    arguments = {"targets": y}
    if classifies(signal):
        arguments["labels"] = torch.randint(2, (T, B))
        arguments["labels"][2, 0] = -100
    return arguments


def compare(fused, oracle, signal, tolerance=1e-10, T=4, B=3, vocab=V, dtype=torch.float64, **more):
    x, hx, _ = make_inputs(fused, T, B, vocab, dtype)
    if signal == "variational":
        K = fused.signal.samples
        hx = tuple(torch.randn(s.shape[0], K * B, s.shape[2], dtype=dtype, requires_grad=True)
                   for s in hx)  # fmt: skip
    arguments = make_arguments(signal, T, B, vocab) | more
    got, want = (run_with_gradients(m, x, hx, **arguments) for m in (fused, oracle))
    assert_all_close(got, want, tolerance)
    return got


@pytest.mark.parametrize(("signal", "step"), PAIRS)
def test_float64_agrees_with_the_oracle(signal, step):
    """Combinations of states, layers, masks, lengths, dropout, gate: every signal and every step
    meets all of them, every pair a third."""
    combinations = itertools.product(
        STATES, (1, 2), (False, True), (None, [4, 2, 1]), (0.0, 0.3), (None, 1.0)
    )
    third = (list(SIGNALS).index(signal) + list(STEPS).index(step)) % 3
    for i, (states, layers, masked, lengths, dropout, gate) in enumerate(combinations):
        if (i + i // 3) % 3 != third:
            continue
        if signal == "classifiers" and (states != ("h", "c") or layers == 1):
            continue
        if signal == "classifier" and "h" not in states:
            continue
        if (has_own_masks(signal) and dropout) or (gate and masked):
            continue
        fused, oracle, _ = make_pair(
            signal, step, layers, states=states, dropout=dropout, output_dropout=dropout, gate=gate
        )
        compare(
            fused, oracle, signal,
            recode_mask=torch.rand(4, 3) < 0.6 if masked else None,
            lengths=None if lengths is None else torch.tensor(lengths),
        )  # fmt: skip


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith("custom")])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 2), (2, 1, 31, 257), (3, 13, 33, 1001), (2, 97, 5, 19), (2, 3, 12, 9001)],
    ids=str,
)
def test_odd_shapes(signal, shape):
    T, B, hidden, vocab = shape
    if signal == "classifiers" and hidden == 1:
        pytest.skip("four classes of one feature are all the same to a classifier")
    fused, oracle, _ = make_pair(signal, "learned", hidden=hidden, vocab=vocab)
    x, hx, y = make_inputs(fused, T, B, vocab)
    arguments = {"targets": y}
    if classifies(signal):
        arguments["labels"] = torch.randint(2, (T, B))
    got, want = (run_with_gradients(m, x, hx, **arguments) for m in (fused, oracle))
    assert_all_close(got, want)


def as_groups(results):
    """The many small gradients of the step as one vector: single numbers are luck."""
    steps = [v.flatten() for n, v in results.items() if n.startswith("grad step.")]
    rest = {n: v.double() for n, v in results.items() if not n.startswith("grad step.")}
    return rest | {"grad step": torch.cat(steps).double()}


@pytest.mark.parametrize("signal", [s for s in SIGNALS if s not in ("none", "custom")])
@pytest.mark.parametrize("step", ["learned", "predicted"])
def test_float32_error_is_at_most_twice_the_references(signal, step):
    # Squared errors of the fused module and of the reference, and the square of what is computed,
    # over all seeds: where a step network has only dead units, its gradient is a single number.
    squares = {}
    for seed in range(6):
        torch.manual_seed(seed)
        kind, decoder = build(signal, 40, 300)
        oracle = fr.reference.RecodingLSTM(
            I, 40, 2, decoder=decoder, signal=kind, step=STEPS[step](), dtype=torch.float64
        )
        fused = fr.FusedRecodingLSTM(
            I, 40, 2, decoder=decoder, signal=kind, step=STEPS[step](), dtype=torch.float64
        )
        fused.load_state_dict(oracle.state_dict())
        x, hx, y = make_inputs(oracle, 7, 5, 300)
        arguments = {"targets": y}
        if classifies(signal):
            arguments["labels"] = torch.randint(2, y.shape)
        truth = as_groups(run_with_gradients(oracle, x, hx, **arguments))
        decoder.float()
        for i, rnn in enumerate((fused.float(), oracle.float())):
            x32, *hx32 = (t.detach().float().requires_grad_() for t in (x, *hx))
            results = as_groups(run_with_gradients(rnn, x32, tuple(hx32), **arguments))
            for name, want in truth.items():
                sums = squares.setdefault(name, [0.0, 0.0, 0.0])
                sums[i] += (results[name].double() - want).square().sum().item()
        for name, want in truth.items():
            squares[name][2] += want.square().sum().item()
    # A float64 result that differs by rounding alone has no error to compare with.
    worse = {
        name: (fused / reference) ** 0.5
        for name, (fused, reference, size) in squares.items()
        if fused > 4 * reference and fused > 1e-24 * size
    }
    assert not worse, f"float32 error relative to the reference's: {worse}"


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_same_bits_for_any_number_of_threads(signal):
    fused, _, _ = make_pair(signal, "learned", hidden=33, vocab=501)
    x, hx, y = make_inputs(fused, 4, 37, 501)
    arguments = {"targets": y}
    if classifies(signal):
        arguments["labels"] = torch.randint(2, y.shape)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run_with_gradients(fused, x, hx, **arguments))
    torch.set_num_threads(before)
    # Weight gradients of small maps go through BLAS, whose order of summation may differ.
    for name in ("output", "h_n", "c_n", "delta", "delta_after"):
        if signal not in ("mc-weight", "classifier", "classifiers", "custom", "custom-unlabelled"):
            assert torch.equal(results[0][name], results[1][name]), name
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------- what must be the same thing


def equal_to_entropy(signal, decoder, **options):
    torch.manual_seed(1)
    weights = fr.reference.RecodingLSTM(I, H, 2, decoder=None, signal=None, dtype=torch.float64)
    x, hx, y = make_inputs(weights)
    single = torch.nn.Linear(H, V, dtype=torch.float64)
    with torch.no_grad():
        if decoder is not None:
            single.weight.copy_(decoder.weight.mean(0))
            single.bias.copy_(decoder.bias.mean(0))
    results = []
    for kind, dec in (("entropy", single), (signal, decoder or single)):
        rnn = fr.FusedRecodingLSTM(I, H, 2, decoder=dec, signal=kind, step=0.7, dtype=torch.float64)
        rnn.load_state_dict(weights.state_dict())
        results.append(run_with_gradients(rnn, x, hx, targets=y))
    want, got = results
    got["output"] = got["output"].reshape(want["output"].shape)
    assert_all_close(got, want, 1e-12)


def test_an_ensemble_with_mean_logits_is_one_decoder():
    decoder = fr.EnsembleDecoder(H, V, 4, predict="mean_logits", dtype=torch.float64)
    equal_to_entropy(fr.signals.Ensemble(), decoder)


@pytest.mark.parametrize("mask", ["unit", "shared", "weight"])
@pytest.mark.parametrize("samples", [1, 4])
def test_mc_dropout_that_drops_nothing_is_the_entropy(mask, samples):
    equal_to_entropy(fr.signals.MCDropout(samples, 0.0, mask), None)


def test_an_ensemble_of_one_is_the_entropy():
    decoder = fr.EnsembleDecoder(H, V, 1, dtype=torch.float64)
    equal_to_entropy(fr.signals.Ensemble(), decoder)


def test_an_ensemble_of_identical_members_is_the_entropy():
    decoder = fr.EnsembleDecoder(H, V, 4, dtype=torch.float64)
    with torch.no_grad():
        decoder.weight[1:] = decoder.weight[0]
        decoder.bias[1:] = decoder.bias[0]
    equal_to_entropy(fr.signals.Ensemble(), decoder)


def test_a_variational_rnn_of_one_sample_that_drops_nothing_is_the_entropy():
    equal_to_entropy(fr.signals.Variational(1, 0.0), None)


def equal_to_the_oracle(kind, B, vocab, hidden=4):
    """One step of a batch, signal and recoded states."""
    decoder = torch.nn.Linear(hidden, vocab, dtype=torch.float64)
    fused, oracle = (
        make(3, hidden, decoder=decoder, signal=kind, dtype=torch.float64)
        for make in (fr.FusedRecodingLSTM, fr.reference.RecodingLSTM)
    )
    oracle.load_state_dict(fused.state_dict())
    x = torch.randn(1, B, 3, dtype=torch.float64)
    with torch.no_grad():
        results = []
        for rnn in (fused, oracle):
            torch.manual_seed(0)
            results.append(rnn(x, return_trace=True))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", ["unit", "shared"])
def test_blocks_of_instances_give_what_one_block_gives(mask):
    """K * B * V is above what is held at a time, so the batch is taken in blocks."""
    equal_to_the_oracle(fr.signals.MCDropout(40, 0.3, mask), B=24, vocab=9001)


@pytest.mark.parametrize("samples", [1, 2, 3, 7])
@pytest.mark.parametrize("p", [0.1, 0.21, 0.45, 0.6, 0.9])
def test_shared_masks_through_lists_and_through_whole_products(samples, p):
    """Few samples are multiplied as a whole, more through the columns they drop or keep."""
    equal_to_the_oracle(fr.signals.MCDropout(samples, p, "shared"), B=7, vocab=1301, hidden=37)


def test_few_samples_of_shared_masks_in_blocks():
    """All instances of all blocks have the mask of the first."""
    equal_to_the_oracle(fr.signals.MCDropout(2, 0.45, "shared"), B=5, vocab=1_000_003)


# --------------------------------------------------------------------------------- the masks


def test_masks_follow_from_the_seed_and_from_a_generator():
    for signal in ("mc-unit", "mc-shared", "mc-weight", "variational"):
        fused, _, _ = make_pair(signal, "fixed")
        x, hx, _ = make_inputs(fused)

        def delta(seed=None, generator=None, rnn=fused, x=x, hx=hx):
            if seed is not None:
                torch.manual_seed(seed)
            return rnn(x, hx, return_trace=True, generator=generator)[2].delta

        assert torch.equal(delta(1), delta(1))
        assert not torch.equal(delta(1), delta(2))
        by_generator = [delta(generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
        assert torch.equal(by_generator[0], by_generator[1])
        assert not torch.equal(by_generator[0], by_generator[2])
        # A generator of one's own leaves torch's alone.
        torch.manual_seed(9)
        delta(generator=torch.Generator().manual_seed(3))
        after = torch.rand(1)
        torch.manual_seed(9)
        assert torch.equal(after, torch.rand(1))


def test_evaluation_still_samples():
    fused, _, _ = make_pair("mc-unit", "fixed")
    x, hx, _ = make_inputs(fused)
    fused.eval()
    assert not torch.equal(*(fused(x, hx, return_trace=True)[2].delta for _ in range(2)))


def test_masks_of_samples_are_independent_and_keep_the_right_share():
    p, K = 0.3, 6
    stream = fr.functional.SAMPLE_STREAM
    masks = torch.stack(
        [
            fr.functional.dropout_mask(
                torch.tensor([42]), stream, p, 20, 25, 64, torch.float64, sample=k
            )
            for k in range(K)
        ]
    )  # [K, T, B, units]
    n, kept = masks.numel(), (masks > 0).double()
    assert abs(kept.mean() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5
    assert abs(masks.mean() - 1) < 4 * (p / (1 - p) / n) ** 0.5
    variance = masks.var()
    assert abs(variance - p / (1 - p)) < 0.01
    centred = kept - kept.mean()
    for dim in range(4):
        neighbours = (centred * centred.roll(1, dim)).mean() / centred.square().mean()
        assert abs(neighbours) < 4 / n**0.5


def test_unit_and_shared_masks_have_the_same_expected_gradient():
    """Of one instance, over many seeds: the means agree within their standard errors."""
    torch.manual_seed(0)
    decoder = torch.nn.Linear(6, 9, dtype=torch.float64)
    decoder.weight.data.mul_(4)
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    samples = {}
    for mask in ("unit", "shared"):
        kind = fr.signals.MCDropout(2, 0.4, mask)
        rnn = fr.FusedRecodingLSTM(
            3, 6, decoder=decoder, signal=kind, step=1.0, states="h", dtype=torch.float64
        )
        torch.manual_seed(1)
        for weights in rnn.all_weights:
            for w in weights:
                torch.nn.init.uniform_(w, -1, 1)
        with torch.no_grad():
            plain = torch.nn.LSTM(3, 6, dtype=torch.float64)
            plain.load_state_dict(rnn.state_dict())
            before = plain(x)[1][0]
            torch.manual_seed(2 if mask == "unit" else 3)
            samples[mask] = torch.stack([(before - rnn(x)[1][0]).flatten() for _ in range(3000)])
    means = {k: v.mean(0) for k, v in samples.items()}
    error = sum(v.var(0) / len(v) for v in samples.values()).sqrt()
    assert ((means["unit"] - means["shared"]).abs() < 4.5 * error).all()
    assert (means["unit"].abs() > 10 * error).any()  # and it is not just noise


@pytest.mark.parametrize("mask", ["unit", "shared", "weight"])
def test_scratch_is_bounded_whatever_the_number_of_samples(mask):
    """K = 50 at V = 10,000, B = 64 in less than 200 MB: resident memory of a process of its own."""
    script = f"""
import torch, fused_recoder as fr
from bench.measure import peak_megabytes
torch.set_num_threads(1)
decoder = torch.nn.Linear(32, 10_000)
def run(K, B):
    kind = fr.signals.MCDropout(K, 0.2, "{mask}")
    rnn = fr.FusedRecodingLSTM(8, 32, decoder=decoder, signal=kind)
    with torch.no_grad():
        rnn(torch.randn(1, B, 8))
run(1, 1)
before = peak_megabytes()
run(50, 64)
print(peak_megabytes() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert float(result.stdout) < 200
