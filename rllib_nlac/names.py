"""Says which name was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is most like this one, if any is."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), None)


def unknown_key(name: object, known: Iterable[str], what: str = "key") -> str:
    """An error text for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = nearest(str(name)[:80], names)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(names[:30])}"
    return f"unknown {what} {name!r:.80}; {hint}"
