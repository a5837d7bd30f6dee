"""The quick start as a user types it: the command trains, shows progress, and the policy is better than the base model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from command_runs import ROOT
from ray.rllib.algorithms.ppo import PPOConfig

BASE_AT_MOST = 0.25  # the model card's figure lies below; the issue of luck is left to the interval
QUICK_START = ROOT / "tuned_examples" / "twenty_questions_nlac.yaml"


class Trained(NamedTuple):
    """What a command printed, where it wrote, and the seconds after which its first line stood there."""

    output: str
    storage: Path
    first_line_s: float


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    """The quick start, as a shell would run it, stopped after 128 of its 256 episodes."""
    storage = tmp_path_factory.mktemp("quickstart")
    stop = '{"env_runners/num_episodes_lifetime": 128}'
    command = ["rllib_nlac.command", "train", "file", str(QUICK_START), "--storage-path", str(storage), "--stop", stop]
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    limit = threading.Timer(600, process.kill)
    limit.start()
    assert process.stdout is not None
    first = process.stdout.readline()
    seconds = time.monotonic() - started
    output = first + process.stdout.read()
    code = process.wait()
    limit.cancel()
    assert code == 0, output[-3000:]
    return Trained(output, storage, seconds)


@pytest.fixture()
def rllib(commands, ray_session):
    """Runs a command that joins the session's Ray."""
    return lambda *arguments: commands.run(*arguments, ray=ray_session)


def test_progress_can_be_followed_and_the_end_says_where_to_look(trained):
    output = trained.output
    lines = [line.split() for line in output.splitlines() if re.match(r"\s*\d+\s+\d+\s", line)]
    assert [line[1] for line in lines] == ["0", "32", "64", "96", "128"]
    for word in ("success", "L1 critic", "L2 policy", "tokens/s", "left", "tensorboard --logdir", "rllib evaluate"):
        assert word in output


def test_it_says_within_seconds_what_it_does_and_then_every_stage_in_its_order(trained):
    assert trained.first_line_s < 20 and trained.output.startswith("loading the libraries")
    stages = (
        "loading the libraries ...",
        "starting Ray ...",
        "loading the model ...",
        "starting the engine; an answer ends with ",
    )
    places = [trained.output.find(each) for each in (*stages, "starts", "is done.")]
    assert -1 not in places and places == sorted(places), trained.output
    assert "Token authentication" not in trained.output


def test_it_learns(trained):
    """Success in evaluation is above the base model's: the whole 95 % interval is."""
    (results,) = trained.storage.glob("**/result.json")
    evaluated = [
        result["evaluation"]["env_runners"]["success_low"]
        for result in map(json.loads, results.read_text().splitlines())
        if result["training_iteration"] % 4 == 0
    ]
    assert evaluated[-1] > BASE_AT_MOST + 0.1


def test_curves_and_transitions_are_in_tensorboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in trained.storage.glob("**/events.out.tfevents*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    assert "transition/text_summary" in tags["tensors"]
    for tag in (
        "ray/tune/env_runners/success_rate",
        "ray/tune/learners/default_policy/critic_loss",
        "ray/tune/language_stages/verdict_yes_rate",
        "ray/tune/replay_buffer/staleness_mean",
        "ray/tune/sync/weight_version",
        "ray/tune/seconds/waves",
        "ray/tune/evaluation/critic/auc",
        "ray/tune/evaluation/repeated/pass_at_4",
        "ray/tune/evaluation/env_runners/token_entropy",
    ):
        assert tag in tags["scalars"], tag


def test_the_run_is_told_on_screen_and_in_a_report(trained):
    """What the report says is what the results say."""
    output = trained.output
    (results,) = trained.storage.glob("**/result.json")
    first, *_, last = map(json.loads, results.read_text().splitlines())
    played, critic = last["evaluation"]["env_runners"], last["evaluation"]["critic"]
    shown = "{success_rate:.3f} ({success_low:.3f} to {success_high:.3f})"
    before, success = shown.format(**first["before_training"]["env_runners"]), shown.format(**played)
    report = (results.parent / "report.md").read_text()
    told = f"Success:     {before} (evaluation before training) -> {success} (evaluation after iteration 4)"
    assert told in output and "Critic:      AUC" in output
    assert f"Report:      {results.parent / 'report.md'}" in output
    assert f"| evaluation before training | {before} |" in report
    assert f"| evaluation after iteration 4 | {success} |" in report
    assert re.search(rf"\| Brier score \| [\d.]+ \| {critic['brier']:.3f} \|", report)
    assert "lr: 0.001   # default: 1e-06" in report and "How it ended | as it should" in report
    for title in ("Of one that was lost", "What the critic knows", "Time and tokens", "What to try next"):
        assert f"# {title}" in report, title


def test_evaluate_plays_the_checkpoint_and_shows_dialogues(trained, rllib):
    (checkpoint,) = trained.storage.glob("**/checkpoint_*")
    result = rllib("evaluate", checkpoint, "--episodes", "64", "--render")
    assert result.returncode == 0, result.stderr[-3000:]
    success = float(re.search(r"success\s*│\s*([\d.]+)", result.stdout)[1])
    assert success > BASE_AT_MOST
    assert result.stdout.count("environment: Guess my object.") == 10 and "agent:" in result.stdout


@pytest.mark.long
def test_a_finished_run_is_trained_on_for_longer(trained, rllib, tmp_path):
    (checkpoint,) = trained.storage.glob("**/checkpoint_*")
    result = rllib(
        "train",
        "file",
        QUICK_START,
        "--restore",
        checkpoint,
        "--storage-path",
        tmp_path,
        "--stop",
        "{training_iteration: 5}",
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"^\s*5\s+160\s", result.stdout, re.MULTILINE)


@pytest.mark.long
def test_a_failing_trial_exits_1_with_the_cause(rllib, tmp_path):
    config = '{"env_config": {"max_turns": 6}, "prompts": "compact", "max_action_tokens": 511, "num_cpus_for_main_process": 1}'
    result = rllib(
        "train",
        "--algo",
        "NLAC",
        "--env",
        "TwentyQuestions",
        "--config",
        config,
        "--stop",
        "{training_iteration: 1}",
        "--storage-path",
        tmp_path,
    )
    assert result.returncode == 1 and "exceeds the context of 512" in result.stdout


@pytest.fixture(scope="module")
def stock_checkpoint(ray_session, tmp_path_factory) -> Path:
    """RLlib's PPO after an iteration, with a remote EnvRunner as it has by default."""
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1)
    algorithm = config.training(train_batch_size_per_learner=200, minibatch_size=50, num_epochs=1).build_algo()
    try:
        algorithm.train()
        return Path(algorithm.save_to_path(str(tmp_path_factory.mktemp("stock") / "checkpoint_000000")))
    finally:
        algorithm.stop()


def test_rllibs_own_algorithms_train_too(rllib, stock_checkpoint, tmp_path):
    result = rllib(
        "train",
        "--algo",
        "PPO",
        "--env",
        "CartPole-v1",
        "--stop",
        "{training_iteration: 2}",
        "--storage-path",
        tmp_path,
        "--config",
        "{num_env_runners: 0, train_batch_size_per_learner: 200, minibatch_size: 50, num_epochs: 1}",
        "--restore",
        stock_checkpoint,
    )
    assert result.returncode == 0, result.stdout[-2000:]
    assert re.findall(r"^\s*(\d)\s", result.stdout, re.MULTILINE) == ["2"]  # the first one is the checkpoint's


@pytest.mark.long
def test_rllibs_own_checkpoints_are_evaluated(rllib, stock_checkpoint):
    """Where RLlib plays on remote runners its algorithm has no environment of its own."""
    result = rllib("evaluate", stock_checkpoint, "--episodes", "3")
    assert result.returncode == 0 and "PPO on CartPole-v1" in result.stdout, result.stdout[-2000:]


@pytest.mark.long
def test_ppo_plays_text_by_the_command_and_its_checkpoint_is_evaluated(rllib, tmp_path):
    example = ROOT / "tuned_examples" / "twenty_questions_ppo.yaml"
    result = rllib("train", "file", example, "--storage-path", tmp_path, "--stop", "{training_iteration: 1}")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "TextPPO" in result.stdout and re.search(r"^\s*1\s+\d+\s+0\.\d+", result.stdout, re.MULTILINE)
    (checkpoint,) = tmp_path.glob("**/checkpoint_*")
    result = rllib("evaluate", checkpoint, "--episodes", "32", "--render")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "TextPPO on TwentyQuestions" in result.stdout and "agent:" in result.stdout


@pytest.mark.long
def test_react_reports_what_a_model_reaches_untrained(rllib, tmp_path):
    example = ROOT / "tuned_examples" / "twenty_questions_react.yaml"
    result = rllib("train", "file", example, "--storage-path", tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    (results,) = tmp_path.glob("**/result.json")
    last = json.loads(results.read_text().splitlines()[-1])
    assert last["env_runners"]["num_episodes"] == 512 and 0.05 < last["env_runners"]["success_rate"] < BASE_AT_MOST


@pytest.mark.long
def test_tuner_finds_nlac_by_name(ray_session, config, tmp_path):
    from ray import tune

    config.training(episodes_per_iteration=8, train_batch_size_per_learner=16, minibatch_size=16)
    config.num_envs_per_env_runner = 8
    config.tau = tune.grid_search([0.0, 1.0])
    tuner = tune.Tuner(
        "NLAC",
        param_space=config,
        run_config=tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0),
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
    )
    results = tuner.fit()
    assert not results.errors and sorted(result.config["tau"] for result in results) == [0.0, 1.0]
