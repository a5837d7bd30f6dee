"""math-verify in a process of its own: ``9^{9^{9^9}}`` keeps sympy busy for ever."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec

from rllib_nlac.rewards import math_verify_child
from rllib_nlac.rewards.worker import Worker

TIMEOUT_S = 5.0


class UnreadableTruth(ValueError):
    """What a row says is right takes too much time or memory to read; no answer is at fault."""


class MathVerify(Worker):
    """Asks the worker; one that takes longer than ``TIMEOUT_S`` is ended, and its question answered with False."""

    def __init__(self) -> None:
        super().__init__(math_verify_child.__file__)

    def equal(self, answer: str, truth: str, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether math-verify takes the two for the same.

        Raises:
            UnreadableTruth: The truth itself cannot be read in this time.
            ValueError: math-verify is not installed.
        """
        with self._lock:
            if self._process is None and find_spec("math_verify") is None:
                raise ValueError("grader 'math_verify' needs the package math-verify: pip install 'rllib_nlac[math]'")
            if not self._send(json.dumps([truth, answer, timeout_s])):
                return False
            deadline = time.monotonic() + timeout_s
            if self._line(deadline) != math_verify_child.READ:
                self.stop()
                raise UnreadableTruth(f"the true answer {truth!r:.80} cannot be read by math-verify within {timeout_s:g} s")
            said = self._line(deadline)
            if said not in ("true", "false"):
                self.stop()
            return said == "true"

    def _why_not(self, said: str) -> str:
        return "the worker of math-verify does not start: try 'python -c \"import math_verify\"'"
