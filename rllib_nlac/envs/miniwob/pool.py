"""Browsers that the environments of a process share, and the reaper of what nobody has any more."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from importlib import resources

from rllib_nlac.envs.miniwob.browser import Browser, Programs, Window

MAX_WINDOWS = 16  # of a browser: more browsers are started than asked for before one has more
IDLE_S = 60.0  # a browser without a window ends after so long
REAP_S = 2.0  # between two looks of the reaper


class Pool:
    """Browsers with windows to lend.

    Args:
        programs: What a browser is made of.
        size: Browsers that are started before two windows share one.
    """

    def __init__(self, programs: Programs, size: int) -> None:
        self._programs, self._size = programs, size
        self._script = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
        self._lock = threading.Lock()
        self._lent: dict[Browser, set[Window]] = {}
        self._idle_since: dict[Browser, float] = {}
        self._abandoned: deque[Window] = deque()  # finalizers append; they may take no lock
        self._is_reaping = False

    def lend(self, borrower: object) -> Window:
        """A window of the browser that has the fewest, until ``give_back`` is called or the borrower is gone.

        Raises:
            BrowserGone: No browser starts, or the chosen one died meanwhile.
        """
        with self._lock:
            self._reap()
            browser = min(self._lent, key=lambda each: len(self._lent[each]), default=None)
            if browser is None or len(self._lent) < self._size or len(self._lent[browser]) >= MAX_WINDOWS:
                browser = Browser(self._programs)
                self._lent[browser] = set()
            window = browser.open_window(self._script)
            self._lent[browser].add(window)
            self._start_reaping()
        weakref.finalize(borrower, self._abandoned.append, window).atexit = False
        return window

    def give_back(self, window: Window) -> None:
        """Closes a window that is no longer needed; one that was given back before is left alone."""
        with self._lock:
            if window in self._lent.get(window.browser, ()):
                self._return(window)

    def _return(self, window: Window) -> None:
        self._lent[window.browser].discard(window)
        self._idle_since[window.browser] = time.monotonic()
        window.close()

    def _reap(self) -> None:
        """Closes what was abandoned, and forgets browsers that died or have had nothing to do for long."""
        while self._abandoned:
            window = self._abandoned.popleft()
            if window in self._lent.get(window.browser, ()):
                self._return(window)
        for browser, windows in list(self._lent.items()):
            is_idle = not windows and time.monotonic() - self._idle_since.get(browser, time.monotonic()) > IDLE_S
            if browser.is_dead or is_idle:
                del self._lent[browser]
                self._idle_since.pop(browser, None)
                browser.kill()

    def _start_reaping(self) -> None:
        if not self._is_reaping:
            self._is_reaping = True
            threading.Thread(target=self._keep_reaping, name="browser reaper", daemon=True).start()

    def _keep_reaping(self) -> None:
        while True:
            time.sleep(REAP_S)
            with self._lock:
                self._reap()
                if not self._lent:
                    self._is_reaping = False
                    return

    def browsers(self) -> list[Browser]:
        """Those that run."""
        return [browser for browser in list(self._lent) if not browser.is_dead]

    def num_windows(self) -> int:
        """How many are lent."""
        with self._lock:
            self._reap()
            return sum(map(len, self._lent.values()))

    def close(self) -> None:
        """Ends all browsers."""
        with self._lock:
            for browser in self._lent:
                browser.kill()
            self._lent.clear()


_pools: dict[tuple[int, Programs, int], Pool] = {}
_pools_lock = threading.Lock()


def pool_of(programs: Programs, size: int) -> Pool:
    """This process's pool; a forked process has one of its own."""
    with _pools_lock:
        return _pools.setdefault((os.getpid(), programs, size), Pool(programs, size))


def close_all() -> None:
    """Ends all browsers of this process."""
    for (process, *_), pool in list(_pools.items()):
        if process == os.getpid():
            with contextlib.suppress(Exception):
                pool.close()


# A process that is killed instead loses them too: see keeper.py.
atexit.register(close_all)
