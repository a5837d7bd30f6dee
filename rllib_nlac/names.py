"""Names: which one was probably meant, what ``my_module:MyClass`` names, and which path is an address."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable
from typing import Any


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is most like this one, if any is."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), None)


def unknown_key(name: object, known: Iterable[str], what: str = "key") -> str:
    """An error text for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = nearest(str(name)[:80], names)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(names[:30])}"
    return f"unknown {what} {name!r:.80}; {hint}"


def look_in_this_folder() -> None:
    """Has modules of the current folder found, as ``python -m`` does and an installed command does not."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def is_address(path: str) -> bool:
    """Whether a path is an address, which begins with its scheme, as s3://bucket/results."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def names_attribute(name: str) -> bool:
    """Whether a name reads as ``module:attribute``; gymnasium's ids, as "module:Name-v0", do not."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def attribute_of(name: str, what: str, example: str) -> Any:
    """What ``module:attribute`` names; modules are looked for in the current directory too.

    Raises:
        ValueError: There is no such module or attribute.
    """
    module, _, attribute = name.partition(":")
    look_in_this_folder()
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} {name!r}: {error}; it must read as in {example!r}") from error
