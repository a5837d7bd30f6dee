"""Runs a program that nobody trusts: a process of its own with limits of time, memory and files, and no network.

It guards against programs that run wild, cheat or attack, with what Linux gives an ordinary user (rlimits, Landlock, seccomp),
and starts nothing where the kernel lacks them. It is no virtual machine: what it does not hold off stands in
``docs/reliability.md``; against an attacker of the kernel itself run the whole training in one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_nlac.rewards import sandbox_child

MAX_OUTPUT = 1 << 20  # bytes of output that are read
MAX_FILES, MAX_THREADS = 100, 64
START_TIMEOUT_S = 30.0  # of Python itself, which is not the program's fault on a busy machine
POLL_S = 0.02  # between two looks at files and threads, which the kernel does not count for us


class SandboxError(RuntimeError):
    """The sandbox itself cannot work here."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: Time limit in seconds once it runs, and limit of processor time.
        memory_mb: Limit of address space, in MiB.
        file_mb: Size limit of one file, in MiB; the output counts as one.
        folder_mb: Size limit of all its files together, in MiB.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_mb: int = 8
    folder_mb: int = 64


@dataclass(frozen=True)
class Run:
    """How a program ended.

    Attributes:
        ok: It ended by itself, with exit status 0.
        output: What it printed, cut at ``MAX_OUTPUT`` bytes.
        problem: "timeout", which limit it passed, or the end of its error stream; empty where ``ok``.
    """

    ok: bool
    output: str
    problem: str


def run_python(
    program: str, stdin: str = "", call: tuple[str, Sequence[Any]] | None = None, limits: Limits | None = None
) -> Run:
    """Runs a Python program in the sandbox.

    Args:
        program: Its source.
        stdin: What it can read.
        call: A function of the program, or a method of its class ``Solution``, and arguments to call it with afterwards; what
            it returns is the last line of the output, as JSON.
        limits: What it may use.

    Raises:
        SandboxError: The kernel does not offer Landlock or seccomp.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="rllib_nlac_sandbox_") as scratch:
        base = Path(scratch)
        folder, state = base / "work", base / "state"
        folder.mkdir()
        state.write_text("it did not start")
        (base / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (base / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        settings = {
            "program": str(base / "program.py"),
            "call": call,
            "folder": str(folder),
            "state": str(state),
            "parent": os.getpid(),
            "memory_bytes": limits.memory_mb << 20,
            "cpu_s": int(limits.seconds) + 1,
            "file_bytes": limits.file_mb << 20,
        }
        (base / "settings.json").write_text(json.dumps(settings))
        command = [sys.executable, "-I", "-S", sandbox_child.__file__, str(base / "settings.json")]
        # Into files, whose size is limited: a pipe would let a program fill the memory of whoever reads it.
        with (base / "stdin").open() as given, (base / "out").open("wb") as out, (base / "err").open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=folder,
                start_new_session=True,
                close_fds=True,
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            )
            try:
                passed_limit = _watch(process, folder, state, limits)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output, errors, refusal = _head(base / "out"), _head(base / "err"), _head(state)
    if refusal:  # the child alone can write there, and only before the program runs
        raise SandboxError(f"the code sandbox cannot work here: {refusal}. {errors[-500:]}".strip())
    if passed_limit:
        return Run(False, output, passed_limit)
    status = process.returncode
    return Run(status == 0, output, "" if status == 0 else errors[-2000:] or f"exit status {status}")


def _watch(process: subprocess.Popen[bytes], folder: Path, state: Path, limits: Limits) -> str:
    """Waits for the end; which limit was passed before it, empty where none was."""
    deadline, runs = time.monotonic() + START_TIMEOUT_S, False
    while (left := deadline - time.monotonic()) > 0:
        try:
            process.wait(min(POLL_S, left))
            return ""
        except subprocess.TimeoutExpired:
            if problem := _too_much(process.pid, folder, limits):
                return problem
        if not runs and state.stat().st_size == 0:
            deadline, runs = time.monotonic() + limits.seconds, True
    return "timeout"


def _too_much(pid: int, folder: Path, limits: Limits) -> str:
    size = 0
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            try:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:  # removed since it was listed
                continue
            if number >= MAX_FILES or size > limits.folder_mb << 20:
                return f"more than {MAX_FILES} files, or {limits.folder_mb} MiB in them"
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return ""
    threads = re.search(r"^Threads:\s*(\d+)", status, re.MULTILINE)
    return f"more than {MAX_THREADS} threads" if threads and int(threads[1]) > MAX_THREADS else ""


def why_unavailable() -> str | None:
    """What the sandbox lacks on this machine; None where it works."""
    try:
        run_python("")
    except SandboxError as error:
        return str(error)
    return None


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_OUTPUT).decode("utf-8", "replace")
