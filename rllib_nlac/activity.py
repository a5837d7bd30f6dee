"""What a process does at the moment and how far it has come, for the person who waits for it.

A trial says it through Ray's key-value store, which every process of a cluster can reach: one small message every half second
at most, sent by a thread of its own, so that an iteration never waits for it. What cannot be sent is not worth a run.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

INTERVAL_S = 0.5
ANSWERS, EPISODES, STEPS = "answers", "episodes", "gradient steps"
FILES, MEGABYTES, TENSORS, TRIALS = "files", "MB", "tensors", "trials"


@dataclass(frozen=True)
class Doing:
    """One stage.

    Attributes:
        stage: What is done, as a person calls it; empty where nothing is known.
        iteration: In which iteration; 0 is before the first.
        done: How much is done.
        total: How much there is to do; 0 where that is not known.
        unit: What is counted.
        remark: What a person should know beside it.
    """

    stage: str = ""
    iteration: int = 0
    done: int = 0
    total: int = 0
    unit: str = ""
    remark: str = ""

    def __str__(self) -> str:
        """As a person reads it."""
        where = f"iteration {self.iteration}: " if self.iteration else ""
        count = f"{self.done} of {self.total} {self.unit}" if self.total else f"{self.done} {self.unit}" if self.done else ""
        return f"{where}{self.stage}{', ' if count else ''}{count}{'; ' if self.remark else ''}{self.remark}"


@contextlib.contextmanager
def repeatedly(work: Callable[[], None], interval_s: float, name: str) -> Iterator[None]:
    """While it lasts, a thread of that name calls a function after each interval of so many seconds."""
    ended = threading.Event()

    def call() -> None:
        while not ended.wait(interval_s):
            work()

    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Activity:
    """What this process does. Cheap enough to be told of every answer of an engine."""

    def __init__(self) -> None:
        self.now = Doing()
        self._ended: threading.Event | None = None

    def turn_to(self, stage: str, total: int = 0, unit: str = "", iteration: int | None = None) -> None:
        """Begins a stage, in the iteration of the last one unless another is given."""
        self.now = Doing(stage, self.now.iteration if iteration is None else iteration, 0, total, unit)

    @contextlib.contextmanager
    def stage(self, stage: str, total: int = 0, unit: str = "") -> Iterator[None]:
        """A stage within another, which goes on afterwards."""
        before = self.now
        self.turn_to(stage, total, unit)
        try:
            yield
        finally:
            self.now = before

    def advance(self, unit: str, count: int = 1) -> None:
        """So many more are done; a stage that counts something else takes no notice."""
        if self.now.unit == unit:
            self.now = replace(self.now, done=self.now.done + count, remark="")

    def reach(self, done: int, total: int) -> None:
        """So many are done of so many, for a stage that is measured and not counted."""
        self.now = replace(self.now, done=done, total=total)

    @contextlib.contextmanager
    def filling(self, stage: str, folder: Path, size: int) -> Iterator[None]:
        """A stage that writes files into a folder, measured by how much is in it.

        Args:
            stage: What is done.
            folder: The folder, empty before.
            size: How many bytes will be there, or about so many.
        """
        total = size // 10**6

        def measure() -> None:
            with contextlib.suppress(OSError):  # a file was renamed meanwhile
                written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                self.reach(min(written // 10**6, total), total)

        with self.stage(stage, total, MEGABYTES), repeatedly(measure, INTERVAL_S, "filling"):
            yield

    def remark(self, text: str) -> None:
        """Something about the stage, until it goes on."""
        self.now = replace(self.now, remark=text)

    def publish(self, send: Callable[[Doing], None]) -> None:
        """Sends what changes from now on, in a thread; it ends where something cannot be sent."""
        self._stop_sending()
        self._ended = ended = threading.Event()

        def work() -> None:
            last = None
            with contextlib.suppress(Exception):
                while not ended.is_set():
                    if (now := self.now) != last:
                        send(now)
                        last = now
                    ended.wait(INTERVAL_S)

        threading.Thread(target=work, name="activity", daemon=True).start()

    def withdraw(self) -> None:
        """Sends nothing any more; what went on has ended."""
        self._stop_sending()
        self.now = Doing()

    def _stop_sending(self) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None


activity = Activity()


def publish_to_ray(trial: str) -> None:
    """Lets the driver read what this process does, under the name of a trial's folder."""
    from ray.experimental import internal_kv

    activity.publish(lambda doing: internal_kv._internal_kv_put(_key(trial), json.dumps(asdict(doing))))


def read_from_ray(trial: str) -> Doing | None:
    """What a trial's process said last; None where it said nothing that can be read."""
    from ray.experimental import internal_kv

    with contextlib.suppress(Exception):
        said = json.loads(internal_kv._internal_kv_get(_key(trial)))
        iteration, done, total = (int(said[name]) for name in ("iteration", "done", "total"))
        return Doing(str(said["stage"]), iteration, done, total, str(said["unit"]), str(said["remark"]))
    return None


def _key(trial: str) -> str:
    return f"rllib_nlac:activity:{trial}"
