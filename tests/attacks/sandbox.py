"""Runs every program of ``sandbox_programs`` in the code sandbox, and says which were contained.

Contained means: no reward, no error of the trainer, within the time bound, no trace outside, no process left, and the
processes, files and services around it as before.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from attacks.sandbox_programs import OUT, PRELUDE, SHOW, Program
from rllib_nlac.rewards.sandbox import Limits
from rllib_nlac.rewards.styles import reward

LIMITS = Limits(seconds=1.0)
BOUND_S = 10.0  # of one program, on a machine that may be busy


class Surroundings:
    """What a program must leave as it is: a process, a secret file and variable, a service, the temporary folder."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="nlac_attacks_")
        base = Path(self._folder.name)
        self._scratch = base / "tmp"
        self._scratch.mkdir()
        self._former = tempfile.tempdir
        tempfile.tempdir = str(self._scratch)
        self.value = secrets.token_hex(8)
        os.environ["ATTACK_SECRET"] = self.value
        self.secret = base / "home" / ".ssh" / "id_rsa"
        self.secret.parent.mkdir(parents=True)
        self.secret.write_text(self.value)
        self.victim = subprocess.Popen(["sleep", "1000"])
        self._service = socket.create_server(("127.0.0.1", 0))
        self.port = self._service.getsockname()[1]
        self._visitors = 0
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._service.close()
        self.victim.kill()
        self.victim.wait()
        del os.environ["ATTACK_SECRET"]
        tempfile.tempdir = self._former
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                self._service.accept()
            except OSError:
                return
            self._visitors += 1

    def source(self, program: Program) -> str:
        """The program, told where everything is."""
        known = {"VICTIM": self.victim.pid, "PARENT": os.getpid(), "PORT": self.port, "SECRET": str(self.secret)}
        told = "".join(f"{name} = {value!r}\n" for name, value in {**known, "PROJECT": __file__}.items())
        return told + PRELUDE + program.source

    def harm(self) -> list[str]:
        """What is not as before."""
        pid = self.victim.pid
        found = {
            "the other process died": self.victim.poll() is not None,
            "the other process is scheduled otherwise": os.sched_getscheduler(pid) != os.SCHED_OTHER
            or os.getpriority(os.PRIO_PROCESS, pid) != os.getpriority(os.PRIO_PROCESS, 0)
            or os.sched_getaffinity(pid) != os.sched_getaffinity(0),
            "the secret file was changed": not self.secret.exists()
            or self.secret.read_text() != self.value
            or stat.S_IMODE(self.secret.stat().st_mode) == 0,
            "the service was reached": self._visitors > 0,
            "something was left in the temporary folder": any(self._scratch.iterdir()),
            "something was left in /dev/shm": Path("/dev/shm/nlac_attack").exists(),
            "something was left in the kernel": any(
                str(0x6E6C6163) in Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("shm", "msg", "sem")
            ),
            "a process was left": _processes(str(self._scratch)),
        }
        return [what for what, happened in found.items() if happened]


def _processes(folder: str) -> bool:
    """Whether a process runs that was started with something in this folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if folder.encode() in path.read_bytes():
                return True
        except OSError:  # it has ended
            continue
    return False


def attack(program: Program, around: Surroundings) -> list[str]:
    """Runs one; what went wrong, nothing if it was contained."""
    truth = program.truth
    wanted = [truth] if truth is not SHOW else [SHOW, {"inputs": [""], "outputs": [around.value]}]
    problems, started = [], time.monotonic()
    # A program that shows the secret is run for it; all others for the sign that they got to their end.
    tests = wanted[-1] if truth is SHOW and OUT not in program.source else wanted[0]
    try:
        value = reward("code-sandbox", around.source(program), tests, limits=LIMITS)
    except Exception as error:
        return [f"the trainer got {type(error).__name__}: {error!s:.200}"]
    if value:
        problems.append(f"it got a reward of {value}")
    if (took := time.monotonic() - started) > BOUND_S:
        problems.append(f"it took {took:.1f} s")
    return problems + around.harm()
