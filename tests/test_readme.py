"""The README's own environment, as it stands there: short enough, keeps the contract, and trains by the command shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def block(name: str) -> str:
    """The fenced block of the README whose first line is the comment with this file's name."""
    (found,) = re.findall(rf"```\w+\n# {re.escape(name)}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


def rllib(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rllib_nlac.command", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)


def test_ones_own_environment_is_short_and_trains(tmp_path):
    code, experiment = block("my_game.py"), block("my_game.yaml")
    assert len(code.splitlines()) <= 25 and len(experiment.splitlines()) <= 15
    (tmp_path / "my_game.py").write_text(code)
    (tmp_path / "my_game.yaml").write_text(experiment)
    checked = rllib(tmp_path, "env", "check", "my_game:HigherLower")
    assert checked.returncode == 0 and "keeps the contract" in checked.stdout, checked.stdout
    trained = rllib(tmp_path, "train", "file", "my_game.yaml", "--stop", "{training_iteration: 1}", "--storage-path", "results")
    assert trained.returncode == 0 and re.search(r"^\s*1\s+32\s", trained.stdout, re.MULTILINE), trained.stdout[-2000:]
    (checkpoint,) = tmp_path.glob("results/*/*/checkpoint_*")
    played = rllib(tmp_path, "evaluate", str(checkpoint), "--episodes", "4", "--render")
    assert played.returncode == 0 and "NLAC on my_game:HigherLower" in played.stdout, played.stderr[-2000:]
