"""Texts that somebody else wrote, shown so that they can do no more than be read: environments', models', files', errors'."""

from __future__ import annotations

import re
import unicodedata

_PLAIN = "\n\t\u200c\u200d"  # of the characters below, those that some scripts and emoji are written with
_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats such as the bidirectional ones, surrogates, separators


def visible(text: str, encoding: str = "utf-8") -> str:
    r"""A text whose control characters are written out, as in ``\x1b``, and so is what the encoding does not have."""
    if not (text.isascii() and text.replace("\n", "").replace("\t", "").isprintable()):
        text = "".join(_escaped(c) if unicodedata.category(c) in _CONTROLS and c not in _PLAIN else c for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def fenced(text: str, language: str = "") -> str:
    """A block of Markdown that shows a text as it is: no line of it ends the block."""
    fence = "`" * max(3, longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def fenced_parts(parts: dict[str, str]) -> str:
    """Texts under headings of our own, as Markdown that none of them can change."""
    return "\n\n".join(f"**{name}**\n\n{fenced(text)}" for name, text in parts.items())


def code(text: object, length: int = 200) -> str:
    """A text in one line of Markdown, in a table's cell too, as code: nothing in it is markup.

    Args:
        text: Anything; what is no text is taken as ``str`` has it.
        length: What is longer is cut.
    """
    line = " ".join(visible(str(text)).split())
    line = line if len(line) <= length else f"{line[:length]} ..."
    if not line:
        return ""
    ticks = "`" * (longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}".replace("|", "\\|")  # a cell of a table ends at a bare one, in code too


def longest_run(text: str) -> int:
    """How many backticks stand in a row at most."""
    return max(map(len, re.findall("`+", text)), default=0)
