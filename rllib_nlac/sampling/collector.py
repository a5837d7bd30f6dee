"""Rounds of episodes from remote EnvRunners. Others play what a lost runner owed, and rounds may be requested ahead.

Each request brings the engine and the runner's counters along, so a runner that has just started again needs nothing else,
whoever started it.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.engine.protocol import Engine, EngineError
from rllib_nlac.episode import generations_of
from rllib_nlac.sampling.env_runner import LEAP, NEXT_EPISODE
from rllib_nlac.types import Weights

logger = logging.getLogger(__name__)
POLL_S = 1.0
STOP_S = 30.0  # to answer at the end of a run
MAX_LOSSES = 5  # of one share, in a row; processes that end again and again do not end by accident
# Of all rounds of this process: those of one group of runners must differ, whoever asks them.
_tags = itertools.count()


class CollectionError(RuntimeError):
    """EnvRunners failed or stalled; the message holds the cause's text."""


@dataclass(frozen=True)
class Failure:
    """An exception as a runner returns it. If it raised, RLlib would end its process and leave the cause in a log.

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


@dataclass(frozen=True)
class Answer:
    """What a runner returns.

    Attributes:
        tag: Tag of the request.
        result: What was asked for, or why there is none.
        metrics: The runner's, since the last answer.
        state: The runner's counters.
        first: Number of its first episode.
        pid: Its process.
    """

    tag: str
    result: Any
    metrics: Any
    state: dict[str, Any]
    first: int
    pid: int


@dataclass(frozen=True)
class WorkItem:
    """What one runner is asked for.

    Attributes:
        content: A number of episodes, None for a runner's own number, or the tasks of an evaluation.
        lost_by: The runners that were lost while they owed it.
    """

    content: Any
    lost_by: tuple[str, ...] = ()


@dataclass
class CollectionRound:
    """What is asked of all runners for one iteration.

    Attributes:
        unasked: Shares that no runner has been asked for yet.
        owed: By the tag of its request, who owes which share.
        delivered: By tag, the answers.
    """

    unasked: list[WorkItem]
    owed: dict[str, tuple[int, WorkItem]] = field(default_factory=dict)
    delivered: dict[str, Answer] = field(default_factory=dict)

    def results(self) -> list[SingleAgentEpisode]:
        """What was delivered, in the order of the requests."""
        return [episode for tag in sorted(self.delivered) for episode in self.delivered[tag].result]

    def metrics(self) -> list[Any]:
        """The runners' metrics, in the same order."""
        return [self.delivered[tag].metrics for tag in sorted(self.delivered)]


class Rounds:
    """Asks the remote runners of a group until a round is complete.

    Args:
        group: The runners.
        restore: Brings runners that have restarted back into the group.
        timeout_s: After so long without an answer a round raises; None waits for ever.
        timeout_key: The configuration's name for it.
    """

    def __init__(self, group: EnvRunnerGroup, restore: Callable[[], Any], timeout_s: float | None, timeout_key: str) -> None:
        self._group = group
        self._restore = restore
        self._timeout_s = timeout_s
        self._timeout_key = timeout_key
        self._rounds: deque[CollectionRound] = deque()
        self._pids: dict[int, int] = {}
        self.num_lost_shares = 0

    def request(self, runner: int, item: WorkItem) -> Callable[[Any], tuple[Any, Any, int]]:
        """What a runner is asked to do: to be called with it, it returns a result, metrics, and its first episode's number."""
        raise NotImplementedError

    def after_loss(self, runner: int, item: WorkItem) -> list[WorkItem]:
        """What is asked instead of a share that was lost.

        Raises:
            CollectionError: It was lost too often.
        """
        raise NotImplementedError

    def accept(self, runner: int, answer: Answer) -> bool:
        """Whether an answer is taken."""
        return True

    def finish(self, current: CollectionRound) -> None:
        """Completes a round.

        Raises:
            CollectionError: A runner reports an error of its own, or none answers in time.
        """
        last_progress = time.monotonic()
        while current.unasked or current.owed:
            self._ask()
            answers = (
                self._group.fetch_ready_async_reqs(tags=list(current.owed), timeout_seconds=POLL_S) if current.owed else []
            )
            failed: CollectionError | None = None
            for runner, answer in answers:
                self._pids[runner] = answer.pid
                _, item = current.owed.pop(answer.tag)
                last_progress = time.monotonic()
                if isinstance(answer.result, Failure):
                    failed = failed or answer.result.raised(self._name(runner))
                    current.unasked.append(item)  # who calls again asks again
                elif self.accept(runner, answer):
                    current.delivered[answer.tag] = answer
                else:
                    current.unasked.append(item)
            if failed is not None:
                raise failed
            self.take_back()
            waited = time.monotonic() - last_progress
            if self._timeout_s is not None and waited > self._timeout_s:
                owing = ", ".join(self._name(runner) for runner, _ in current.owed.values()) or "none that is alive"
                raise CollectionError(
                    f"no episode came for {waited:.0f} s ({self._timeout_key}); EnvRunners that owe some: {owing}. An "
                    "environment hangs (see env_step_timeout_s), an engine is slow, a process was stopped, or lost runners "
                    "could not be started again"
                )

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
                item = each.unasked.pop(0)
                # The order of the tags is that of the shares, so a round's episodes come in the same order every time.
                tag = f"{next(_tags):012d}"
                self._group.foreach_env_runner_async(
                    partial(_answer, tag=tag, request=self.request(runner, item)), tag=tag, remote_worker_ids=[runner]
                )
                each.owed[tag] = (runner, item)

    def take_back(self, restarted: Sequence[int] = ()) -> None:
        """Hands what lost runners owed to others; RLlib has forgotten these requests.

        Args:
            restarted: Runners that were lost, and are back.
        """
        healthy = set(self._group.healthy_env_runner_ids()) - set(restarted)
        for each in self._rounds:
            for tag, (runner, item) in list(each.owed.items()):
                if runner not in healthy:
                    del each.owed[tag]
                    self.num_lost_shares += 1
                    lost = replace(item, lost_by=(*item.lost_by, self._name(runner)))
                    each.unasked += self.after_loss(runner, lost)

    def _name(self, runner: int) -> str:
        pid = self._pids.get(runner)
        return f"EnvRunner {runner} ({f'pid {pid}' if pid else 'no answer yet'})"


class Collector(Rounds):
    """Collects training episodes.

    Args:
        group: The runners.
        engine: What answers for the policy.
        restore: Brings runners that have restarted back into the group.
        shares: Episodes of each runner in a round, None where each knows its own.
        max_staleness: Rounds asked ahead, which are played while the learner trains. Each round is consumed that many
            iterations after it was asked for, so its weights are at most so many syncs old.
        timeout_s: After so long without an answer a round raises.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        engine: Engine,
        restore: Callable[[], Any],
        shares: list[int | None],
        max_staleness: int,
        timeout_s: float | None,
    ) -> None:
        super().__init__(group, restore, timeout_s, "sample_timeout_s")
        self._engine = engine
        self._shares = shares
        self.max_staleness = max_staleness
        #: The counters of each runner, which a request brings along.
        self.runner_states: dict[int, dict[str, Any]] = {}
        self._era = 0

    def collect(self) -> tuple[list[SingleAgentEpisode], list[Any]]:
        """The next round's episodes and the runners' metrics.

        Raises:
            CollectionError: As ``finish``.
        """
        while len(self._rounds) <= self.max_staleness:
            self._rounds.append(CollectionRound([WorkItem(count) for count in self._shares]))
        current = self._rounds[0]
        self.finish(current)
        self._rounds.popleft()
        return current.results(), current.metrics()

    def forget(self, states: dict[int, dict[str, Any]] | None = None) -> None:
        """Drops what was asked ahead, as when a checkpoint is restored; answers to it are ignored.

        Args:
            states: The counters with which each runner goes on.
        """
        self._rounds.clear()
        if states is not None:
            self.runner_states = dict(states)
            self._era += 1

    def request(self, runner: int, item: WorkItem) -> Callable[[Any], tuple[Any, Any, int]]:
        return partial(_sample, engine=self._engine, state=self._state(runner), era=self._era, count=item.content)

    def after_loss(self, runner: int, item: WorkItem) -> list[WorkItem]:
        """Asks for as many other episodes. The lost ones are not repeated: one of them may have ended the process."""
        state = self._state(runner)
        self.runner_states[runner] = {**state, NEXT_EPISODE: state[NEXT_EPISODE] + (item.content or LEAP)}
        if len(item.lost_by) >= MAX_LOSSES:
            raise CollectionError(
                f"the processes of {', then of '.join(item.lost_by)} ended, one after the other, while they played the same "
                "share of episodes. An environment ends its process (os._exit, a crash of native code), or memory is short: "
                "see the system's log, and the runners' logs in Ray's session folder"
            )
        return [item]

    def accept(self, runner: int, answer: Answer) -> bool:
        # A runner that was lost after its last answer, and asked before that was read, has played the same tasks again.
        if answer.first < self._state(runner)[NEXT_EPISODE]:
            return False
        self.runner_states[runner] = answer.state
        return True

    def _state(self, runner: int) -> dict[str, Any]:
        return self.runner_states.get(runner, {NEXT_EPISODE: 0})


def check_age(episodes: Sequence[SingleAgentEpisode], version: int, max_staleness: int) -> None:
    """Refuses episodes that too old weights have played. The initial weights, which may refine a turn, are never too old.

    Raises:
        EngineError: A turn's weights are more than ``max_staleness`` syncs older than ``version``. It cannot happen as long as
            engines refuse what they were not given, and must not go unnoticed.
    """
    for episode in episodes:
        ages = (g.weight_version for g in generations_of(episode) if g.weights is not Weights.INITIAL)
        oldest = min(ages, default=version)
        if oldest < version - max_staleness:
            raise EngineError(
                f"episode {episode.id_} was played with version {oldest} of the weights, and at version {version} it may be "
                f"{max_staleness} syncs old (max_staleness)"
            )


def end_unresponsive(group: EnvRunnerGroup) -> None:
    """Ends runners that hang or are busy. RLlib would ask each to stop and wait for it."""
    manager = group._worker_manager
    idle = {answer.actor_id for answer in manager.foreach_actor(_nothing, healthy_only=False, timeout_seconds=STOP_S)}
    for runner in set(manager.actor_ids()) - idle:
        logger.warning(
            "EnvRunner %d did not answer within %g s and is ended without close() of its environments", runner, STOP_S
        )
        ray.kill(manager.remove_actor(runner))


def _nothing(runner: Any) -> None:
    """Asks for nothing but an answer."""


def _answer(runner: Any, tag: str, request: Callable[[Any], tuple[Any, Any, int]]) -> Answer:
    try:
        result, metrics, first = request(runner)
    except Exception as error:
        return Answer(tag, Failure.of(error), None, {}, 0, os.getpid())
    return Answer(tag, result, metrics, runner.get_state(), first, os.getpid())


def _sample(runner: Any, engine: Engine, state: dict[str, Any], era: int, count: int | None) -> tuple[Any, Any, int]:
    runner.resume(state, era)
    first = runner.get_state()[NEXT_EPISODE]
    with runner.lent(engine):
        return runner.sample(num_episodes=count), runner.get_metrics(), first
