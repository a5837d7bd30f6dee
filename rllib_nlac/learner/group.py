"""A group of learners that survives the loss of one: all act together, and a lost one is restored from a snapshot."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import RayError
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_nlac.engine.shared import SharedState
from rllib_nlac.limits import TookTooLong, within

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


BUILD_S = 600.0  # for learners to start again, or longer where one call may take longer
MAX_BUILDS = 3  # of which each is lost while it starts
_pids: WeakKeyDictionary[LearnerGroup, dict[int, int]] = WeakKeyDictionary()


class LearnerLost(RuntimeError):
    """A learner's process has ended, or was ended because it did not answer in time."""


def on_every_learner(group: LearnerGroup, function: Callable[[Any], Result]) -> list[Result]:
    """Calls a function on all learners at the same time, as whatever gathers shards needs; results in their order.

    Raises:
        LearnerLost: A learner's process has ended, or did not answer within ``learner_timeout_s``.
    """
    if group.is_local:
        return [function(group._learner)]
    with watched(group):
        results = list(group.foreach_learner(function))
    for result in results:
        if not result.ok:
            raise result.get()
    if len(results) < len(group):
        raise LearnerLost(f"only {len(results)} of {len(group)} learners are left")
    return [result.get() for result in sorted(results, key=lambda result: result.actor_id)]


def on_first_learner(group: LearnerGroup, function: Callable[[Any], Result]) -> Result:
    """Calls a function on the first learner alone, for what each of them would answer alike.

    Raises:
        LearnerLost: As ``on_every_learner``.
    """
    if group.is_local:
        return function(group._learner)

    def on_first(learner: Any) -> Any:
        return function(learner) if index_of(learner) == 0 else None

    return on_every_learner(group, on_first)[0]


def index_of(learner: Any) -> int:
    """A learner's place in its group; 0 is the first."""
    return learner._learner_index


def is_lost(group: LearnerGroup) -> bool:
    """Whether a learner's process has ended or does not answer, so that an error is no error of the learners."""
    if group.is_local:
        return False
    try:
        ray.get([worker.apply.remote(_pid) for worker in group._workers], timeout=60)
    except RayError:
        return True
    return False


class LearnerSnapshots:
    """The learners' last known state, in Ray's object store, and how a new group is made of it."""

    def __init__(self) -> None:
        self._states: list[ray.ObjectRef] = []

    def take(self, group: LearnerGroup) -> None:
        """Remembers the state of all learners: the weights once, and of the optimizer what each of them holds."""
        self._states = [ray.put(state) for state in on_every_learner(group, _state_of)]

    def rebuild(self, group: LearnerGroup) -> LearnerGroup:
        """Ends the rest of a group and starts a new one in the state of the last snapshot.

        Raises:
            TimeoutError: The new learners did not start within ``BUILD_S``.
            LearnerLost: They were lost again and again while they started.
        """
        _end(group)
        with contextlib.suppress(Exception):
            group.shutdown()
        group._is_shut_down = True
        limit = max(BUILD_S, group.config.learner_timeout_s)
        for attempt in range(1, MAX_BUILDS + 1):
            try:
                return within(limit, lambda: self._build(group))
            except TookTooLong as error:
                raise TimeoutError(
                    f"new learners did not start within {limit:g} s: see whether their CPUs, GPUs and memory are free"
                ) from error
            except (RayError, LearnerLost) as error:
                if attempt == MAX_BUILDS:
                    raise LearnerLost(f"new learners were lost {attempt} times while they started: {error}") from error
                logger.warning("a new learner was lost while it started: %s", error)
        raise AssertionError("the last attempt returns or raises")

    def _build(self, group: LearnerGroup) -> LearnerGroup:
        fresh = group.config.build_learner_group(rl_module_spec=group._module_spec)
        states = self._states
        on_every_learner(fresh, lambda learner: _restore(learner, states))
        return fresh


@contextlib.contextmanager
def watched(group: LearnerGroup) -> Iterator[None]:
    """While it lasts, all learners are ended when one is lost or does not answer within ``learner_timeout_s``.

    Otherwise the others might wait for a lost one in a collective call for ever, and the caller with them.

    Raises:
        LearnerLost: What was done meanwhile failed because learners were ended.
    """
    if group.is_local:
        yield
        return
    done, trouble = threading.Event(), list[str]()

    def watch() -> None:
        # A call waits behind the learner's work, but fails at once where its process has ended.
        calls = {worker.apply.remote(_pid): (index, time.monotonic()) for index, worker in enumerate(group._workers)}
        while not done.wait(0.2):
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in ready:
                index, _ = calls.pop(call)
                try:
                    _pids.setdefault(group, {})[index] = ray.get(call)
                except RayError as error:
                    trouble.append(f"{_names(group, [index])} has ended: {error}")
                    break
                calls[group._workers[index].apply.remote(_pid)] = (index, time.monotonic())
            limit, now = group.config.learner_timeout_s, time.monotonic()
            if not trouble and (late := sorted(index for index, asked in calls.values() if now - asked > limit)):
                trouble.append(f"{_names(group, late)} did not answer within {limit:g} s (learner_timeout_s)")
            if trouble:
                logger.warning("%s; all learners are ended", trouble[0])
                _end(group)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if trouble:
            raise LearnerLost(trouble[0]) from error
        raise
    finally:
        done.set()
        thread.join()


def _names(group: LearnerGroup, indices: Sequence[int]) -> str:
    pids = _pids.get(group, {})
    return " and ".join(f"learner {index} ({f'pid {pids[index]}' if index in pids else 'no answer yet'})" for index in indices)


def _end(group: LearnerGroup) -> None:
    for worker in group._workers:
        ray.kill(worker)


def watched_update(group: LearnerGroup, **arguments: Any) -> list[Any]:
    """``LearnerGroup.update`` that ends with an error where a learner is lost, and never waits for it."""
    with watched(group):
        results = group.update(**arguments)
    if group.is_remote and len(results) < len(group):
        raise LearnerLost(f"only {len(results)} of {len(group)} learners are left")
    return results


def _pid(learner: Any) -> int:
    """Asks for nothing but an answer."""
    return os.getpid()


def _state_of(learner: Any) -> dict[str, Any]:
    learner.prepare_for_saving()
    state = learner.get_state() if index_of(learner) == 0 else None
    return SharedState(state=state, shard=learner.get_shard())


def _restore(learner: Any, states: list[ray.ObjectRef]) -> None:
    # Copies: the optimizer goes on writing into the tensors that it is given.
    learner.set_state(copy.deepcopy(ray.get(states[0])["state"]))
    if (shard := ray.get(states[index_of(learner)])["shard"]) is not None:
        learner.set_shard(copy.deepcopy(shard))
