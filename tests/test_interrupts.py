"""Ctrl+C at any moment, a run that fails, and one that would never end: what a person reads, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from test_resume import ROOT, SMALL, iterations

TRAINING = {**SMALL["small"], "stop": {"training_iteration": 50}}
ENVIRONMENTS = """
import gymnasium as gym
from rllib_nlac.envs.spaces import TextSpace

class Fails(gym.Env):
    def __init__(self):
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Guess [/INST].", {"system_prompt": "[bold]"}

    def step(self, action):
        raise LookupError("[/INST] [link=http://x] :smile: \\x1b]0;owned\\x07")

class Talks(Fails):
    def step(self, action):
        return "then [/INST] :smile: \\x1b]0;owned\\x07", 1.0, True, False, {"success": True}
"""


def of_mine(environment: str) -> dict:
    """The training of an environment of this file's."""
    config = {key: value for key, value in TRAINING["config"].items() if key != "env_config"}
    return {**TRAINING, "env": f"my_env:{environment}", "config": config}


def start(folder: Path, entry: dict, *options: str) -> subprocess.Popen[str]:
    """The command, in a session of its own as a terminal would have it."""
    (folder / "mine.yaml").write_text(yaml.safe_dump({"mine": entry}))
    command = [
        sys.executable,
        "-m",
        "rllib_nlac.command",
        "train",
        "file",
        "mine.yaml",
        "--storage-path",
        "my results",
        *options,
    ]
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=folder, stdout=(folder / "printed").open("w"), stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


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


def wait_for(what: Callable[[], object], process: subprocess.Popen[str], seconds: float = 240) -> object:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline and process.poll() is None, "it did not come to that"
        time.sleep(0.1)
    return found


def ended(process: subprocess.Popen[str], folder: Path, before: dict[int, str]) -> str:
    """What it printed, once it has ended and left nothing behind."""
    try:
        process.wait(60)
        deadline = time.monotonic() + 20
        while left := [
            pid for pid in before if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
        ]:
            assert time.monotonic() < deadline, [before[pid] for pid in left]
            time.sleep(0.2)
    finally:
        for pid in (process.pid, *before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return (folder / "printed").read_text()


def test_while_ray_starts(tmp_path):
    process = start(tmp_path, TRAINING)
    wait_for(lambda: "gcs_server" in family(process.pid).values(), process)
    before = family(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    printed = ended(process, tmp_path, before)
    assert process.returncode == 130 and "Traceback" not in printed, printed
    assert "Interrupted before anything was begun: there is nothing to go on with." in printed


def test_while_the_model_is_loaded(tmp_path):
    process = start(tmp_path, TRAINING)
    wait_for(lambda: "starts" in (tmp_path / "printed").read_text(), process)
    before = family(process.pid)
    process.send_signal(signal.SIGTERM)  # in the same way
    printed = ended(process, tmp_path, before)
    assert process.returncode == 130 and "Traceback" not in printed and "tune.run" not in printed, printed
    assert "Go on by: rllib train file mine.yaml --storage-path 'my results' --resume\n" in printed
    assert "from the beginning, as no checkpoint was written yet" in printed


def test_after_the_first_result(tmp_path):
    (tmp_path / "my_env.py").write_text(ENVIRONMENTS)
    training = of_mine("Talks")
    process = start(tmp_path, training)
    wait_for(lambda: iterations((tmp_path / "printed").read_text())[1:], process)
    before = family(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal, to all processes of the session
    printed = ended(process, tmp_path, before)
    assert process.returncode == 130 and "Traceback" not in printed and "tune.run" not in printed, printed
    assert "Stopping ... (once more: at once)" in printed
    assert "Go on by: rllib train file mine.yaml --storage-path 'my results' --resume\n" in printed
    assert "from the last checkpoint of each trial; all is in " + str(tmp_path / "my results" / "mine") in printed

    process = start(tmp_path, training, "--resume")  # and the second signal ends it at once
    wait_for(lambda: iterations((tmp_path / "printed").read_text()), process)
    before = family(process.pid)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    printed = ended(process, tmp_path, before)
    assert process.returncode == 130 and time.monotonic() - began < 30 and iterations(printed)[0] > 1, printed

    whole = sorted(path.parent for path in tmp_path.glob("my results/mine/*/checkpoint_*/rllib_nlac.json"))
    command = [sys.executable, "-m", "rllib_nlac.command", "evaluate", str(whole[0]), "--episodes", "2", "--render"]
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    played = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert played.returncode == 0 and r"then [/INST] :smile: \x1b]0;owned\x07" in played.stdout, played.stdout + played.stderr


def test_a_metric_that_never_comes_ends_the_run_after_its_first_result(tmp_path):
    process = start(tmp_path, {**TRAINING, "stop": {"success_rat": 0.9}})
    process.wait(300)
    printed = (tmp_path / "printed").read_text()
    assert process.returncode == 2 and iterations(printed) == [1] and "Traceback" not in printed, printed
    assert "Error: mine, stop: no result has 'success_rat'; did you mean 'env_runners/success_rate'?" in printed


def test_a_trial_that_fails_says_why_in_three_lines(tmp_path):
    (tmp_path / "my_env.py").write_text(ENVIRONMENTS)
    process = start(tmp_path, of_mine("Fails"))
    process.wait(300)
    printed = (tmp_path / "printed").read_text()
    assert process.returncode == 1 and "Traceback" not in printed and "\x1b" not in printed, printed
    where, what, everything = re.search(r": error\n(.*)\n(.*)\n(.*)\n", printed).groups()
    assert re.search(r"my_env\.py, line 14, in step \(called in rllib_nlac/sampling/\w+\.py, \w+\)$", where), where
    assert r"LookupError: [/INST] [link=http://x] :smile: \x1b]0;owned\x07" in what
    file = Path(everything.partition("all:")[2].strip())
    assert file.name == "error.txt" and str(tmp_path) in str(file) and "my_env.py" in file.read_text()


@pytest.mark.parametrize(
    "arguments", [["rllib", "train", "file", "a b.yaml"], ["rllib", "train", "file", "a b.yaml", "--resume"]]
)
def test_the_command_to_go_on_is_the_one_that_was_given(arguments, monkeypatch):
    from rllib_nlac.command.interrupts import command_to_resume

    monkeypatch.setattr(sys, "argv", arguments)
    assert command_to_resume() == "rllib train file 'a b.yaml' --resume"
