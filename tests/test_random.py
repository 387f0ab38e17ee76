"""Dropout masks: the generator against published vectors, the masks against the generator, and
their statistics."""

import pytest
import torch
from conftest import make_inputs, make_pair

from fused_recoder.functional import dropout_mask


def philox4x32(key, counter):
    """Philox4x32-10 in plain Python."""
    k, c, mask = list(key), list(counter), 2**32 - 1
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & mask, (low >> 32) ^ c[3] ^ k[1], low & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_generator_reproduces_the_published_vectors():
    """The known answers of the Random123 distribution."""
    ones = 2**32 - 1
    assert philox4x32([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([ones] * 2, [ones] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter, key = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox4x32(key, counter) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, 2**63 - 2])
@pytest.mark.parametrize("units", [1, 4, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_are_a_function_of_seed_stream_time_row_and_unit(seed, units, dtype):
    p, stream = 0.3, 5
    mask = dropout_mask(torch.tensor([seed]), stream, p, 3, 2, units, dtype)
    for t in range(3):
        for b in range(2):
            for j in range(units):
                word = philox4x32([seed & (2**32 - 1), seed >> 32], [j // 4, b, stream << 20, t])[
                    j % 4
                ]
                expected = 0.0 if word < int(p * 2**32) else 1 / (1 - p)
                assert mask[t, b, j].item() == pytest.approx(expected, rel=1e-7)


def test_masks_keep_the_right_share_independently():
    p = 0.3
    mask = dropout_mask(torch.tensor([42]), 0, p, 50, 40, 100, torch.float64)  # [T, B, units]
    n = mask.numel()
    kept = (mask > 0).double()
    assert abs(kept.mean() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5
    assert abs(mask.mean() - 1) < 4 * (p / (1 - p) / n) ** 0.5
    centred = kept - kept.mean()
    for dim in range(3):
        neighbours = (centred * centred.roll(1, dim)).mean() / centred.square().mean()
        assert abs(neighbours) < 4 / n**0.5
    other = dropout_mask(torch.tensor([42]), 1, p, 50, 40, 100, torch.float64)
    assert abs(((other > 0).double() - 1 + p).mul(centred).mean()) < 4 * p * (1 - p) / n**0.5


def test_the_same_torch_seed_gives_the_same_result_and_another_another():
    rnn, _, _ = make_pair(signal="nll", dropout=0.5, output_dropout=0.5)
    x, hx, y = make_inputs(rnn)
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(rnn(x, hx, targets=y)[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_bad_masks_are_refused():
    seed = torch.tensor([1])
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="p must be in"):
            dropout_mask(seed, 0, p, 1, 1, 1, torch.float32)
    with pytest.raises(TypeError, match="dtype must be"):
        dropout_mask(seed, 0, 0.1, 1, 1, 1, torch.float16)
    with pytest.raises(ValueError, match="seed must be"):
        dropout_mask(torch.zeros(2, dtype=torch.int64), 0, 0.1, 1, 1, 1, torch.float32)
