"""Ctrl+C: the first ends a run so that it can go on later, the second ends everything at once."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from rllib_nlac.command.terminal import Terminal

EXIT_CODE = 130  # of a command that was interrupted, as shells have it
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAMPLES = "--num-samples"


class Interrupts:
    """While it is entered, SIGINT and SIGTERM end a run in order.

    Before Tune runs, the first signal raises KeyboardInterrupt. While it runs, Tune is asked to stop by the signal that it
    takes for this, SIGUSR1: it saves what it knows of the trials and ends them. A second signal ends the process.

    Args:
        terminal: Where to say what happens.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._before: dict[signal.Signals, Any] = {}
        self.received = False

    def __enter__(self) -> Self:
        self._before = {each: signal.getsignal(each) for each in (*SIGNALS, signal.SIGUSR1)}
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self.listen()
        return self

    def listen(self) -> None:
        """Takes the signals over, again after Ray has started, which takes SIGTERM for itself."""
        for each in SIGNALS:
            signal.signal(each, self._interrupt)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._terminal.status("")
            for child in psutil.Process().children(recursive=True):  # Ray's agents outlive their parent by a minute
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os._exit(EXIT_CODE)
        self.received = True
        self._terminal.say("\nStopping ... (once more: at once)", "bold")
        if callable(signal.getsignal(signal.SIGUSR1)):
            signal.raise_signal(signal.SIGUSR1)
            self.listen()  # Tune has put back what was before it
        else:
            raise KeyboardInterrupt


def command_to_resume() -> str:
    """The command that was given, as it must be typed to go on: the number of samples is what the run was begun with."""
    given = sys.argv[1:]
    is_left_out = [each.split("=")[0] == SAMPLES or before == SAMPLES for before, each in pairwise(["", *given])]
    arguments = [each for each, left_out in zip(given, is_left_out, strict=True) if not left_out]
    return shlex.join(["rllib", *arguments, *([] if "--resume" in arguments else ["--resume"])])
