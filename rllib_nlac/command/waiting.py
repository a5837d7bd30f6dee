"""What a person reads while a command works: which stage, of what, how far, and for how long already."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rllib_nlac.activity import Doing, read_from_ray
from rllib_nlac.command.terminal import Terminal

INTERVAL_S = 0.5
MOST_TRIALS = 16  # more than a line shows


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

    def heed(self, trials: Mapping[str, str]) -> None:
        """Which trials run or are about to, from now on.

        Args:
            trials: The folder of each, and how to call it beside others.
        """
        self._trials = dict(trials)

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
        if self._own or not trials:
            self._terminal.status(self._timed("", Doing(self._own)) if self._own else "")
            return
        known = {folder: read_from_ray(folder) for folder in list(trials)[:MOST_TRIALS]}
        doing = {folder: now for folder, now in known.items() if now is not None and now.stage}
        if not doing:  # the first of them
            doing = {folder: Doing("loading the libraries in the trial's process") for folder in list(trials)[:1]}
        is_news = len(doing) == 1 and any(
            not now.iteration and self._since.get(folder, ("", 0.0))[0] != _name(now) for folder, now in doing.items()
        )
        texts = [self._timed(folder, now) for folder, now in doing.items()]
        if len(trials) > 1:
            texts = [f"{trials[folder]} {text}" for folder, text in zip(doing, texts, strict=True)]
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
