"""Runs a fuzzer's cases in a process of its own: a crash or a hang is a finding, not the end."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 12 << 30  # bytes of address space: what asks for more gets an error, not the machine


class Child:
    """A process that checks one seed after the other; a new one takes over where one has died."""

    def __init__(self, fuzzer: str, seconds: float = 300):
        self.fuzzer, self.seconds = fuzzer, seconds  # that a case may take before it hangs
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        self._end()

    def check(self, seed: int) -> str | None:
        """What is wrong with the case of this seed, in words; None: nothing."""
        if self._process is None:
            self._start()
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], self.seconds)
        if not ready:
            self._end()
            return f"did not end within {self.seconds:g} s"
        line = self._process.stdout.readline()
        return json.loads(line) if line else self._post_mortem()

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._files = tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", self.fuzzer],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, cwd=ROOT,
            env=os.environ | {"TMPDIR": self._files.name},  # what it leaves goes with it
        )  # fmt: skip
        self._process.stdout.readline()  # it is ready

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._said.close()
            self._files.cleanup()
        self._process = None

    def _post_mortem(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read()[-3000:]
        self._end()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process died: {how}\n{said}"


def _complaint(check, seed: int) -> str | None:
    try:
        check(seed)
    except Exception:
        return traceback.format_exc()
    return None


def main(fuzzer: str) -> None:
    """Reads seeds from stdin; answers each with a line of JSON: None, or a traceback."""
    faulthandler.enable()
    if "san" not in os.environ.get("LD_PRELOAD", ""):  # sanitizers reserve terabytes
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints is no answer
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.fuzz.{fuzzer}")
    getattr(module, "prepare", lambda: None)()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_complaint(module.check, int(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
