"""Says so where an environment does not answer: whoever waits for it has no limit of time of its own."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rllib_nlac.activity import activity, repeatedly
from rllib_nlac.sampling.slot import Slot

logger = logging.getLogger(__name__)
LATE_S = 60.0  # an answer that takes longer is worth a word; each further one after twice as long


@contextmanager
def watched(slots: Sequence[Slot], name: str) -> Iterator[None]:
    """While it lasts, a thread looks after calls of environments that have not returned.

    Args:
        slots: The environments.
        name: What they are called.
    """
    said: dict[int, tuple[float, float]] = {}  # by slot: since when it owes an answer, and after how long that was said

    def look() -> None:
        for index, slot in enumerate(slots):
            if (since := slot.asked_at) is None:
                continue
            before, after = said.get(index, (since, 0.0))
            waited = time.monotonic() - since
            if waited >= (2 * after if before == since and after else LATE_S):
                said[index] = since, waited
                what = f"{name} (environment {index} of pid {os.getpid()}) has not answered for {waited:.0f} s"
                logger.warning("%s: its reset or step hangs or is slow; env_step_timeout_s ends such a wait", what)
                activity.remark(f"{what}, see env_step_timeout_s")

    with repeatedly(look, LATE_S / 4, "env watch"):
        yield
