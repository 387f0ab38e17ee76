"""SIGKILL at random moments loses nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import exact_metrics, write_text


@pytest.mark.parametrize("seed", [0])
def test_a_run_that_is_killed_twenty_times_has_the_same_losses(tmp_path, seed):
    text = write_text(tmp_path / "text")

    def run(out: str, kills: int) -> dict:
        script = Path(__file__).with_name("killing.py")
        result = subprocess.run(
            [sys.executable, script, text, tmp_path / out, str(kills), str(seed)],
            env=os.environ | {"FUSED_RECODER_CACHE": str(tmp_path / "cache")},
            text=True, capture_output=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    assert run("whole", kills=0) == {"killed": 0, "exit": 0, "halves": 0}
    happened = run("killed", kills=20)
    print(happened)
    assert happened["killed"] == 20
    assert happened["exit"] == 0
    assert exact_metrics(tmp_path / "killed") == exact_metrics(tmp_path / "whole")
