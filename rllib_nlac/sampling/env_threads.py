"""Threads for environments: those that wait for somebody else are stepped side by side, and none may take for ever.

They are daemons, unlike those of ``concurrent.futures``: one that never returns keeps no process from ending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rllib_nlac.sampling.rollout import Outcome

IDLE_S = 10.0  # a thread without work ends after so long


@dataclass(eq=False)
class Job:
    """A call of an environment.

    Attributes:
        function: The call; it returns an error and raises none.
        argument: Its argument.
        began: When a thread took it up, None before.
        outcome: What came of it, None before.
    """

    function: Callable[[Any], Outcome]
    argument: Any
    began: float | None = None
    outcome: Outcome | None = None


class EnvThreads:
    """At most so many threads. One that overruns the limit is left behind, and another takes its place.

    Args:
        count: How many work at the same time.
        limit_s: How long a call may take; None is no limit.
    """

    def __init__(self, count: int, limit_s: float | None) -> None:
        self._count, self._limit_s = count, limit_s
        self._queue: deque[Job] = deque()
        self._alive = self._idle = 0
        lock = threading.Lock()
        self._queued, self._changed = threading.Condition(lock), threading.Condition(lock)

    def submit(self, function: Callable[[Any], Outcome], argument: Any) -> Job:
        """Queues a call."""
        job = Job(function, argument)
        with self._queued:
            self._queue.append(job)
            self._provide()
        return job

    def finished(self, jobs: Collection[Job], wait: bool) -> list[Job]:
        """Those of some jobs that have an outcome, be it that their time is over.

        Args:
            jobs: Jobs of these threads.
            wait: Whether to wait until there is one.
        """
        with self._changed:
            while True:
                left = [self._time_left(job) for job in jobs]
                done = [job for job in jobs if job.outcome is not None]
                if done or not wait:
                    return done
                self._changed.wait(min((seconds for seconds in left if seconds is not None), default=None))

    def call(self, function: Callable[[Any], Outcome], argument: Any) -> Outcome:
        """Makes one call and waits for it."""
        (job,) = self.finished([self.submit(function, argument)], wait=True)
        assert job.outcome is not None
        return job.outcome

    def _time_left(self, job: Job) -> float | None:
        """Seconds until a running job is overdue, None where nothing limits it; gives up what is overdue."""
        if self._limit_s is None or job.began is None or job.outcome is not None:
            return None
        left = job.began + self._limit_s - time.monotonic()
        if left <= 0:
            job.outcome = Outcome(error=TimeoutError(f"no answer within {self._limit_s:g} s (env_step_timeout_s)"))
            self._alive -= 1
            self._provide()
        return left

    def _provide(self) -> None:
        """Sees to it that somebody takes up what is queued."""
        self._queued.notify()
        if len(self._queue) > self._idle and self._alive < self._count:
            self._alive += 1
            threading.Thread(target=self._work, name="env", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._queued:
                while not self._queue:
                    self._idle += 1
                    has_work = self._queued.wait(IDLE_S)
                    self._idle -= 1
                    if not has_work and not self._queue:
                        self._alive -= 1
                        return
                job = self._queue.popleft()
                job.began = time.monotonic()
                self._changed.notify_all()  # whoever waits knows now until when
            outcome = job.function(job.argument)
            with self._changed:
                if job.outcome is not None:
                    return  # too late: another thread has taken this one's place
                job.outcome = outcome
                self._changed.notify_all()
