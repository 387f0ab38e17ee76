"""Reading word by word against one call over the same words, in float64 to 1e-10."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tools import run_case
from tools.cases import Case, drawn, settled

from .differential import TOLERANCE, disagreement


def case_of(seed: int) -> Case:
    generator = random.Random(seed)
    sizes = {"rows": 5, "time": 8, "hidden": 40, "vocab": generator.choice((3, 40, 400))}
    sizes = {name: generator.randint(1, most) for name, most in sizes.items()}
    return settled(replace(drawn(generator, model="reader"), dtype="float64", **sizes))


def describe(seed: int) -> str:
    case = case_of(seed)
    return f"{case.name} (rows={case.rows} time={case.time} {case.hidden}x{case.vocab})"


def one_call(case: Case) -> dict[str, torch.Tensor]:
    """What `run_case.run` reads word by word, at once."""
    lm, inputs = run_case.make_model(case).eval(), run_case.Inputs(case)
    words, gold = inputs.tokens[:-1], inputs.tokens[1:]
    arguments = inputs.arguments()
    more = {"labels": arguments["labels"]} if "labels" in arguments else {}
    if case.gate == "quantile":  # it follows training: without any it knows nothing
        with torch.no_grad():
            lm.train()(words, gold, inputs.hx, **more)
        lm.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        out = lm(words, gold, inputs.hx, return_trace=True, logits=True, **more)
    predictions = torch.log_softmax(out.logits, -1)
    h_n, c_n = out.hx
    results = {"log_probabilities": predictions, "h_n": h_n, "c_n": c_n}
    return results if case.signal == "none" else results | {"delta": out.trace.delta[-1]}


def check(seed: int) -> None:
    case, results = case_of(seed), []
    for read in (run_case.run, one_call):
        torch.manual_seed(0)  # of what a gate sees before it is judged
        results.append(read(case))
    wrong = disagreement(*results)
    assert not wrong, f"{describe(seed)}: relative errors above {TOLERANCE}: {wrong}"
