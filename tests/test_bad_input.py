"""What users get wrong: every message names the argument, what was expected and what was given."""

import pytest
import torch
from conftest import make_inputs, make_pair
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import fused_recoder as fr

CLASSES = [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"signal": "novelty"}, ValueError, "signal must be one of .*got 'novelty'"),
        ({"signal": 3}, ValueError, "signal must be one of"),
        ({"step": float("nan")}, ValueError, "step must be finite, got nan"),
        ({"step": float("inf")}, ValueError, "step must be finite"),
        ({"step": "huge"}, ValueError, "step must be a number, one of .*got 'huge'"),
        ({"step": torch.ones(3)}, ValueError, r"shape \[L, S\] = \(1, 2\), got \(3,\)"),
        ({"step": {"x": 1.0}}, ValueError, "step names state 'x'"),
        ({"step": {(1, "h"): 1.0}}, ValueError, "step names layer 1"),
        ({"step": None}, TypeError, "step must be a number, a name"),
        ({"step": True}, TypeError, "step must be a number, a name"),
        ({"states": ()}, ValueError, "states must be"),
        ({"states": ("h", "x")}, ValueError, "states must be"),
        ({"states": ("h", "h")}, ValueError, "states must be"),
        ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be in"),
        ({"output_dropout": 2.0}, ValueError, "output_dropout must be in"),
        ({"gradient": "none"}, ValueError, "gradient must be 'detached' or 'exact'"),
        ({"num_layers": 0}, ValueError, "num_layers must be a positive int, got 0"),
        ({"hidden_size": 1.5}, ValueError, "hidden_size must be a positive int"),
        ({"decoder": None}, TypeError, "decoder must be a Linear-like module"),
        ({"decoder": nn.Linear(8, 11)}, ValueError, "decoder must read hidden_size = 7"),
        ({"colour": "red"}, TypeError, "unexpected keyword argument 'colour'"),
    ],
)
def test_bad_options(cls, options, error, message):
    arguments = {"input_size": 5, "hidden_size": 7, "decoder": nn.Linear(7, 11)} | options
    with pytest.raises(error, match=message):
        cls(**arguments)


@pytest.mark.parametrize("which", [0, 1], ids=["fused", "reference"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": torch.zeros(4)}, ValueError, "input must have 2 or 3 dimensions"),
        ({"input": torch.zeros(4, 3, 6)}, ValueError, r"input_size = 5 features.*\(4, 3, 6\)"),
        ({"input": torch.zeros(0, 3, 5)}, ValueError, "input must not be empty"),
        ({"input": torch.zeros(4, 0, 5)}, ValueError, "input must not be empty"),
        ({"input": [[1.0]]}, TypeError, "input must be a Tensor or PackedSequence, got list"),
        ({"hx": torch.zeros(2, 3, 7)}, TypeError, r"hx must be a tuple \(h_0, c_0\)"),
        ({"hx": (torch.zeros(2, 3, 7), torch.zeros(2, 4, 7))}, ValueError, "hx: c_0 must have"),
        ({"targets": torch.zeros(3, 4).long()}, ValueError, r"targets must have shape \(4, 3\)"),
        ({"targets": torch.zeros(4, 3)}, TypeError, "targets must be a torch.int64 tensor"),
        ({"targets": [1, 2]}, TypeError, "targets must be a torch.int64 tensor, got list"),
        ({"recode_mask": torch.ones(4, 3)}, TypeError, "recode_mask must be a torch.bool"),
        ({"recode_mask": torch.ones(1, 3).bool()}, ValueError, "recode_mask must have shape"),
        ({"labels": torch.zeros(4, 3).long()}, ValueError, "labels are for Classifier signals"),
    ],
)
def test_bad_arguments(which, change, error, message):
    rnn = make_pair(signal="nll", dtype=torch.float32)[which]
    arguments = {"input": torch.zeros(4, 3, 5), "targets": torch.zeros(4, 3).long()} | change
    with pytest.raises(error, match=message):
        rnn(arguments.pop("input"), arguments.pop("hx", None), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.full((4, 3), 11)}, r"targets must be in \[0, 11\) or -100, got 11"),
        ({"targets": torch.full((4, 3), -2)}, "got -2 at flat position 0"),
        ({"lengths": [4, 3]}, "lengths must have shape"),
        ({"lengths": [4, 3, 9]}, "lengths must be between 1 and T = 4, got 3 to 9"),
    ],
)
def test_bad_values_are_found_before_anything_is_computed(change, message):
    rnn, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    with pytest.raises(ValueError, match=message):
        rnn(x, hx, **({"targets": y} | change))


def test_shapes_in_messages_follow_the_layout_of_the_input():
    rnn, _, _ = make_pair(signal="nll", batch_first=True)
    x = torch.zeros(3, 4, 5, dtype=torch.float64)  # [B, T, I]
    with pytest.raises(ValueError, match=r"targets must have shape \(3, 4\) like input"):
        rnn(x, targets=torch.zeros(4, 3).long())


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
def test_no_packed_sequence_holds_the_samples_of_a_variational_signal(cls):
    rnn = cls(5, 7, decoder=nn.Linear(7, 11), signal=fr.signals.Variational(3, 0.2))
    packed = pack_sequence([torch.zeros(n, 5) for n in (3, 2)])
    with pytest.raises(ValueError, match="input must not be packed with Variational"):
        rnn(packed)


def test_packed_input_has_its_own_lengths():
    rnn, _, _ = make_pair(signal="nll")
    packed = pack_sequence([torch.zeros(n, 5, dtype=torch.float64) for n in (3, 2)])
    with pytest.raises(ValueError, match="lengths must not be given with a PackedSequence"):
        rnn(packed, lengths=torch.tensor([3, 2]), targets=torch.zeros(3, 2).long())
    other = pack_sequence([torch.zeros(n).long() for n in (3, 1)])
    with pytest.raises(ValueError, match="targets must have the batch_sizes of input"):
        rnn(packed, targets=other)


def test_learned_steps_start_positive():
    for init in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="init must be positive"):
            fr.steps.Learned(init)
    with pytest.raises(ValueError, match="target must be"):
        fr.signals.Surprisal(target="silver")
