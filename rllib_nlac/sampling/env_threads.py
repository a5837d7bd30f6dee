"""Threads that step environments in parallel, for those that wait; no call may take for ever.

They are daemons, unlike those of ``concurrent.futures``: one that never returns keeps no process from ending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rllib_nlac.sampling.slot import Outcome

IDLE_S = 10.0  # a thread without work ends after so long


@dataclass(eq=False)
class Job:
    """A call of an environment.

    Attributes:
        function: The call; it returns an error and raises none.
        argument: Its argument.
        began: When a thread took it up, by the monotonic clock.
        outcome: What came of it, None before.
    """

    function: Callable[[Any], Outcome]
    argument: Any
    began: float = 0.0
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
        self._running: set[Job] = set()
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
                next_s = self._give_up_overdue()
                done = [job for job in jobs if job.outcome is not None]
                if done or not wait:
                    return done
                self._changed.wait(next_s)

    def call(self, function: Callable[[Any], Outcome], argument: Any) -> Outcome:
        """Makes one call and waits for it."""
        (job,) = self.finished([self.submit(function, argument)], wait=True)
        assert job.outcome is not None
        return job.outcome

    def _give_up_overdue(self) -> float | None:
        """Ends the wait for running jobs whose time is over; seconds until the next one's is, None where nothing limits it.

        Of all jobs: one that is waited for may be queued behind another that hangs.
        """
        if self._limit_s is None or not self._running:
            return None
        now = time.monotonic()
        for job in [job for job in self._running if now >= job.began + self._limit_s]:
            job.outcome = Outcome(error=TimeoutError(f"no answer within {self._limit_s:g} s (env_step_timeout_s)"))
            self._running.remove(job)
            self._alive -= 1
            self._provide()
        return min((job.began + self._limit_s - now for job in self._running), default=None)

    def _provide(self) -> None:
        """Starts threads for what is queued."""
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
                self._running.add(job)
                self._changed.notify_all()  # whoever waits knows now until when
            outcome = job.function(job.argument)
            with self._changed:
                if job.outcome is not None:
                    return  # too late: another thread has taken this one's place
                job.outcome = outcome
                self._running.remove(job)
                self._changed.notify_all()
