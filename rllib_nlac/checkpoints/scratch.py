"""Temporary folders that are removed even where the process that made them was killed: by the next one that makes its own.

Beside each folder lies a file of the same name that ends in ``.lock``, and its maker holds a lock on it (``flock``), which the
operating system gives up with the process. Whoever gets the lock may remove the folder; nobody else ever does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
logger = logging.getLogger(__name__)


class ScratchFolder:
    """A new folder that goes with this object, or with the process.

    What dead processes left of the same prefix in the same parent is removed first.

    Args:
        prefix: How its name begins; plain letters.
        parent: Where it is made; None for the system's temporary folder.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        sweep(f"{prefix}*", parent)
        self._lock, self.path = _claim(prefix, parent)
        self._remove = weakref.finalize(self, _remove, self._lock, self.path)

    def remove(self) -> None:
        """Removes the folder and all that is in it."""
        self._remove()


def sweep(pattern: str, parent: Path) -> list[Path]:
    """Removes the folders of dead processes.

    Args:
        pattern: What their names look like, as for ``Path.glob``.
        parent: Where they lie.

    Returns:
        The folders that there were.
    """
    return list(leftovers(pattern, parent))


def leftovers(pattern: str, parent: Path) -> Iterator[Path]:
    """Each folder of a dead process, which is removed when the next one is asked for."""
    for lock in sorted(parent.glob(f"{pattern}{LOCK}")):
        with dead(lock) as is_dead:
            if is_dead:
                folder = lock.with_name(lock.name.removesuffix(LOCK))
                yield folder
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    lock.unlink()
                    logger.info("removed %s, which an interrupted process left", folder)


@contextlib.contextmanager
def dead(lock: Path) -> Iterator[bool]:
    """Whether the process that made a lock has ended; while the block lasts nobody else is told so."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:  # gone, or another user's
        yield False
        return
    try:
        yield _try_lock(descriptor) and _is_at(descriptor, lock)
    finally:
        os.close(descriptor)


def _claim(prefix: str, parent: Path) -> tuple[int, Path]:
    """The lock first, the folder then: there is no moment at which the folder lies there unlocked."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=LOCK, dir=parent)
        lock, folder = Path(name), Path(name.removesuffix(LOCK))
        try:
            if _try_lock(descriptor, can_fail=True) and _is_at(descriptor, lock):
                folder.mkdir(mode=0o700)
                return descriptor, folder
        except FileExistsError:
            lock.unlink()
        except BaseException:
            _remove(descriptor, folder)
            raise
        os.close(descriptor)  # a sweep was faster


def _try_lock(descriptor: int, can_fail: bool = False) -> bool:
    """Takes a lock; where the file system knows none, folders are never swept, and ``can_fail`` says to go on without."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return can_fail
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _remove(descriptor: int, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(folder.name + LOCK).unlink(missing_ok=True)
    os.close(descriptor)
