"""Runs a browser's driver, and sees to it that nothing of it outlives whoever asked for it. A program, not to be imported.

It prints the driver's port, or the last line of a driver that ended without one. Then it waits until something comes by its
standard input, be it the end, until its parent is gone, or until the driver is. All three end in the same way: every process
that descends from the driver is killed, those too that left their group or their parent, and the folder that they wrote to is
removed. A signal could not do this: none is sent when a process is killed, and a browser's processes do not stay in one group.

A worker of Ray kills its children, and no others, before it ends. So its child is but a stub, and who keeps is a grandchild.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_CHILD_SUBREAPER = 36  # of prctl: orphans below this process become its children instead of init's
POLL_S = 0.5
MAX_CAUSE = 150  # bytes of what a driver says before it ends


def main(command: list[str]) -> None:
    """Keeps ``command``, a driver that says on which port it listens; returns when nothing of it is left."""
    parent, stub = os.getppid(), os.getpid()
    keeper = os.fork()
    if keeper:
        wait_for(keeper, parent)
    else:
        keep(command, stub)


def wait_for(keeper: int, parent: int) -> None:
    """Waits until the keeper or the parent is gone; the keeper sees the end of this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while os.getppid() == parent and not os.waitpid(keeper, os.WNOHANG)[0]:
        signal.sigtimedwait({signal.SIGCHLD}, POLL_S)


def keep(command: list[str], parent: int) -> None:
    """Runs the driver until something ends it, and then all that came of it."""
    for sent in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(sent, lambda *_: sys.exit())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = tempfile.mkdtemp(prefix="rllib_nlac_browser_")
    # What a page shows of dates must not depend on where it runs; HOME is where Chromium leaves files beside its profile.
    environment = {**os.environ, "TMPDIR": folder, "HOME": folder, "TZ": "UTC", "LANG": "en_US.UTF-8", "LANGUAGE": "en_US"}
    try:
        driver = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        assert driver.stdout is not None
        output = driver.stdout.fileno()
        told: bytes | None = b""
        while os.getppid() == parent:
            readable, _, _ = select.select([0, output], [], [], POLL_S)
            if 0 in readable:
                break  # whatever is written here, and its end
            if output in readable:
                said = os.read(output, 65536)  # all of it, so that the driver never waits
                if not said:
                    if told is not None:
                        os.write(1, told.strip().rpartition(b"\n")[2][:MAX_CAUSE] + b"\n")
                    break
                if told is not None and (match := re.search(rb"successfully on port (\d+)", told := told + said)):
                    os.write(1, match[1] + b"\n")
                    told = None
            reap()
    finally:
        kill_all()
        shutil.rmtree(folder, ignore_errors=True)


def reap() -> None:
    """Takes note of children that ended, orphans among them, so that they do not stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_all() -> None:
    """Kills until nothing is left: what was about to be started becomes this process's child, too."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        left = descendants()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        reap()
        if not left:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
