"""The controls: what is trained and in which order, what it costs, and the report."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fused_recoder as fr
from fused_recoder.experiments import controls, controls_report, rows
from fused_recoder.experiments.costs import parameters, training_flops, widened
from fused_recoder.experiments.scales import SCALES
from fused_recoder.training import Config, build_model

TIED = SCALES["tied"]
SMALL = Config(hidden_size=24, num_layers=2, signal=None, tie_weights=True, batch_size=4, bptt=5)


def write_row(out, name, seed, valid, **values):
    config = controls.arms(TIED).get(name)
    row = {"name": f"{name}.seed{seed}", "seed": seed, "status": "finished",
           "valid_perplexity": valid, "test_perplexity": valid - 4.0, "train_seconds": 3600.0,
           "parameters": 2_653_200, "vocabulary": 10_000}  # fmt: skip
    row |= {} if config is None else {"config": config.to_dict()}
    with open(out / rows.ROWS, "a") as file:
        file.write(json.dumps(row | values) + "\n")


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_plain_model_are_those_that_torch_counts(tied):
    """The reference's: products of every kind, forward and backward."""
    config, V = SMALL.replace(tie_weights=tied), 50
    model = build_model(config, V, model_class=fr.reference.RecodingLanguageModel)
    tokens = torch.randint(V, (config.bptt + 1, config.batch_size))
    hx = tuple(torch.zeros(2, config.batch_size, 24, requires_grad=True) for _ in "hc")
    with FlopCounterMode(display=False) as counter:
        model(tokens[:-1], tokens[1:], hx).loss.backward()
    assert training_flops(config, V) == counter.get_total_flops() / tokens[1:].numel()


def test_recoders_cost_what_the_design_says():
    def decoder(**changes):
        large = SMALL.replace(**changes)
        return (training_flops(large, 2000) - training_flops(large, 1000)) / (2 * 24 * 1000)

    assert decoder() == 3
    assert decoder(signal="nll") == 3
    assert decoder(signal="nll", gradient="exact") == 7
    assert decoder(architecture="error-feedback") == 5


def test_parameters_are_those_of_the_model():
    config = SMALL.replace(signal="nll", step="learned", step_options={"per": "unit"})
    assert parameters(config, 50) == sum(p.numel() for p in build_model(config, 50).parameters())


def test_wider_models_match_and_are_the_narrowest():
    def count(config):
        return parameters(config, 50)

    wide = widened(SMALL, count, 20_000)
    narrower = wide.replace(hidden_size=wide.hidden_size - 1)
    assert count(narrower) < 20_000 <= count(wide)
    assert widened(SMALL, count, count(SMALL)) == SMALL


def test_arms_differ_from_the_baseline_in_what_they_say():
    found = controls.arms(TIED)
    assert found[controls.BASELINE].signal is None
    assert found[controls.BASELINE].tie_weights
    assert found[controls.MORE_PARAMETERS].hidden_size > 200
    assert found[controls.MORE_TIME].hidden_size > found[controls.MORE_PARAMETERS].hidden_size
    assert found[controls.BY_UNIT].step_options["per"] == "unit"
    assert not found[controls.UNTIED_EXACT].tie_weights
    assert len(set(map(str, found.values()))) == len(found)


def test_the_better_recoder_on_validation_gets_all_seeds(tmp_path):
    names = [job.name for job in controls.jobs(TIED, tmp_path, 3)]
    assert names[::2] == ["tied.seed1", "tied-nll-exact.seed1", "tied-nll-exact-unit.seed1"]
    assert names[1] == "dynamic-evaluation.tied.seed1"
    assert controls.chosen(tmp_path) is None
    write_row(tmp_path, controls.BY_STATE, 1, 90.0, test_perplexity=10.0)
    write_row(tmp_path, controls.BY_UNIT, 1, 89.0, test_perplexity=99.0)
    assert controls.chosen(tmp_path) == controls.BY_UNIT
    names = [job.name for job in controls.jobs(TIED, tmp_path, 3)]
    assert len(names) == len(set(names))
    assert names[6:12:2] == ["tied.seed2", "tied-nll-exact-unit.seed2", "tied.seed3"]
    assert {f"{name}.seed1" for name in controls.arms(TIED)} <= set(names)
    assert "tied-nll-exact.seed2" not in names


def test_the_report_shows_what_is_there(tmp_path):
    assert "No run" in controls_report.report(TIED, tmp_path, 3)
    for seed, shift in ((1, 0.0), (2, 0.5), (3, -0.5)):
        write_row(tmp_path, controls.BASELINE, seed, 95.0 + shift)
        write_row(tmp_path, controls.BY_UNIT, seed, 91.0 + shift)
        write_row(tmp_path, "dynamic-evaluation.tied", seed, 85.0 + shift)
    write_row(tmp_path, controls.FEEDBACK, 1, 94.0)
    text = controls_report.report(TIED, tmp_path, 3)
    (line,) = [row for row in text.splitlines() if row.startswith("| tied-nll-exact-unit")]
    assert "| -4.00 |" in line
    assert "| 8.00" not in line  # the effect size, not a difference
    (line,) = [row for row in text.splitlines() if row.startswith("| tied |")]
    assert line.endswith("| 81.00 ± 0.50 |")
    assert "Not trained: tied-nll-exact, " in text
    assert (tmp_path / "figures" / "controls.png").stat().st_size > 10_000
