"""How a command ends that does not end well: what was typed wrongly, what failed while it ran, and Ctrl+C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil
import typer
from typer.core import TyperGroup

from rllib_nlac.command.terminal import Terminal, terminal

INTERRUPTED = 130  # exit code of a command that was interrupted, as shells have it
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*(?:\([\w.]*\))?)(?::.*)?$")
_CHAIN = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)[^\n]*\n")
MAX_CHARACTERS = 500


class RunFailed(Exception):
    """What was asked for was right, and failed while it ran."""


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Within it an error is one of what runs, and no longer one of what was typed.

    Raises:
        RunFailed: Something failed.
    """
    try:
        yield
    except Exception as error:
        raise RunFailed from error


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Prints errors in few lines, without a traceback: exit code 2 for what was typed, 1 for what failed while it ran."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        terminal.say(f"Error: {error}", "red")
        sys.exit(2)
    except Exception as error:
        from rllib_nlac.checkpoints.storage import StorageError  # too long to import before anything is printed

        if isinstance(error, StorageError):
            terminal.say(f"Error: {error}", "red")
            sys.exit(1)
        text = text_of(error.__cause__ if isinstance(error, RunFailed) and error.__cause__ else error)
        terminal.say("Failed:", "red")
        for line in lines_of(text, write_traceback(text)):
            terminal.say(line)
        sys.exit(1)


class Commands(TyperGroup):
    """All commands; what is wrong with the words of a command line is printed as any other text."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            code = 1
        except Exception as error:
            context = getattr(error, "ctx", None)
            if not standalone_mode or not hasattr(error, "format_message"):  # what the parser raises can say its message
                raise
            if type(error).__name__ != "NoArgsIsHelpError":  # that has printed the help
                errors = Terminal(stderr=True)
                if context is not None:
                    errors.say(f"{context.get_usage()}\nTry '{context.command_path} --help'.")
                errors.say(f"Error: {error.format_message()}", "red")
            code = error.exit_code  # type: ignore[attr-defined]
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


@dataclass(frozen=True)
class Cause:
    """Why something failed.

    Attributes:
        place: File, line and function that raised, and the last of this package's before it.
        message: Type and text of the exception.
    """

    place: str
    message: str


def text_of(error: BaseException) -> str:
    """The traceback as text; of an error from another process that of the other process."""
    return "".join(traceback.format_exception(error))


def find_cause(text: str) -> Cause:
    """Reads the cause out of a traceback, through all processes that it crossed.

    Args:
        text: A traceback. Of a chain of exceptions the first shows the place, and the last, which was raised to explain it,
            what is wrong; where Ray put a traceback into another, the innermost counts.
    """
    blocks = _CHAIN.split(text)
    frames, explained = list(_FRAME.finditer(blocks[0])), list(_FRAME.finditer(blocks[-1]))
    if not frames or not explained:
        return Cause("", _short(text))
    root = _message(blocks[0][frames[-1].end() :])
    message = _message(blocks[-1][explained[-1].end() :])
    if (root.partition(": ")[2] or root) not in message:
        message = f"{message} (from {root})"
    return Cause(_place(frames), message)


def _place(frames: list[re.Match[str]]) -> str:
    last = frames[-1]
    place = f"{last['file']}, line {last['line']}, in {last['function']}"
    ours = [frame for frame in frames if "/rllib_nlac/" in frame["file"]]
    if ours and ours[-1] is not last:
        caller = ours[-1]
        place += f" (called in rllib_nlac/{caller['file'].rpartition('/rllib_nlac/')[2]}, {caller['function']})"
    return place


def _message(tail: str) -> str:
    """Type and text of the exception after a traceback's last frame."""
    lines = tail.split("\n")
    for number, line in enumerate(lines):
        if _RAISED.match(line):
            return _short("\n".join(lines[number:]))
    return _short(tail)


def _short(text: str) -> str:
    """The first paragraph of a text, cut where it is long."""
    lines = [line.strip() for line in text.strip().split("\n\n")[0].split("\n") if line.strip()]
    joined = " ".join(lines[:4])
    return joined if len(joined) <= MAX_CHARACTERS else f"{joined[:MAX_CHARACTERS]} ..."


def lines_of(text: str, file: str | Path) -> list[str]:
    """An error in three lines: where, what, and where all of it stands."""
    cause = find_cause(text)
    return [
        f"  where: {cause.place or 'unknown'}",
        f"  what:  {cause.message}",
        f"  all:   {file}",
    ]


def write_traceback(text: str) -> Path:
    """Writes a traceback to a file of its own among the temporary ones."""
    with tempfile.NamedTemporaryFile(prefix="rllib_error_", suffix=".txt", delete=False) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return Path(file.name)


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

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._terminal.status("")
            for child in psutil.Process().children(recursive=True):  # Ray's agents outlive their parent by a minute
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os._exit(INTERRUPTED)
        self.received = True
        self._terminal.say("\nStopping ... (once more: at once)", "bold")
        if callable(signal.getsignal(signal.SIGUSR1)):
            signal.raise_signal(signal.SIGUSR1)
            self.listen()  # Tune has put back what was before it
        else:
            raise KeyboardInterrupt
