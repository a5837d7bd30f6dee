"""Algorithms from outside the package, as ``run: my_module:MyAlgorithm``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.command.cli import app
from rllib_nlac.command.experiment import ExperimentError, algorithm_class

RLOO = Path(__file__).parent / "rloo.py"


@pytest.fixture()
def outside(tmp_path, monkeypatch):
    """A folder of a person's own, with RLOO in it."""
    shutil.copy(RLOO, tmp_path / "my_rloo.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_it_is_short():
    assert len(RLOO.read_text().splitlines()) < 30


def test_leave_one_out(outside):
    """The mean of the others, in closed form."""
    rloo = algorithm_class("my_rloo:RLOO")
    returns = np.array([1.0, 0.0, 0.0, 0.5])
    expected = [r - (returns.sum() - r) / 3 for r in returns]
    assert rloo.advantages(None, returns) == pytest.approx(expected)
    assert rloo.advantages(None, np.array([1.0])) == 0.0  # alone, and not 0 / 0
    assert algorithm_class("my_rloo:RLOO").get_default_config().algo_class is rloo


def test_the_command_takes_it(outside):
    example = Path(__file__).parent.parent / "tuned_examples" / "twenty_questions_grpo.yaml"
    (entry,) = yaml.safe_load(example.read_text()).values()
    (outside / "mine.yaml").write_text(yaml.safe_dump({"mine": {**entry, "run": "my_rloo:RLOO"}}))
    result = CliRunner().invoke(app, ["train", "file", "mine.yaml", "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.process
def test_the_installed_command_finds_what_lies_in_the_current_folder(tmp_path):
    """As callbacks, or what a checkpoint names. Fails where the folder is looked through for ``run`` and ``env`` alone."""
    (tmp_path / "my_callbacks.py").write_text(
        "from ray.rllib.callbacks.callbacks import RLlibCallback\nclass Mine(RLlibCallback): pass\n"
    )
    entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"callbacks": "my_callbacks.Mine", "language_model": "tiny"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"mine": entry}))
    command = [str(Path(sys.executable).parent / "rllib"), "train", "file", "mine.yaml", "--dry-run"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "my_callbacks" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "no_module:RLOO",
            "algorithm 'no_module:RLOO': No module named 'no_module'; it must read as in 'my_module:MyAlgorithm'",
        ),
        ("my_rloo:RLO", "has no attribute 'RLO'"),
        ("my_rloo:np", "is no subclass of"),
    ],
)
def test_a_wrong_name_is_said(outside, name, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        algorithm_class(name)


def test_it_trains(outside, ray_session, lent_engine):
    config = (
        GRPOConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
        .env_runners(num_envs_per_env_runner=16)
        .training(episodes_per_iteration=16, episodes_per_task=4, minibatch_size=16, train_batch_size_per_learner=16, lr=1e-3)
    )
    algorithm = algorithm_class("my_rloo:RLOO")(config)
    try:
        result = algorithm.train()
        assert result["learners"]["default_policy"]["num_gradient_steps"] >= 1 and result["logprob_gap"] < 1e-3
    finally:
        algorithm.stop()
