"""What a person reads in a terminal: every command prints through here, and no text can do more than be read.

Error texts, names of files and trials, and what environments and models say come from elsewhere. Brackets in them are no
markup, ``:smile:`` is no picture, and what would move the cursor, change the window's title or turn the direction of writing
is shown as an escape.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PLAIN = "\n\t\u200c\u200d"  # of the characters below, those that some scripts and emoji are written with
_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats such as the bidirectional ones, surrogates, separators


def visible(text: str, encoding: str = "utf-8") -> str:
    r"""A text whose control characters are written out, as in ``\x1b``, and so is what the terminal cannot show."""
    if not (text.isascii() and text.replace("\n", "").replace("\t", "").isprintable()):
        text = "".join(_escaped(c) if unicodedata.category(c) in _CONTROLS and c not in _PLAIN else c for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class Terminal:
    """Prints plain texts and small tables.

    Args:
        stderr: Whether to the standard error, in place of the standard output.
    """

    def __init__(self, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr)

    def say(self, text: object = "", style: str = "") -> None:
        """Prints a text as it is, in lines as long as they are.

        Args:
            text: Anything; what is no text is printed as ``str`` has it.
            style: One of rich's, as "red" or "bold".
        """
        self._console.print(self._text(text, style), soft_wrap=True, highlight=False)

    def rule(self, title: str) -> None:
        """Prints a line with a title in it."""
        self._console.rule(self._text(title))

    def rows(self, rows: Sequence[Sequence[str]], head: Sequence[str] = (), title: str = "") -> None:
        """Prints a table: with a head it has no lines, without it is a box with a title."""
        if head:
            table = Table(box=None, pad_edge=False)
            for name in head:
                table.add_column(self._text(name))
        else:
            table = Table(title=self._text(title) if title else None, show_header=False)
        for row in rows:
            table.add_row(*map(self._text, row))
        self._console.print(table)

    def _text(self, text: object, style: str = "") -> Text:
        return Text(visible(str(text), self._console.encoding), style=style)


class VisibleFormatter(logging.Formatter):
    """Formats what is logged, foreign text included, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


terminal = Terminal()


def pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A mapping as the rows of a table."""
    return [(name, str(value)) for name, value in values.items()]
