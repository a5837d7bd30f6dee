"""Runs of the ``rllib`` command in processes of their own: started, waited for, interrupted, killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
TINY = {
    "env_config": {"num_objects": 16, "num_attributes": 8, "max_turns": 6},
    "num_cpus_for_main_process": 2,
    "seed": 0,
    "episodes_per_iteration": 8,
    "num_envs_per_env_runner": 8,
    "train_batch_size_per_learner": 32,
    "minibatch_size": 16,
    "lr": 0.001,
}
SMALL = {
    "run": "NLAC",
    "env": "TwentyQuestions",
    "stop": {"training_iteration": 8},
    "checkpoint_config": {"checkpoint_frequency": 1, "num_to_keep": 2},
    "config": TINY,
}


class Command:
    """A command that runs; ``pid``, ``poll``, ``wait`` and ``send_signal`` are those of a ``subprocess.Popen``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.returncode: int | None = None
        deadline = time.monotonic() + 120
        while not (folder / "pid").exists():
            assert time.monotonic() < deadline, "no command was started"
            time.sleep(0.01)
        self.pid = int((folder / "pid").read_text())

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """Empty where it went to the same place as the output."""
        return (self._folder / "stderr").read_text() if (self._folder / "stderr").exists() else ""

    def poll(self) -> int | None:
        if self.returncode is None and (self._folder / "status").exists():
            self.returncode = int((self._folder / "status").read_text())
        return self.returncode

    def wait(self, seconds: float = 300) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < deadline, f"it has not ended after {seconds:g} s: {self.stdout[-3000:]}"
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Commands:
    """Starts commands from one process that has imported everything.

    Args:
        folder: Where what they print is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        self._started: list[Command] = []
        environment = self.environment()
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("command_server.py"))],
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def environment(self) -> dict[str, str]:
        """That of a terminal in which no Ray was started: one that this process has started leaves a variable behind."""
        own = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
        return own | {"COLUMNS": "160", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def start(self, *arguments: object, cwd: Path = ROOT, merged: bool = True, ray: str = "local") -> Command:
        """A command in a session of its own, as a terminal would have it, with a Ray of its own or one that it joins."""
        folder = self._folder / f"{next(self._numbers):03d}"
        folder.mkdir()
        environment = self.environment() | {"RAY_ADDRESS": ray}
        if ray != "local" and "RAY_AUTH_MODE" in os.environ:
            environment["RAY_AUTH_MODE"] = os.environ["RAY_AUTH_MODE"]  # whoever joins is asked for the token below HOME
        job = {
            "folder": str(folder),
            "cwd": str(cwd),
            "env": environment,
            "arguments": [str(each) for each in arguments],
            "stdout": str(folder / "stdout"),
            "stderr": str(folder / ("stdout" if merged else "stderr")),
        }
        (folder / "stdout").touch()
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        self._started.append(Command(folder))
        return self._started[-1]

    def run(self, *arguments: object, seconds: float = 600, **where) -> Command:
        """A command that has ended."""
        command = self.start(*arguments, merged=False, **where)
        try:
            command.wait(seconds)
        finally:
            if command.poll() is None:
                kill_all(command)
        return command

    def train(
        self, folder: Path, entry: dict, *options: str, storage: str | Path | None = None, name="small", **where
    ) -> Command:
        """Trains an experiment that is written to ``folder``, where the command runs."""
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({name: entry}))
        return self.start("train", "file", f"{name}.yaml", "--storage-path", storage or folder, *options, cwd=folder, **where)

    def stop(self) -> None:
        """Ends the process that starts commands, and what a test that failed has left running."""
        for command in self._started:
            if command.poll() is None:
                kill_all(command)
        self._server.stdin.close()
        self._server.wait(60)


def family(pid: int) -> dict[int, str]:
    """All descendants of a process by id, with their names."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, rest = status.read_text().split("(", 1)[1].rsplit(")", 1)
            if rest.split()[0] != "Z":
                children.setdefault(int(rest.split()[1]), []).append(int(status.parent.name))
                names[int(status.parent.name)] = name
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return {each: names.get(each, "") for each in found[1:]}


def kill_all(command: Command) -> None:
    """SIGKILL for the command and everything that it started, Ray's daemons in sessions of their own included."""
    for pid in (command.pid, *family(command.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.wait()


def wait_for(what: Callable[[], object], command: Command, seconds: float = 240) -> object:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline and command.poll() is None, f"it did not come to that: {command.stdout[-3000:]}"
        time.sleep(0.05)
    return found


def ended(command: Command, before: dict[int, str]) -> str:
    """What it printed, once it has ended and left nothing behind."""
    try:
        command.wait(60)
        deadline = time.monotonic() + 20
        while left := [
            pid for pid in before if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
        ]:
            assert time.monotonic() < deadline, [before[pid] for pid in left]
            time.sleep(0.2)
    finally:
        for pid in (command.pid, *before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return command.stdout


def iterations(output: str) -> list[int]:
    return [int(line.split()[0]) for line in output.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+\s", line)]
