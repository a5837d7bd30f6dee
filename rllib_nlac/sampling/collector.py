"""Rounds of episodes from remote EnvRunners: what a lost runner owed is played by others, and rounds may be asked ahead."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

POLL_S = 1.0


class CollectionError(RuntimeError):
    """EnvRunners failed or stalled; the message holds the cause's text."""


@dataclass(frozen=True)
class Failure:
    """What a runner says instead of raising: RLlib would end its process, and the cause would be in a log only.

    Attributes:
        text: Type and text of the exception.
        trace: Its traceback.
    """

    text: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure of an exception that is being handled."""
        return cls(f"{type(error).__name__}: {error}", traceback.format_exc())

    def raised(self, who: str) -> CollectionError:
        """The failure as an exception, with the runner's traceback below its own."""
        error = CollectionError(f"{who} failed: {self.text}")
        error.add_note(self.trace)
        return error


@dataclass
class Round:
    """Episodes asked of all runners for one iteration.

    Attributes:
        unasked: Shares, in episodes, that no runner has been asked for yet; None is a runner's own share.
        owed: By the tag of its request, who owes which share.
        delivered: By tag, the episodes.
    """

    unasked: list[int | None]
    owed: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    delivered: dict[str, list[SingleAgentEpisode]] = field(default_factory=dict)


class Collector:
    """Collects from the remote runners of a group.

    Args:
        group: The runners.
        restore: Brings runners that have restarted back into the group.
        shares: Episodes of each runner in a round, None where each knows its own.
        max_staleness: Rounds asked ahead, which are played while the learner trains. Each round is consumed that many
            iterations after it was asked for, so its weights are at most so many syncs old.
        timeout_s: After so long without an answer a round raises.
    """

    def __init__(
        self, group: EnvRunnerGroup, restore: Callable[[], Any], shares: list[int | None], max_staleness: int,
        timeout_s: float | None,
    ) -> None:  # fmt: skip
        self._group = group
        self._restore = restore
        self._shares = shares
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._rounds: deque[Round] = deque()
        self._next_tag = 0
        self.num_lost_shares = 0
        #: What each runner last said of itself, which a restarted one gets back.
        self.runner_states: dict[int, dict[str, Any]] = {}

    def collect(self) -> tuple[list[SingleAgentEpisode], list[Any]]:
        """The next round's episodes and the runners' metrics.

        Raises:
            CollectionError: A runner reports an error of its own, or none answers in time.
        """
        while len(self._rounds) <= self._max_staleness:
            self._rounds.append(Round(list(self._shares)))
        current, metrics = self._rounds[0], []
        last_progress = time.monotonic()
        while current.unasked or current.owed:
            self._ask()
            answers = (
                self._group.fetch_ready_async_reqs(tags=list(current.owed), timeout_seconds=POLL_S) if current.owed else []
            )
            for runner, (tag, answer, result, state) in answers:
                if isinstance(answer, Failure):
                    raise answer.raised(f"EnvRunner {runner}")
                del current.owed[tag]
                current.delivered[tag] = answer
                metrics.append(result)
                self.runner_states[runner] = state
                last_progress = time.monotonic()
            self._take_back()
            waited = time.monotonic() - last_progress
            if self._timeout_s is not None and waited > self._timeout_s:
                owing = ", ".join(str(runner) for runner, _ in current.owed.values()) or "none that is alive"
                raise CollectionError(
                    f"no episode came for {waited:.0f} s (sample_timeout_s); EnvRunners that owe some: {owing}. An environment "
                    "hangs, an engine is slow, or lost runners could not be started again"
                )
        self._rounds.popleft()
        return [episode for tag in sorted(current.delivered) for episode in current.delivered[tag]], metrics

    def forget(self) -> None:
        """Drops what was asked ahead, as when a checkpoint is restored; answers to it are ignored."""
        self._rounds.clear()

    def _ask(self) -> None:
        """Hands every share that nobody owes to a healthy runner, the one that owes least."""
        for each in self._rounds:
            while each.unasked:
                healthy = self._group.healthy_env_runner_ids()
                if not healthy:
                    self._restore()
                    return
                load = dict.fromkeys(healthy, 0)
                for other in self._rounds:
                    for runner, _ in other.owed.values():
                        load[runner] = load.get(runner, 0) + 1
                runner = min(healthy, key=lambda candidate: load[candidate])
                share = each.unasked.pop(0)
                # The order of the tags is that of the shares, so a round's episodes come in the same order every time.
                tag = f"{self._next_tag:012d}"
                self._next_tag += 1
                self._group.foreach_env_runner_async(
                    partial(_sample, tag=tag, count=share), tag=tag, remote_worker_ids=[runner]
                )
                each.owed[tag] = (runner, share)

    def _take_back(self) -> None:
        """What lost runners owe goes to others."""
        healthy = set(self._group.healthy_env_runner_ids())
        for each in self._rounds:
            for tag, (runner, share) in list(each.owed.items()):
                if runner not in healthy:
                    del each.owed[tag]
                    each.unasked.append(share)
                    self.num_lost_shares += 1


def _sample(runner: Any, tag: str, count: int | None) -> tuple[str, list[SingleAgentEpisode] | Failure, Any, dict[str, Any]]:
    try:
        episodes = runner.sample(num_episodes=count)
    except Exception as error:
        return tag, Failure.of(error), None, {}
    return tag, episodes, runner.get_metrics(), runner.get_state()
