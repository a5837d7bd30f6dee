"""Says which name was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_key(name: str, known: Iterable[str]) -> str:
    """An error text for a key that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names[:30])}"
    return f"unknown key {name!r:.80}; {hint}"
