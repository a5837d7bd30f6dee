"""Text from outside: what no tokenizer and no file takes is replaced where it enters."""

from __future__ import annotations

import re
from typing import Any

_REFUSED = re.compile("[\0\ud800-\udfff]")


def readable(text: str) -> tuple[str, int]:
    """A text with U+FFFD for each NUL and each lone surrogate, and how many these were.

    UTF-8 has no lone surrogates, so a tokenizer raises at them and no file can be written with them; JSON may hold them.
    """
    if text.isascii() and "\0" not in text:
        return text, 0
    return _REFUSED.subn("\ufffd", text)


def readable_values(values: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A mapping whose texts are ``readable``, and how many characters of them were replaced."""
    total, changed = 0, dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, str):
            text, count = readable(value)
            if count:
                changed[key], total = text, total + count
    return ({**values, **changed} if changed else values), total
