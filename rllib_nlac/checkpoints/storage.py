"""A storage folder that cannot be written: found before Ray starts, or said in one message where it happens later."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllib_nlac.checkpoints.checkpoint import last_whole

PROBE_BYTES = 64 << 10
# The loggers through which Tune prints a traceback, each time anew, when it cannot write its own files.
TUNES_LOGGERS = ("ray.tune.execution.experiment_state", "ray.tune.execution.tune_controller", "ray.train._internal.syncer")
LAST_COPY_FAILED = "Last sync command failed"
ADVICE = "Make room or mend the folder, and go on with --resume; or give another --storage-path"
STORAGE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ESTALE,
    errno.ENAMETOOLONG,
}


class StorageError(RuntimeError):
    """Results or checkpoints cannot be written where they should go."""


def reason(error: OSError) -> str:
    """What the operating system says, without what a library adds."""
    return os.strerror(error.errno) if error.errno else str(error)


def check_storage(folder: Path) -> None:
    """Makes a folder and writes to it.

    Raises:
        StorageError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = _in_the_way(folder)
        raise StorageError(
            f"cannot write to the storage folder {folder}: {what or reason(error)}. Mend it, or give another --storage-path"
        ) from error


def _in_the_way(folder: Path) -> str:
    """Names the file that lies where a folder should be."""
    file = next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None)
    return f"{file} is a file and no folder" if file else ""


def cannot_write(what: str, where: object, error: OSError, trial: Path | None) -> StorageError:
    """The error to raise for one of the operating system's."""
    whole = last_whole(trial) if trial is not None else None
    left = f"The last whole checkpoint is {whole}" if whole else "There is no whole checkpoint before it"
    return StorageError(f"cannot write {what} to {where}: {reason(error)}. {left}. {ADVICE}")


class StorageWatch(logging.Filter):
    """Takes what Tune logs of files that it cannot write, and says it once.

    Attributes:
        error: The last one, as the operating system put it.
        is_explained: Whether a trial ended by it, which is printed with the trial. The command says so.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = folder
        self.error: OSError | None = None
        self.is_explained = False

    def filter(self, record: logging.LogRecord) -> bool:
        """False for errors of the storage that were said before."""
        if record.getMessage().startswith(LAST_COPY_FAILED):  # it comes as a text, with its traceback
            self.error = self.error or OSError(errno.EIO, os.strerror(errno.EIO))
            return False
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            first, self.error = self.error is None, error
            if not first:
                return False
            record.msg, record.args, record.exc_info = "%s: %s; trying again", (self.folder, reason(error)), None
        return True


@contextmanager
def watched(folder: Path | None) -> Iterator[StorageWatch]:
    """While Tune runs: files of its own that cannot be written are said once, and end in one message.

    Args:
        folder: The experiment's; None where it is not a local one, and Tune speaks for itself.

    Raises:
        StorageError: Tune cannot do without a file, or the folder still cannot be written when the run has ended.
    """
    watch = StorageWatch(folder)
    if folder is None:
        yield watch
        return
    for name in TUNES_LOGGERS:
        logging.getLogger(name).addFilter(watch)
    try:
        yield watch
        if watch.error is not None and not watch.is_explained:
            check_storage(folder)
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        newest = max(folder.glob("*/checkpoint_[0-9]*"), key=lambda path: path.stat().st_mtime, default=None)
        raise cannot_write("results", folder, error, newest and newest.parent) from error
    finally:
        for name in TUNES_LOGGERS:
            logging.getLogger(name).removeFilter(watch)
