"""How one process has the learner and all engines broadcast: when they begin, and a new group after a fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

import ray

from rllib_nlac.engine.channel import NCCL, ChannelError, Gathering, Invitation

LOOK_S = 0.005  # between two looks at who is there
MAX_BROKEN_IN_A_ROW = 4  # both weight sets of two syncs: then no network between them carries any
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
        self.num_broken = self._broken_in_a_row = 0

    @property
    def on_device(self) -> bool:
        """Whether tensors are sent from where the learner computes, and not from the host's memory."""
        return self._backend == NCCL

    def invite(self, patience_s: float) -> Invitation | None:
        """What all are given for the next one; a group is made where there is none. None: there will be no broadcast."""
        if self._group is None and self._broken_in_a_row >= MAX_BROKEN_IN_A_ROW:
            return None
        if self._group is None:
            host = ray.util.get_node_ip_address()
            try:
                self._group = Gathering(host, 1 + self._receivers, self._backend, self._timeout_s)
            except RuntimeError as error:
                self.give_up(f"no store for the group can be opened at {host}: {error}")
                return None
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

    def went_well(self) -> None:
        """Notes that the latest one reached everybody."""
        self._broken_in_a_row = 0

    def give_up(self, fault: str) -> None:
        """Leaves the group, so that the next broadcast is made in a new one; after several in a row there is none."""
        self._group = None
        self.num_broken += 1
        self._broken_in_a_row += 1
        if self._broken_in_a_row < MAX_BROKEN_IN_A_ROW:
            logger.warning("a broadcast of weights broke; Ray's object store carries them, the next group is new: %s", fault)
        else:
            logger.warning(
                "%d broadcasts of weights broke one after the other, the last one by: %s. Ray's object store carries all "
                "others; engine_config: {weight_transfer: object_store} takes it from the start",
                *(self._broken_in_a_row, fault),
            )
