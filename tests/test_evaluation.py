"""Evaluation: fixed tasks and seeds, intervals, avg@k and pass@k, and the policy with one refinement."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_episodes import episode
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.train._internal.checkpoint_manager import _CheckpointManager
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint, CheckpointConfig

from rllib_nlac.ablations import Hindsight, PermutedFutures
from rllib_nlac.algorithm.evaluation import (
    action_entropy,
    evaluate_tasks,
    pass_at,
    success_interval,
    success_metrics,
    success_table,
)
from rllib_nlac.algorithm.logs import LOGGED
from rllib_nlac.baselines.grpo import GRPO
from rllib_nlac.checkpoints.checked import CheckedCheckpoints
from rllib_nlac.command import evaluate
from rllib_nlac.command.evaluate import evaluate_checkpoint, evaluation_runner, obstacle_to_refining, summary
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.episode import GENERATION, TASK, TASK_SEED
from rllib_nlac.types import Generation


class TestStatistics:
    @given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
    def test_pass_at_j_is_the_mean_over_all_choices_of_j_attempts(self, wins, j):
        table = np.array(wins, float)
        chosen = [[row[list(choice)].max() for choice in itertools.combinations(range(4), j)] for row in table]
        assert pass_at(table, j) == pytest.approx(np.mean(chosen))

    def test_entropy_is_what_samples_say_of_it(self):
        """-log p of a turn, mean over turns; of a token, mean over tokens. Turns without log-probabilities tell nothing."""
        made = episode(0, 4)
        turns = [[-1.0, -2.0], [-0.5], [], [-4.0, -0.5, -1.0]]
        for t, logprobs in enumerate(turns):
            told = Generation((1,), tuple(range(len(logprobs))), np.array(logprobs, np.float32), True, 0)
            made.extra_model_outputs[GENERATION][t] = told
        assert action_entropy([made]) == pytest.approx({"action_entropy": 9 / 3, "token_entropy": 9 / 6})
        made.extra_model_outputs[GENERATION][3] = Generation((1,), (1,), np.array([-np.inf], np.float32), True, 0)
        made.extra_model_outputs[GENERATION][1] = Generation((1,), (1, 2), np.array([-0.5], np.float32), True, 0)
        assert action_entropy([made]) == pytest.approx({"action_entropy": 3.0, "token_entropy": 1.5})
        silent = Generation((1,), (1, 2), np.zeros(0, np.float32), True, 0)
        for t in range(4):
            made.extra_model_outputs[GENERATION][t] = silent
        assert action_entropy([made]) == {} == action_entropy([])

    @pytest.mark.parametrize(
        ("tasks", "chance"), [(200, 0.3), (64, 0.95), (64, 0.99), (128, 0.99), (512, 0.998), (16, 0.9), (64, 0.01)]
    )
    def test_the_interval_covers_the_truth_about_95_times_of_100(self, tasks, chance):
        """Fails with a percentile bootstrap, which covers a chance of 0.99 by 64 tasks in 47 of 100: it is a point where all
        are won."""
        rng = np.random.default_rng(0)
        intervals = [success_interval(rng.binomial(1, chance, (tasks, 1)).astype(float)) for _ in range(1000)]
        assert 0.92 <= np.mean([low <= chance <= high for low, high in intervals]) <= 0.99
        assert all(0 <= low < high <= 1 for low, high in intervals)

    @pytest.mark.parametrize("spread", [0.0, 0.5, 100.0])
    def test_it_covers_the_truth_whether_tasks_differ_or_not(self, spread):
        rng = np.random.default_rng(0)
        covered = 0
        for _ in range(1000):
            chances = rng.beta(0.7 * spread, 0.3 * spread, 100) if spread else rng.binomial(1, 0.7, 100).astype(float)
            low, high = success_interval((rng.random((100, 4)) < chances[:, None]).astype(float))
            covered += low <= 0.7 <= high
        assert 0.92 <= covered / 1000 <= 0.98

    def test_attempts_of_one_task_are_not_independent(self):
        """Eight attempts that always agree say no more than one: fails where episodes are the unit and not tasks."""
        wins = np.random.default_rng(0).binomial(1, 0.5, (100, 1)).astype(float)
        assert success_interval(np.repeat(wins, 8, axis=1)) == pytest.approx(success_interval(wins))
        # Attempts that differ as if there were no tasks say almost as much as so many tasks, and never more.
        low, high = success_interval(np.tile([[1.0, 0.0]], (100, 4)))
        assert high - low == pytest.approx(2 * 1.96 * 0.5 / 800**0.5, rel=0.01)

    def test_it_is_wilsons(self):
        low, high = success_interval(np.array([[1.0]] * 7 + [[0.0]] * 3))
        assert (low, high) == pytest.approx((0.3968, 0.8922), abs=1e-4)  # Newcombe's and any textbook's value for 7 of 10
        assert success_interval(np.ones((10, 1))) == pytest.approx((0.7225, 1.0), abs=1e-4)
        assert np.isnan(success_interval(np.ones((1, 4)))).all()

    def test_two_tasks_with_one_seed_are_two_tasks(self):
        """By seeds alone the row of both would be the longest, and all other tasks would be left out as incomplete."""
        episodes = [played(task, 7 if task in (1, 2) else task, won=task % 2 == 0) for task in range(6) for _ in range(2)]
        np.testing.assert_array_equal(success_table(episodes), [[1, 1], [0, 0]] * 3)

    def test_a_task_that_lost_an_attempt_is_left_out(self):
        episodes = [played(task, task, won=True) for task in (0, 0, 1, 2, 2)]
        assert success_table(episodes).shape == (2, 2)

    def test_an_episode_that_another_runner_played_is_a_task_of_its_own(self):
        """RLlib's runners write down no seed; an environment without text may speak of success all the same."""
        episodes = [played(0, 0, won) for won in (True, False, True)]
        for number, episode_ in enumerate(episodes):
            episode_.custom_data.clear()
            episode_.id_ = f"theirs-{number}"
        assert summary(episodes)["success"].startswith("0.667 ")

    def test_the_figures(self):
        episodes = [played(task, task, won) for task, wins in enumerate(((1, 0, 0, 0), (1, 1, 1, 1))) for won in wins]
        metrics = success_metrics(episodes)
        assert metrics["num_tasks"] == 2 and metrics["success_rate"] == metrics["avg_at_4"] == 5 / 8
        assert (metrics["pass_at_1"], metrics["pass_at_2"], metrics["pass_at_4"]) == (0.625, 0.75, 1.0)
        assert (metrics["success_low"], metrics["success_high"]) == success_interval(success_table(episodes))
        assert math.isnan(success_metrics([])["success_rate"]) and success_metrics([])["num_tasks"] == 0
        assert "pass_at_1" not in success_metrics(episodes[:1])
        assert "pass_at_3" in success_metrics([played(0, 0, True)] * 3)


def played(task: int, seed: int, won: bool) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(id_=f"task-{task:08d}-0")
    episode.custom_data.update({TASK: task, TASK_SEED: seed})
    episode.add_env_reset("Go.", {})
    episode.add_env_step("End.", "a", 0.0, {"success": won}, terminated=True)
    return episode


@pytest.fixture()
def algorithm(config, ray_session, lent_engine):
    config.evaluation(evaluation_interval=1, evaluation_duration=64)
    config.evaluation(evaluation_repeats={"tasks": 16, "attempts": 4})
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=16, minibatch_size=16)
    algorithm = config.build_algo()
    yield algorithm
    algorithm.stop()


def test_tasks_and_seeds_do_not_depend_on_the_runner(algorithm):
    """However tasks are divided among runners, and whatever was played before: same tasks, same dialogues."""
    runner, other = algorithm.env_runner, algorithm.eval_env_runner
    whole = runner.sample_tasks(range(8), attempts=2)
    runner.sample(num_episodes=3)
    other.worker_index = 5
    parts = [*other.sample_tasks(range(4, 8), attempts=2), *runner.sample_tasks(range(4), attempts=2)]
    played = {episode.id_: (episode.custom_data[TASK_SEED], *episode.get_actions()) for episode in parts}
    assert played == {episode.id_: (episode.custom_data[TASK_SEED], *episode.get_actions()) for episode in whole}
    assert len({episode.custom_data[TASK_SEED] for episode in whole}) == 8
    pairs = [(tuple(a.get_actions()), tuple(b.get_actions())) for a, b in zip(whole[::2], whole[1::2], strict=True)]
    assert any(a != b for a, b in pairs)  # attempts are sampled with seeds of their own


def test_results_of_an_evaluation(algorithm):
    results = algorithm.evaluate()
    plain, repeated = results["env_runners"], results["repeated"]
    for part, tasks in ((plain, 64), (repeated, 16)):
        assert part["success_low"] <= part["success_rate"] <= part["success_high"] and part["num_tasks"] == tasks
    assert repeated["avg_at_4"] == repeated["success_rate"] == repeated["pass_at_1"]
    assert repeated["pass_at_1"] <= repeated["pass_at_2"] <= repeated["pass_at_4"]
    # The base model's critique was taught to play well and its play was not: model card, .95 against .21.
    refined = success_metrics(algorithm.eval_env_runner.sample_tasks(range(64), refined=True))
    assert plain["success_rate"] < 0.4 and refined["success_low"] > 0.6
    again = algorithm.evaluate()
    assert again["env_runners"]["success_rate"] == plain["success_rate"]


@pytest.mark.parametrize(
    ("repeats", "temperature", "tasks"),
    [({}, 1.0, 8), ({"tasks": 40}, 1.0, 40), ({"tasks": 0}, 1.0, 0), ({"tasks": 1}, 1.0, 0), ({"tasks": 40}, 0.0, 0)],
)
def test_tasks_that_are_attempted_again(config, repeats, temperature, tasks):
    """By default an eighth; what is asked for is what is played; of a greedy policy all attempts are the same."""
    config.evaluation(evaluation_duration=64, evaluation_repeats=repeats)
    config.action_temperature = temperature
    assert config.num_repeated_tasks == tasks


def test_the_command_plays_as_the_runs_evaluations_do(config, ray_session, lent_engine):
    """Fails where it plays the training's tasks, by the training's temperature."""
    assert evaluation_runner(SimpleNamespace(eval_env_runner_group=None, env_runner=1, config=SimpleNamespace(env="A"))) == 1
    assert evaluation_runner(SimpleNamespace(eval_env_runner_group=None, config=SimpleNamespace(env=LOGGED))) is None
    world = {"num_objects": 16, "num_attributes": 8, "max_turns": 2}
    config.evaluation(evaluation_interval=1, evaluation_config={"env_config": world, "action_temperature": 0})
    algorithm = config.build_algo()
    try:
        episodes = evaluation_runner(algorithm).sample_tasks(range(4), attempts=2)
        assert max(len(episode) for episode in episodes) == 2
        assert max(len(episode) for episode in algorithm.env_runner.sample_tasks(range(4))) > 2
        pairs = zip(episodes[::2], episodes[1::2], strict=True)
        assert all(list(a.get_actions()) == list(b.get_actions()) for a, b in pairs)
        assert obstacle_to_refining(algorithm) == ""
    finally:
        algorithm.stop()


def evaluated(version, own, of_evaluation=None) -> dict:
    """Results of an evaluation whose turns are of version 7 of the weights; the temperatures are the two configurations'."""

    def settings(temperature):
        return SimpleNamespace(evaluation_duration=2, num_repeated_tasks=0, action_temperature=temperature)

    def sample_tasks(tasks, *about):
        episodes = [episode(7) for _ in tasks]
        for task, each in zip(tasks, episodes, strict=True):
            each.custom_data[TASK] = task
        return episodes

    algorithm = SimpleNamespace(
        config=settings(own),
        evaluation_config=None if of_evaluation is None else settings(of_evaluation),
        env_runner=SimpleNamespace(sample_tasks=sample_tasks, get_metrics=MetricsLogger(root=False).reduce),
        metrics=MetricsLogger(root=True),
        weight_version=version,
        watch=SimpleNamespace(examine=None),
    )
    evaluate_tasks(algorithm, None)
    return algorithm.metrics.peek(("evaluation", "env_runners"))


@pytest.mark.parametrize(
    ("own", "of_evaluation", "known"), [(1.0, 0.0, False), (0.0, 1.0, True), (1.0, None, True), (0.0, None, False)]
)
def test_there_is_an_entropy_where_the_evaluations_own_turns_are_sampled(own, of_evaluation, known):
    """Fails where the training's temperature counts: what greedy turns tell is no entropy."""
    results = evaluated(7, own, of_evaluation)
    assert results["num_tasks"] == 2
    assert ("action_entropy" in results, "token_entropy" in results) == (known, known)


def test_an_evaluation_by_weights_that_are_one_sync_old_is_refused():
    with pytest.raises(EngineError, match=r"was played with version 7 of the weights, and at version 8 it may be 0 syncs old"):
        evaluated(8, 1.0)
    assert evaluated(None, 1.0)["num_tasks"] == 2  # under RLlib's own sync they have no number


@pytest.mark.parametrize(
    ("kind", "obstacle"),
    [(Hindsight, "what really came"), (GRPO, "no critic in words"), (PermutedFutures, "exchanges futures within a batch")],
)
def test_what_cannot_refine_says_why(kind, obstacle):
    algorithm = kind.__new__(kind)
    algorithm.config = kind.get_default_config()
    assert obstacle in obstacle_to_refining(algorithm)


def test_of_one_task_there_is_no_interval():
    episodes = [episode(number, 2) for number in range(4)]
    for number, each in enumerate(episodes):
        each.custom_data[TASK_SEED] = number
    assert summary(episodes[:1])["success"] == "1.000"
    assert summary(episodes)["success"] == "1.000   (95 % interval 0.510 to 1.000)"  # Wilson's, of four that were won


def test_attempts_of_what_is_no_text_are_refused(tmp_path, monkeypatch):
    """RLlib's runners play episodes and know no tasks. Fails where the option is ignored."""
    (tmp_path / "rllib_checkpoint.json").write_text("{}")
    runner = SimpleNamespace(config=SimpleNamespace(env="CartPole-v1"), env=1, sample=lambda **how: pytest.fail("it plays"))
    algorithm = SimpleNamespace(
        eval_env_runner_group=None, env_runner=runner, config=SimpleNamespace(env="CartPole-v1"), stop=lambda: None
    )
    monkeypatch.setattr(evaluate, "start_ray", lambda verbose: None)
    monkeypatch.setattr(evaluate.ray, "shutdown", lambda: None)
    monkeypatch.setattr(evaluate.Algorithm, "from_checkpoint", lambda *_: algorithm)
    with pytest.raises(ValueError, match=r"CartPole-v1 is no environment of text.*leave out --attempts"):
        evaluate_checkpoint(tmp_path, 8, 2, False, False, Terminal(), False)


@pytest.mark.parametrize(("episodes", "nearest"), [(10, "8 or 12"), (2, "4 or 8")])
def test_episodes_that_are_no_whole_number_of_tasks_are_refused(tmp_path, episodes, nearest):
    """Fails where others are played than were asked for, 8 and 4; nothing is read before."""
    with pytest.raises(ValueError, match=rf"--episodes {episodes} is no multiple of --attempts 4.*take {nearest}$"):
        evaluate_checkpoint(tmp_path / "missing", episodes, 4, False, False, Terminal(), False)


def test_what_cannot_be_evaluated_says_why(config):
    config.evaluation(evaluation_interval=1, evaluation_duration_unit="timesteps")
    with pytest.raises(ValueError, match="must be a number of episodes"):
        config.validate()


def test_tune_finds_the_score_that_a_checkpoint_is_kept_by(monkeypatch, tmp_path):
    """Fails where it is left within nested results: Tune then keeps the latest, and deletes the best."""

    def save(self, folder):
        place = tmp_path / f"checkpoint_{len(scores)}"
        place.mkdir()
        found = {"evaluation": {"env_runners": {"success_rate": scores.pop(0)}}, "config": {"env_config": {"depth": 2}}}
        return _TrainingResult(Checkpoint(str(place)), found)

    scores, algorithm = [0.9, 0.5, 0.4, 0.3], CheckedCheckpoints.__new__(CheckedCheckpoints)
    algorithm._storage = SimpleNamespace()
    monkeypatch.setattr(Algorithm, "save", save)
    keep = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="evaluation/env_runners/success_rate")
    manager = _CheckpointManager(keep)
    for _ in range(4):
        manager.register_checkpoint(saved := algorithm.save())
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == ["checkpoint_1", "checkpoint_4"]  # best and latest
    assert manager.best_checkpoint_result.metrics["evaluation/env_runners/success_rate"] == 0.9
    assert "config/env_config/depth" not in saved.metrics


def test_the_best_checkpoint_is_kept_by_evaluations_that_happened():
    from rllib_nlac.command.experiment import Experiment, ExperimentError, checkpoint_config

    keep = {"num_to_keep": 1, "checkpoint_score_attribute": "evaluation/env_runners/success_rate", "checkpoint_frequency": 3}
    experiment = Experiment("e", "NLAC", {"evaluation_interval": 2}, tune={"checkpoint_config": keep})
    with pytest.raises(ExperimentError, match="checkpoint_frequency must be a multiple of evaluation_interval"):
        checkpoint_config(experiment)
    keep["checkpoint_frequency"] = 4
    assert checkpoint_config(experiment).num_to_keep == 1
    keep["checkpoint_at_end"] = True  # that of iteration 9 would have no score
    for stop in ({"training_iteration": 9}, {"env_runners/num_episodes_lifetime": 256}, {}):
        with pytest.raises(ExperimentError, match="leave out checkpoint_at_end"):
            checkpoint_config(replace(experiment, stop=stop))
    assert checkpoint_config(replace(experiment, stop={"training_iteration": 8})).checkpoint_at_end
