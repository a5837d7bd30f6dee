"""A limit of time for a call that waits for other processes and has none of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TookTooLong(Exception):
    """The limit is over; the call may go on in its thread, and nobody waits for it."""


def within(limit_s: float, call: Callable[[], Result], close: Callable[[Result], object] | None = None) -> Result:
    """Makes a call in a thread of its own, and waits for it so long.

    Args:
        limit_s: Seconds.
        call: What is called; what it raises is raised here.
        close: Ends what it returns too late.

    Raises:
        TookTooLong: It has neither returned nor raised.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        if over.is_set() and results and close is not None:
            close(results[0])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        over.set()
        raise TookTooLong
    return results[0]
