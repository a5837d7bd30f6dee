"""The README's own environment, as it stands there: short enough, keeps the contract, and trains by the command shown."""

from __future__ import annotations

import re
from functools import partial

from command_runs import ROOT


def block(name: str) -> str:
    """The fenced block of the README whose first line is the comment with this file's name."""
    (found,) = re.findall(rf"```\w+\n# {re.escape(name)}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


def test_ones_own_environment_is_short_and_trains(tmp_path, commands, ray_session):
    code, experiment = block("my_game.py"), block("my_game.yaml")
    assert len(code.splitlines()) <= 25 and len(experiment.splitlines()) <= 15
    rllib = partial(commands.run, cwd=tmp_path, ray=ray_session)
    (tmp_path / "my_game.py").write_text(code)
    (tmp_path / "my_game.yaml").write_text(experiment)
    checked = rllib("env", "check", "my_game:HigherLower")
    assert checked.returncode == 0 and "keeps the contract" in checked.stdout, checked.stdout
    trained = rllib("train", "file", "my_game.yaml", "--stop", "{training_iteration: 1}", "--storage-path", "results")
    assert trained.returncode == 0 and re.search(r"^\s*1\s+32\s", trained.stdout, re.MULTILINE), trained.stdout[-2000:]
    (checkpoint,) = tmp_path.glob("results/*/*/checkpoint_*")
    played = rllib("evaluate", checkpoint, "--episodes", "4", "--render")
    assert played.returncode == 0 and "NLAC on my_game:HigherLower" in played.stdout, played.stderr[-2000:]
