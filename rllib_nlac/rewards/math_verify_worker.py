"""math-verify in a process of its own, which can be ended: ``9^{9^{9^9}}`` keeps sympy busy for ever.

Run as a script it answers one JSON line, ``[truth, answer, seconds]``: a line when it has read the truth, then ``true`` or
``false``, until its input ends, or a question takes longer: whoever asked it may be gone. What it reads was written by anyone,
and sympy is large: it has the sandbox's limits and rights, as far as the kernel offers them, and none of the trainer's
environment variables.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0  # importing sympy
MEMORY_BYTES = 2 << 30
_READ, _UNREADABLE = "read", "unreadable"


class UnreadableTruth(ValueError):
    """What a row says is right takes too much time or memory to read; no answer is at fault."""


class MathVerify:
    """Asks the worker; one that takes longer than ``TIMEOUT_S`` is ended, and its question answered with False."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, answer: str, truth: str, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether math-verify takes the two for the same.

        Raises:
            UnreadableTruth: The truth itself cannot be read in this time.
            ValueError: math-verify is not installed.
        """
        with self._lock:
            worker = self._process or self._start()
            deadline = time.monotonic() + timeout_s
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps([truth, answer, timeout_s]).encode() + b"\n")
            except OSError:  # it died of the former question
                self.stop()
                return False
            if self._line(deadline) != _READ:
                self.stop()
                raise UnreadableTruth(f"the true answer {truth!r:.80} cannot be read by math-verify within {timeout_s:g} s")
            said = self._line(deadline)
            if said not in ("true", "false"):
                self.stop()
            return said == "true"

    def _line(self, deadline: float) -> str:
        """The worker's next line; empty where it says nothing in time, or has died."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return ""
        return self._process.stdout.readline().decode().strip()

    def _start(self) -> subprocess.Popen[bytes]:
        from rllib_nlac.rewards import sandbox_child

        if find_spec("math_verify") is None:
            raise ValueError("grader 'math_verify' needs the package math-verify: pip install 'rllib_nlac[math]'")
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        # Unbuffered, so that what has not been read can be waited for.
        self._process = worker = subprocess.Popen(
            [sys.executable, "-P", __file__, sandbox_child.__file__],
            bufsize=0,
            env={"LANG": "C.UTF-8", **kept},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self.stop)
        if self._line(time.monotonic() + START_TIMEOUT_S) != "ready":
            self.stop()
            raise ValueError("the worker of math-verify does not start: try 'python -c \"import math_verify\"'")
        return worker

    def stop(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _restrict(sandbox_path: str) -> None:
    sandbox = runpy.run_path(sandbox_path)  # by its path: importing the package would take seconds
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        sandbox["drop_rights"]()
        sandbox["deny_files"](None, [*sandbox["libraries"](), sys.prefix])
        sandbox["deny_system_calls"]()
    except sandbox["Refused"]:
        pass  # math-verify is no stranger's program; the limits of memory and time remain


def main() -> None:
    """Answers questions until the input ends."""
    from math_verify import parse, verify

    _restrict(sys.argv[1])
    probe, bearable = parse(r"\boxed{17}", parsing_timeout=None), set[str]()
    print("ready", flush=True)
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        truth, answer = (rf"\boxed{{{text}}}" for text in texts)
        signal.alarm(math.ceil(seconds) + 1)
        try:
            right = parse(truth, parsing_timeout=None)
            if truth not in bearable:  # an honest answer should not pay for a truth that cannot be compared with anything
                verify(right, probe, timeout_seconds=None)
                bearable.add(truth)
        except Exception:
            print(_UNREADABLE, flush=True)
            continue
        print(_READ, flush=True)
        try:
            same = bool(verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None))
        except Exception:
            same = False
        signal.alarm(0)
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    main()
