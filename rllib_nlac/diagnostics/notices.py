"""Warnings about a running trial: each is given once, in the log and in the results, while its trouble lasts."""

from __future__ import annotations

import logging

NOTICES = "notices"  # key of the results: a text, a line for each; ``rllib train`` prints it
logger = logging.getLogger(__name__)


class Notices:
    """Warnings, each given when its trouble begins, and again if it returns after it was over."""

    def __init__(self) -> None:
        self._standing: set[str] = set()
        self._new: list[str] = []

    def update(self, trouble: str, text: str | None) -> None:
        """Takes note of how it stands with one trouble.

        Args:
            trouble: Its name.
            text: What to say of it; None where there is no trouble now.
        """
        if text is None:
            self._standing.discard(trouble)
        elif trouble not in self._standing:
            self._standing.add(trouble)
            self._new.append(text)
            logger.warning("%s", text)

    def take(self) -> list[str]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new


def shown(text: str, length: int = 200) -> str:
    """A text that somebody else wrote, in quotes, shortened, with everything escaped that a terminal might obey."""
    return repr(text[:length]) + (f" and so on, {len(text)} characters" if len(text) > length else "")
