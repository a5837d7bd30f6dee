"""math-verify in a process of its own, which can be ended: ``9^{9^{9^9}}`` keeps sympy busy for ever.

Run as a module it answers one JSON line, ``[truth, answer]``, with ``true`` or ``false``, until its input ends.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from importlib.util import find_spec

TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0  # importing sympy


class MathVerify:
    """Asks the worker; one that takes longer than ``TIMEOUT_S`` is ended, and its question answered with False."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def equal(self, answer: str, truth: str, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether math-verify takes the two for the same.

        Raises:
            ValueError: math-verify is not installed.
        """
        with self._lock:
            worker = self._process or self._start()
            assert worker.stdin is not None and worker.stdout is not None
            try:
                worker.stdin.write(json.dumps([truth, answer]) + "\n")
                worker.stdin.flush()
                if select.select([worker.stdout], [], [], timeout_s)[0]:
                    return worker.stdout.readline().strip() == "true"
            except OSError:
                pass  # it died of the former question
            self.stop()
            return False

    def _start(self) -> subprocess.Popen[str]:
        if find_spec("math_verify") is None:
            raise ValueError("grader 'math_verify' needs the package math-verify: pip install 'rllib_nlac[math]'")
        self._process = worker = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self.stop)
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], START_TIMEOUT_S)[0] or worker.stdout.readline().strip() != "ready":
            self.stop()
            raise ValueError("the worker of math-verify does not start: try 'python -c \"import math_verify\"'")
        return worker

    def stop(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Answers questions until the input ends."""
    from math_verify import parse, verify

    print("ready", flush=True)
    for line in sys.stdin:
        truth, answer = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in json.loads(line))
        print(json.dumps(bool(verify(truth, answer, timeout_seconds=None))), flush=True)


if __name__ == "__main__":
    main()
