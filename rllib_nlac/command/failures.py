"""What a person needs of an error that came through several processes: where it was raised, what it says, and its file."""

from __future__ import annotations

import re
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*(?:\([\w.]*\))?)(?::.*)?$")
_CHAIN = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)[^\n]*\n")
MAX_CHARACTERS = 500


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
