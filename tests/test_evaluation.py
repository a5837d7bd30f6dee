"""Evaluation: fixed tasks and seeds, intervals, avg@k and pass@k, and the policy with one refinement."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.evaluate import bootstrap_interval, pass_at
from rllib_nlac.sampling.env_runner import TASK_SEED


class TestStatistics:
    @given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
    def test_pass_at_j_is_the_mean_over_all_choices_of_j_attempts(self, wins, j):
        table = np.array(wins, float)
        chosen = [[row[list(choice)].max() for choice in itertools.combinations(range(4), j)] for row in table]
        assert pass_at(table, j) == pytest.approx(np.mean(chosen))

    def test_the_interval_covers_the_truth_about_95_times_of_100(self):
        rng = np.random.default_rng(0)
        covered = 0
        for _ in range(300):
            low, high = bootstrap_interval(rng.binomial(1, 0.3, 200).astype(float), resamples=400)
            covered += low <= 0.3 <= high
        assert 0.90 <= covered / 300 <= 0.98

    def test_attempts_of_one_task_are_not_independent(self):
        """Eight attempts that always agree say no more than one: fails where episodes are drawn again and not tasks."""
        wins = np.random.default_rng(0).binomial(1, 0.5, 100).astype(float)
        low, high = bootstrap_interval(np.repeat(wins[:, None], 8, axis=1).mean(axis=1))
        assert high - low == pytest.approx(2 * 1.96 * 0.05, rel=0.15)


@pytest.fixture()
def algorithm(config, ray_session, lent_engine):
    config.evaluation(evaluation_interval=1, evaluation_duration=64, evaluation_attempts=4, evaluate_refined=True)
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


def test_results_of_both_policies(algorithm):
    results = algorithm.evaluate()
    plain, refined = results["env_runners"], results["refined"]
    for part in (plain, refined):
        assert part["success_low"] <= part["success_rate"] <= part["success_high"] and part["num_tasks"] == 16
        assert part["avg_at_4"] == part["success_rate"] == part["pass_at_1"]
        assert part["pass_at_1"] <= part["pass_at_2"] <= part["pass_at_4"]
    # The base model's critique was taught to play well and its play was not: model card, .98 against .16.
    assert plain["success_rate"] < 0.4 and refined["success_low"] > 0.6
    again = algorithm.evaluate()
    assert again["env_runners"]["success_rate"] == plain["success_rate"]
    assert again["refined"]["success_rate"] == refined["success_rate"]


def test_what_cannot_be_evaluated_says_why(config):
    with pytest.raises(ValueError, match="evaluation_attempts is 3 and must divide evaluation_duration, 64"):
        config.evaluation(evaluation_interval=1, evaluation_duration=64, evaluation_attempts=3).validate()
    config.evaluation(evaluation_attempts=1, evaluation_duration_unit="timesteps")
    with pytest.raises(ValueError, match="must be a number of episodes"):
        config.validate()
    with pytest.raises(ValueError, match=r"evaluate_refined .* needs an algorithm with a critic in words"):
        GRPOConfig().environment("TwentyQuestions").evaluation(evaluate_refined=True).validate()


def test_the_best_checkpoint_is_kept_by_evaluations_that_happened():
    from rllib_nlac.experiment import Experiment, ExperimentError, checkpoint_config

    keep = {"num_to_keep": 1, "checkpoint_score_attribute": "evaluation/env_runners/success_rate", "checkpoint_frequency": 3}
    experiment = Experiment("e", "NLAC", {"evaluation_interval": 2}, tune={"checkpoint_config": keep})
    with pytest.raises(ExperimentError, match="checkpoint_frequency must be a multiple of evaluation_interval"):
        checkpoint_config(experiment)
    keep["checkpoint_frequency"] = 4
    assert checkpoint_config(experiment).num_to_keep == 1
