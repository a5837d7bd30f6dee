"""An interrupted command goes on where its last whole checkpoint was: kill -9 of everything at any moment."""

from __future__ import annotations

import contextlib
import json
import random
import time
from pathlib import Path

import pytest
from command_runs import SMALL, iterations, kill_all, wait_for

from rllib_nlac.checkpoints.checkpoint import CheckpointError, read_manifest
from rllib_nlac.command.resume import make_resumable


def last_whole(folder: Path) -> int:
    """The training iteration of the newest whole checkpoint."""
    found = []
    for path in folder.glob("small/*/checkpoint_*"):
        with contextlib.suppress(CheckpointError):
            found.append(read_manifest(path)["iteration"])
    return max(found)


def test_killed_and_resumed(tmp_path, commands):
    process = commands.train(tmp_path, SMALL)
    wait_for(lambda: list(tmp_path.glob("small/*/checkpoint_00000[2-9]")), process)
    time.sleep(random.uniform(0, 1.5))
    kill_all(process)
    reached = last_whole(tmp_path)
    assert reached >= 2
    resumed = commands.train(tmp_path, SMALL, "--resume")
    assert resumed.wait() == 0, resumed.stdout[-3000:]
    # At most the one iteration is done again whose checkpoint Tune had no time to write down.
    done = iterations(resumed.stdout)
    assert done[0] in (reached, reached + 1) and done[-1] == 8
    (results,) = tmp_path.glob("small/*/result.json")
    last = json.loads(results.read_text().splitlines()[-1])
    assert last["env_runners"]["num_episodes_lifetime"] == 64 and last["logprob_gap"] < 1e-3


def test_nothing_to_resume_is_said(tmp_path, commands):
    resumed = commands.train(tmp_path, SMALL, "--resume")
    assert resumed.wait() == 2 and "nothing to resume" in resumed.stdout


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
