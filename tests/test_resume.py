"""An interrupted command goes on where its last whole checkpoint was: kill -9 of everything at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rllib_nlac.checkpoints.checkpoint import CheckpointError, read_manifest
from rllib_nlac.command.resume import make_resumable

ROOT = Path(__file__).parent.parent
SMALL = {
    "small": {
        "run": "NLAC",
        "env": "TwentyQuestions",
        "stop": {"training_iteration": 8},
        "checkpoint_config": {"checkpoint_frequency": 1, "num_to_keep": 2},
        "config": {
            "env_config": {"num_objects": 16, "num_attributes": 8, "max_turns": 6},
            "num_cpus_for_main_process": 2, "seed": 0, "prompts": "compact",
            "max_action_tokens": 12, "max_future_tokens": 24, "max_critique_tokens": 32,
            "episodes_per_iteration": 8, "num_envs_per_env_runner": 8,
            "train_batch_size_per_learner": 32, "minibatch_size": 16, "lr": 0.001,
        },
    }
}  # fmt: skip


def start(folder: Path, *options: str, storage: Path | None = None) -> subprocess.Popen[str]:
    """The command in a session of its own, so that all its processes can be killed together."""
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    command = [sys.executable, "-m", "rllib_nlac.command", "train", "file", str(folder / "small.yaml"), "--storage-path"]
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    return subprocess.Popen(
        [*command, str(storage or folder), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the command and everything that it started, Ray's daemons in sessions of their own included."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    family = [process.pid]
    for pid in family:
        family += children.get(pid, [])
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def iterations(output: str) -> list[int]:
    return [int(line.split()[0]) for line in output.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+\s", line)]


def last_whole(folder: Path) -> int:
    """The training iteration of the newest whole checkpoint."""
    found = []
    for path in folder.glob("small/*/checkpoint_*"):
        with contextlib.suppress(CheckpointError):
            found.append(read_manifest(path)["iteration"])
    return max(found)


def test_killed_and_resumed(tmp_path):
    process = start(tmp_path)
    while len(list(tmp_path.glob("small/*/checkpoint_00000[2-9]"))) == 0:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.05)
    time.sleep(random.uniform(0, 1.5))
    kill_all(process)
    time.sleep(1)
    reached = last_whole(tmp_path)
    assert reached >= 2
    resumed = start(tmp_path, "--resume")
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output[-3000:]
    # At most the one iteration is done again whose checkpoint Tune had no time to write down.
    done = iterations(output)
    assert done[0] in (reached, reached + 1) and done[-1] == 8
    (results,) = tmp_path.glob("small/*/result.json")
    last = json.loads(results.read_text().splitlines()[-1])
    assert last["env_runners"]["num_episodes_lifetime"] == 64 and last["logprob_gap"] < 1e-3


def test_nothing_to_resume_is_said(tmp_path):
    resumed = start(tmp_path, "--resume")
    output, _ = resumed.communicate(timeout=100)
    assert resumed.returncode == 2 and "nothing to resume" in output


@pytest.mark.parametrize("damage", ["half", "gone"])
def test_half_copies_go_and_what_tune_remembers_comes_back(tmp_path, monkeypatch, damage):
    from rllib_nlac.checkpoints import checkpoint
    from rllib_nlac.command import resume

    trial = tmp_path / "trial"
    for number in range(3):
        with checkpoint.written_at_once(trial / f"checkpoint_00000{number}") as folder:
            (folder / "file").write_text(str(number))
            checkpoint.write_manifest(folder, {"iteration": number})
    recorded = trial / "checkpoint_000001"

    class Trial:
        path = str(trial)

        class checkpoint:
            pass

    Trial.checkpoint.path = str(recorded)
    monkeypatch.setattr(resume, "ExperimentAnalysis", lambda folder: type("Analysis", (), {"trials": [Trial]}))
    (tmp_path / "experiment_state-1.json").write_text("{}")
    if damage == "half":
        (trial / "checkpoint_000002" / "file").unlink()
        assert len(make_resumable(tmp_path)) == 1
        assert sorted(path.name for path in trial.iterdir()) == ["checkpoint_000000", "checkpoint_000001"]
    else:
        import shutil

        shutil.rmtree(recorded)
        assert "checkpoint_000002 takes its place" in make_resumable(tmp_path)[0]
        assert (recorded / "file").read_text() == "2"
