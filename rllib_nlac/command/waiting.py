"""What a person reads while a command works: which stage, of what, how far, and for how long already."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Self

from rllib_nlac.activity import Doing, read_from_ray
from rllib_nlac.command.terminal import Terminal

INTERVAL_S = 0.5


class Waiting:
    """While it is entered, the terminal's last line says what goes on: in this process, and in the trials that run.

    Args:
        terminal: Where to say it.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._own = ""
        self._trials: dict[str, str] = {}  # the folder of each that runs, and how to call it beside others
        self._since: dict[str, tuple[str, float]] = {}  # of each the stage, and when it was seen first
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def turn_to(self, stage: str) -> None:
        """Says what this process does; empty where it waits for trials."""
        self._own = stage
        if stage:
            self._terminal.status(f"{stage} ...", is_news=True)

    def add(self, folder: str, name: str) -> None:
        """A trial has begun."""
        self.turn_to("")
        self._trials = {**self._trials, folder: name}

    def remove(self, folder: str) -> None:
        """A trial is over, or waits."""
        self._trials = {key: name for key, name in self._trials.items() if key != folder}

    def clear(self) -> None:
        """No trial runs any more."""
        self._trials = {}

    def end(self) -> None:
        """Nothing goes on any more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * INTERVAL_S)
        self._terminal.status("")

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # what cannot be shown is not worth a run
            while not self._ended.wait(INTERVAL_S):
                self._show()

    def _show(self) -> None:
        trials = self._trials
        if not trials:
            self._terminal.status(self._timed("", Doing(self._own)) if self._own else "")
            return
        doing = {folder: read_from_ray(folder) or Doing("starting the trial's process") for folder in trials}
        is_news = len(trials) == 1 and any(
            not now.iteration and self._since.get(folder, ("", 0.0))[0] != _name(now) for folder, now in doing.items()
        )
        texts = [self._timed(folder, now) for folder, now in doing.items()]
        if len(trials) > 1:
            texts = [f"{name} {text}" for name, text in zip(trials.values(), texts, strict=True)]
        if not self._ended.is_set():
            self._terminal.status(" | ".join(texts), is_news)

    def _timed(self, who: str, doing: Doing) -> str:
        """A stage, with the seconds that it has taken so far where they are worth mentioning."""
        stage, now = _name(doing), time.monotonic()
        before, since = self._since.get(who, ("", now))
        if before != stage:
            since = now
            self._since[who] = (stage, since)
        seconds = int(now - since)
        return f"{doing} ...{f' ({seconds} s)' if seconds >= 2 else ''}"


def _name(doing: Doing) -> str:
    return f"{doing.iteration} {doing.stage}"
