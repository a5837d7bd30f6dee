"""A script in a process of its own, which can be ended: a library that reads anyone's text may take for ever, or run it."""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import threading
import time

from rllib_nlac.rewards import sandbox_child

START_TIMEOUT_S = 180.0  # importing large libraries on a busy machine


class Worker:
    """The process, which reads lines and answers with lines. It starts with the first question, and again after ``stop``.

    The script's first argument is the path of ``sandbox_child``, with whose ``confine`` it gives up its rights. Then it says
    "ready". It sees none of the trainer's environment variables.

    Args:
        script: Path of a Python file that does not import this package, which would take seconds.
        arguments: Further arguments of the script.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._command = [sys.executable, "-P", script, sandbox_child.__file__, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def _send(self, line: str) -> bool:
        """Writes a line to the worker, which is started if needed; whether the worker is there to read it."""
        worker = self._process or self._start()
        assert worker.stdin is not None
        try:
            worker.stdin.write(line.encode() + b"\n")
        except OSError:  # it died of the former question
            self.stop()
            return False
        return True

    def _line(self, deadline: float) -> str:
        """The worker's next line; empty where it says nothing in time, or has died."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return ""
        return self._process.stdout.readline().decode("utf-8", "replace").strip()

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        # Unbuffered, so that what has not been read can be waited for.
        self._process = worker = subprocess.Popen(
            self._command,
            bufsize=0,
            env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **kept},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self.stop)
        if (said := self._line(time.monotonic() + START_TIMEOUT_S)) != "ready":
            self.stop()
            raise ValueError(self._why_not(said))
        return worker

    def _why_not(self, said: str) -> str:
        """The text of the error where the worker does not start and says this instead."""
        return f"{self._command[2]} does not start: {said or 'it says nothing'}"

    def stop(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
