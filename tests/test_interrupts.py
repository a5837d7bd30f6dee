"""Ctrl+C at any moment, a run that fails, and one that would never end: what a person reads, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from command_runs import SMALL, Command, ended, family, iterations, wait_for
from typer.testing import CliRunner

TRAINING = {**SMALL, "stop": {"training_iteration": 50}}
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


@pytest.fixture()
def start(commands, tmp_path):
    def start(entry: dict, *options: str, ray: str = "local") -> Command:
        (tmp_path / "my_env.py").write_text(ENVIRONMENTS)
        return commands.train(tmp_path, entry, *options, storage="my results", name="mine", ray=ray)

    return start


def test_while_ray_starts(start):
    process = start(TRAINING)
    wait_for(lambda: "gcs_server" in family(process.pid).values(), process)
    before = family(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    printed = ended(process, before)
    assert process.returncode == 130 and "Traceback" not in printed, printed
    assert "Interrupted before anything was begun: there is nothing to go on with." in printed


@pytest.mark.long
def test_while_the_model_is_loaded(start):
    process = start(TRAINING)
    wait_for(lambda: "starts" in process.stdout, process)
    before = family(process.pid)
    process.send_signal(signal.SIGTERM)  # in the same way
    printed = ended(process, before)
    assert process.returncode == 130 and "Traceback" not in printed and "tune.run" not in printed, printed
    assert "Go on by: rllib train file mine.yaml --storage-path 'my results' --resume\n" in printed
    assert "from the beginning, as no checkpoint was written yet" in printed


@pytest.mark.long
def test_after_the_first_result(start, commands, tmp_path):
    training = of_mine("Talks")
    process = start(training)
    wait_for(lambda: iterations(process.stdout)[1:], process)
    before = family(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal, to all processes of the session
    printed = ended(process, before)
    assert process.returncode == 130 and "Traceback" not in printed and "tune.run" not in printed, printed
    assert "Stopping ... (once more: at once)" in printed
    assert "Go on by: rllib train file mine.yaml --storage-path 'my results' --resume\n" in printed
    assert "from the last checkpoint of each trial; all is in " + str(tmp_path / "my results" / "mine") in printed
    report = Path(re.search(r"Report:      (.*)", printed)[1])
    assert str(tmp_path) in str(report) and "it was interrupted" in report.read_text() and "--resume" in report.read_text()

    process = start(training, "--resume")  # and the second signal ends it at once
    wait_for(lambda: iterations(process.stdout), process)
    before = family(process.pid)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    printed = ended(process, before)
    assert process.returncode == 130 and time.monotonic() - began < 30 and iterations(printed)[0] > 1, printed

    whole = sorted(path.parent for path in tmp_path.glob("my results/mine/*/checkpoint_*/rllib_nlac.json"))
    played = commands.run("evaluate", whole[0], "--episodes", "2", "--render", cwd=tmp_path)
    assert played.returncode == 0 and r"then [/INST] :smile: \x1b]0;owned\x07" in played.stdout, played.stdout + played.stderr


@pytest.mark.long
def test_a_metric_that_never_comes_ends_the_run_after_its_first_result(start, ray_session):
    process = start({**TRAINING, "stop": {"success_rat": 0.9}}, ray=ray_session)
    process.wait(300)
    printed = process.stdout
    assert process.returncode == 2 and iterations(printed) == [1] and "Traceback" not in printed, printed
    assert "Error: mine, stop: no result has 'success_rat'; did you mean 'env_runners/success_rate'?" in printed


@pytest.mark.long
def test_a_trial_that_fails_says_why_in_three_lines(start, ray_session, tmp_path):
    process = start(of_mine("Fails"), ray=ray_session)
    process.wait(300)
    printed = process.stdout
    assert process.returncode == 1 and "Traceback" not in printed and "\x1b" not in printed, printed
    where, what, everything = re.search(r": error\n(.*)\n(.*)\n(.*)\n", printed).groups()
    assert re.search(r"my_env\.py, line 14, in step \(called in rllib_nlac/sampling/\w+\.py, \w+\)$", where), where
    assert r"LookupError: [/INST] [link=http://x] :smile: \x1b]0;owned\x07" in what
    file = Path(everything.partition("all:")[2].strip())
    assert file.name == "error.txt" and str(tmp_path) in str(file) and "my_env.py" in file.read_text()
    report = (file.parent / "report.md").read_text()
    assert "**it failed**" in report and r"LookupError: [/INST] [link=http://x] :smile: \x1b]0;owned\x07" in report
    assert "before its first result" in report


@pytest.mark.parametrize(
    "options", [[], ["--resume"], ["--num-samples", "3"], ["--num-samples=3"], ["--num-samples", "3", "--resume"]], ids=str
)
def test_the_command_to_go_on_is_the_one_that_was_given(options, monkeypatch):
    """But for the number of samples, which --resume refuses."""
    from rllib_nlac.command.resume import command_to_resume

    monkeypatch.setattr(sys, "argv", ["rllib", "train", "file", "a b.yaml", *options])
    assert command_to_resume() == "rllib train file 'a b.yaml' --resume"


def test_the_command_to_go_on_with_several_samples_is_taken(tmp_path, monkeypatch):
    from rllib_nlac.command import cli, run
    from rllib_nlac.command.resume import command_to_resume

    runs = []
    monkeypatch.setattr(run, "_run", lambda experiment, resume, *_: runs.append(resume) or True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment_state-2026.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text(json.dumps({"mine": SMALL}))
    given = ["rllib", "train", "file", str(tmp_path / "mine.yaml"), "--num-samples", "3", "--storage-path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    result = CliRunner().invoke(cli.app, shlex.split(command_to_resume())[1:])
    assert result.exit_code == 0 and runs == [True], result.output
