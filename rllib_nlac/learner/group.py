"""A group of learners that outlives one of them: all act together, and a lost one is made good from a snapshot."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_nlac.sync.shared import SharedState

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class LearnerLost(RuntimeError):
    """A learner's process has ended."""


def on_every_learner(group: LearnerGroup, function: Callable[[Any], Result]) -> list[Result]:
    """Calls a function on all learners at the same time, as whatever gathers shards needs; results in their order.

    Raises:
        LearnerLost: A learner's process has ended.
    """
    if group.is_local:
        return [function(group._learner)]
    with _survivors_ended(group):
        results = list(group.foreach_learner(function))
    for result in results:
        if not result.ok:
            raise result.get()
    if len(results) < len(group):
        raise LearnerLost(f"only {len(results)} of {len(group)} learners are left")
    return [result.get() for result in sorted(results, key=lambda result: result.actor_id)]


def is_lost(group: LearnerGroup) -> bool:
    """Whether a learner's process has ended, so that an error is no error of the learners."""
    if group.is_local:
        return False
    for call in [worker.apply.remote(_nothing) for worker in group._workers]:
        try:
            ray.get(call, timeout=60)
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
        """Ends what is left of a group and starts one like it, in the state of the last snapshot."""
        for worker in group._workers:
            ray.kill(worker)
        with contextlib.suppress(Exception):
            group.shutdown()
        group._is_shut_down = True
        fresh = group.config.build_learner_group(rl_module_spec=group._module_spec)
        states = self._states
        on_every_learner(fresh, lambda learner: _restore(learner, states))
        return fresh


@contextlib.contextmanager
def _survivors_ended(group: LearnerGroup) -> Iterator[None]:
    """While it lasts, the loss of one learner ends the others too: they might wait for it in a collective call for ever."""
    if group.is_local:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        # A call waits behind the learner's work, but fails at once where its process has ended.
        calls = {worker.apply.remote(_nothing): worker for worker in group._workers}
        while not done.wait(0.2):
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in ready:
                worker = calls.pop(call)
                try:
                    ray.get(call)
                except RayError:
                    logger.warning("a learner's process has ended; the others are ended with it")
                    for each in group._workers:
                        ray.kill(each)
                    return
                calls[worker.apply.remote(_nothing)] = worker

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def watched_update(group: LearnerGroup, **arguments: Any) -> list[Any]:
    """``LearnerGroup.update`` that ends with an error where a learner is lost, and never waits for it."""
    with _survivors_ended(group):
        results = group.update(**arguments)
    if group.is_remote and len(results) < len(group):
        raise LearnerLost(f"only {len(results)} of {len(group)} learners are left")
    return results


def _nothing(learner: Any) -> None:
    """Asks for nothing but an answer."""


def _state_of(learner: Any) -> dict[str, Any]:
    learner.prepare_for_saving()
    state = learner.get_state() if learner._learner_index == 0 else None
    return SharedState(state=state, shard=learner.get_shard())


def _restore(learner: Any, states: list[ray.ObjectRef]) -> None:
    # Copies: the optimizer goes on writing into the tensors that it is given.
    learner.set_state(copy.deepcopy(ray.get(states[0])["state"]))
    if (shard := ray.get(states[learner._learner_index])["shard"]) is not None:
        learner.set_shard(copy.deepcopy(shard))
