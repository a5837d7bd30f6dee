"""Measures how much of an iteration engine and learner had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rllib_nlac.engine.protocol import Engine

IDLE = "idle"
# Parts of ``seconds``. A sync is the work of both.
OF_ENGINE = ("play", "waves", "branches", "evaluation", "sync")
OF_LEARNER = ("learner", "logprob_gap", "record", "sync")


class Stopwatch:
    """Measures from where it is made on.

    Engine actors count for themselves, so that whoever asks them is counted, EnvRunners that play ahead for example. Of an
    engine in this process, and of the learners, it is the parts of an iteration in which they are used; playing counts as the
    engine's work, with what environments take of it.

    Args:
        engine: The algorithm's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rested = engine.seconds_rested()
        self._started = time.perf_counter()

    def shares(self, seconds: Mapping[str, Any]) -> dict[str, float]:
        """``engine``, the mean of all engines, and ``learner``, each from 0 to 1; no ``engine`` where one did not answer.

        Args:
            seconds: What the parts of the iteration took, by their names.

        Metrics (idle):
            engine: Share of the iteration in which the engines had nothing to do. Large: fewer engines.
            learner: Share in which the learners had nothing to do. Large: more engines.
        """
        total = time.perf_counter() - self._started
        found = {"learner": 1 - sum(float(seconds.get(part, 0)) for part in OF_LEARNER) / total}
        rested = self._engine.seconds_rested()
        if rested is None:
            found["engine"] = 1 - sum(float(seconds.get(part, 0)) for part in OF_ENGINE) / total
        elif rested and self._rested:
            # One that has started again counts from its start.
            since = [now - then if now >= then else now for now, then in zip(rested, self._rested, strict=True)]
            found["engine"] = sum(since) / len(since) / total
        return {name: min(max(share, 0.0), 1.0) for name, share in found.items()}
