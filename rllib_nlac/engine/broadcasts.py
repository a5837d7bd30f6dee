"""How one process has the learner and all engines broadcast: when they begin, and a new group after a fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

import ray

from rllib_nlac.engine.channel import NCCL, ChannelError, Gathering, Invitation

LOOK_S = 0.005  # between two looks at who is there
logger = logging.getLogger(__name__)


class Broadcasts:
    """Broadcasts of weight sets to some engines, one after the other.

    Args:
        backend: "gloo" or "nccl".
        receivers: Processes of all engines together that take part.
        timeout_s: Limit of each step.
    """

    def __init__(self, backend: str, receivers: int, timeout_s: float) -> None:
        self._backend, self._receivers, self._timeout_s = backend, receivers, timeout_s
        self._group: Gathering | None = None
        self.num_broken = 0

    @property
    def on_device(self) -> bool:
        """Whether tensors are sent from where the learner computes, and not from the host's memory."""
        return self._backend == NCCL

    def invite(self, patience_s: float) -> Invitation:
        """What all are given for the next one; a group is made where there is none."""
        if self._group is None:
            host = ray.util.get_node_ip_address()
            self._group = Gathering(host, 1 + self._receivers, self._backend, self._timeout_s)
        return self._group.invite(patience_s)

    def begin(self, calls: Collection[Any], patience_s: float) -> None:
        """Waits until every engine has done what it was about and is there, and lets them begin.

        Args:
            calls: What the engines were called with; whoever answers before the beginning does not take part.
            patience_s: So long.

        Raises:
            ChannelError: Not all take part; those that are there have been sent home.
        """
        assert self._group is not None
        until = time.monotonic() + patience_s
        try:
            while not self._group.all_there():
                answered, _ = ray.wait(list(calls), num_returns=1, timeout=LOOK_S)
                if answered or time.monotonic() > until:
                    self._group.call_off()
                    raise ChannelError("an engine does not take part")
            self._group.begin()
        except ChannelError:
            raise
        except RuntimeError as error:
            raise ChannelError(f"the group's store does not answer: {error}") from error

    def give_up(self, fault: str) -> None:
        """Leaves the group, so that the next broadcast is made in a new one."""
        self._group = None
        self.num_broken += 1
        logger.warning("a broadcast of weights broke; Ray's object store carries them, the next group is a new one: %s", fault)
