"""The tool that tells whether a bit has changed: it finds one that has, and none that has not."""

import json
import re

import pytest
import torch

from tools import digest, run_case
from tools.cases import OPTIONS, Case, pairwise
from tools.digest_cases import cpu_cases, emulator_cases

ONE = r"^(rnn|lm|reader) (nll|mc-unit)$|^function entropy rows=5 hidden=33 vocab=301$|^error: NaN"
CASES = list(digest.jobs(emulator=False, only=ONE))


def digests() -> dict:
    runs = {name: digest.digests_of(job) for name, job in digest.jobs(False, ONE).items()}
    return {"header": {}, "runs": {"here": runs}}


def test_the_same_code_has_the_same_digests():
    assert len(CASES) == 8
    assert digest.differences(digests(), digests()) == []
    assert digests()["runs"]["here"]["error: NaN step"] == {
        "error": "ValueError: step must be finite, got nan"
    }


def test_a_change_in_the_last_bit_is_found_and_named(monkeypatch):
    before, fill = digests(), run_case.fill

    def fill_and_nudge(module, prefix=""):
        fill(module, prefix)
        for name, parameter in module.named_parameters():
            if name.endswith("weight_hh_l1"):
                with torch.no_grad():
                    parameter.copy_(parameter.nextafter(torch.full_like(parameter, 9.0)))

    monkeypatch.setattr(run_case, "fill", fill_and_nudge)
    found = digest.differences(before, digests())
    changed = [line.split(": ")[1] for line in found]
    assert changed == [name for name in CASES if name.startswith(("rnn", "lm", "reader"))]
    assert re.match(r"here: rnn nll: changed: output, h_n, .*grad weight_ih_l0", found[0])


def test_missing_and_new_cases_and_other_messages_are_found():
    def recorded(**cases):
        return {"header": {"torch": "1"}, "runs": {"here": cases}}

    before = recorded(a={"h_n": "1"}, b={"h_n": "1"}, c={"error": "old"}, d={"h_n": "1"})
    after = recorded(b={"c_n": "1"}, c={"error": "new"}, d={"h_n": "1"}, e={"h_n": "1"})
    after["runs"]["there"] = {}
    after["header"]["torch"] = "2"
    assert digest.differences(before, after) == [
        "torch was 1, is 2",
        "there: new",
        "here: a: missing",
        "here: e: new",
        "here: b: missing: h_n; new: c_n",
        "here: c: was 'old', is 'new'",
    ]


def test_what_tells_nothing_is_found():
    with pytest.raises(run_case.Insensitive, match="h_n is not finite"):
        run_case.check_telling({"h_n": torch.tensor([float("nan")])})
    with pytest.raises(run_case.Insensitive, match="output is all zero"):
        run_case.check_telling({"output": torch.zeros(3)})
    job = {"error": "Insensitive: output is all zero"}
    assert digest.untelling({"runs": {"here": {"a": job}}}) == [f"here: a: {job['error']}"]


def test_every_option_and_every_pair_is_there():
    for cases in (cpu_cases(), pairwise(seed=0)):
        for name, values in OPTIONS.items():
            assert set(values) <= {getattr(case, name) for case in cases}
    assert any(c.signal == "mc-weight" and c.step == "predicted" for c in pairwise(seed=0))
    assert {case.signal for case in emulator_cases()} >= {"nll", "variational", "classifiers"}


def test_a_case_that_kills_its_process_is_known_by_it(monkeypatch):
    ends = iter([[("a", {"h_n": "1"}), ("killed by SIGSEGV", {})], [("c", {"h_n": "1"})]])
    monkeypatch.setattr(digest, "jobs", lambda *_: {"a": None, "b": None, "c": None})
    monkeypatch.setattr(digest, "digest_lines", lambda *_: next(ends))
    with digest.tqdm(disable=True) as bar:
        run = digest.run_all("baseline", 1, "", bar)
    assert run == {"a": {"h_n": "1"}, "b": {"error": "killed by SIGSEGV"}, "c": {"h_n": "1"}}


def test_the_command_records_and_compares(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(digest, "THREADS", (2,))
    monkeypatch.setattr(digest, "INSTRUCTION_SETS", {"baseline": set()})
    file = tmp_path / "digests.json"
    only = ["--only", f"^{Case().name}$"]
    assert digest.main(["record", str(file), *only]) == 0
    assert digest.main(["compare", str(file), *only]) == 0
    assert "0 differ" in capsys.readouterr().out
    recorded = json.loads(file.read_text())
    recorded["runs"]["baseline, threads: 2"]["rnn nll"]["grad h_0"] = "0"
    file.write_text(json.dumps(recorded))
    assert digest.main(["compare", str(file), *only]) == 1
    assert "baseline, threads: 2: rnn nll: changed: grad h_0" in capsys.readouterr().out
