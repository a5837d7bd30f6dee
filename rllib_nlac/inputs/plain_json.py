"""JSON from rows and answers, which anyone may have written: bounded, and without what two readers would take differently."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 64  # lists and objects within each other
MAX_DIGITS = 4300  # of a number; as many as Python itself turns into an integer


def loads(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: It is not JSON, too deep, has a number that is not finite or too long, or the same key twice in an object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_deep(value):
        raise ValueError(TOO_DEEP)
    return value


TOO_DEEP = f"lists and objects within each other, deeper than {MAX_DEPTH}"


def is_deep(value: Any) -> bool:
    """Whether lists and dicts stand within each other more than ``MAX_DEPTH`` times."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.80} stands there twice")
    return fields


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
