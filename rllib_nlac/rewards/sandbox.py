"""Runs a program that nobody trusts: a process of its own with limits of time, memory and files, and no network.

It guards against programs that run wild or cheat, with what Linux gives an ordinary user (rlimits, Landlock, seccomp), and
starts nothing where the kernel lacks them. It is no virtual machine: against an attacker of the kernel itself run the whole
training in one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_nlac.rewards import sandbox_child

MAX_OUTPUT = 1 << 20  # bytes of output that are read


class SandboxError(RuntimeError):
    """The sandbox itself cannot work here."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: Of time, and of processor time.
        memory_mb: Of address space, in MiB.
        file_mb: Of one file, its output included, in MiB.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_mb: int = 8


@dataclass(frozen=True)
class Run:
    """How a program ended.

    Attributes:
        ok: It ended by itself, with exit status 0.
        output: What it printed, cut at ``MAX_OUTPUT`` bytes.
        problem: "timeout", or the end of what it printed to its error stream; empty where ``ok``.
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
        folder = base / "work"
        folder.mkdir()
        (base / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (base / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        settings = {
            "program": str(base / "program.py"), "call": call, "folder": str(folder), "memory_bytes": limits.memory_mb << 20,
            "cpu_s": int(limits.seconds) + 1, "file_bytes": limits.file_mb << 20,
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", sandbox_child.__file__, json.dumps(settings)]
        # Into files, whose size is limited: a pipe would let a program fill the memory of whoever reads it.
        with (base / "stdin").open() as given, (base / "out").open("wb") as out, (base / "err").open("wb") as err:
            process = subprocess.Popen(
                command, stdin=given, stdout=out, stderr=err, cwd=folder, start_new_session=True, close_fds=True,
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            )  # fmt: skip
            try:
                status = process.wait(limits.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output, errors = _head(base / "out"), _head(base / "err")
    if status == sandbox_child.REFUSED and errors.startswith("the sandbox needs"):
        raise SandboxError(f"the code sandbox cannot work here: {errors.strip()}")
    if status is None:
        return Run(False, output, "timeout")
    return Run(status == 0, output, "" if status == 0 else errors[-2000:] or f"exit status {status}")


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
