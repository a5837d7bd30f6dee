"""What an evaluation asks the critic: it is compared with what came, changes nothing, and what falls meanwhile is said."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_nlac.algorithm.examination import compared
from rllib_nlac.algorithm.trends import Trends
from rllib_nlac.language.prediction import predicted_success
from rllib_nlac.types import Future


@pytest.fixture()
def small(config):
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=48, minibatch_size=24, tau=0.5)
    config.evaluation(evaluation_interval=1, evaluation_duration=32, evaluation_critic={"states": 24, "branches": 2})
    config.num_envs_per_env_runner = 16
    return config


def trained(config, iterations: int = 2) -> list[dict]:
    algorithm = config.build_algo()
    try:
        return [algorithm.train() for _ in range(iterations)]
    finally:
        algorithm.stop()


def test_an_evaluation_says_how_well_the_critic_tells_success_and_changes_nothing(small, ray_session, lent_engine):
    without = small.copy(copy_frozen=False).evaluation(
        evaluation_critic={"states": 0, "fixed_states": 0}, evaluation_repeats={"tasks": 0}
    )
    results, silent = trained(small), trained(without)
    assert "critic" not in silent[-1]["evaluation"] and "repeated" not in silent[-1]["evaluation"]
    for one, other in zip(results, silent, strict=True):
        assert one["learners"]["default_policy"]["critic_loss"] == other["learners"]["default_policy"]["critic_loss"]
        assert one["evaluation"]["env_runners"]["success_rate"] == other["evaluation"]["env_runners"]["success_rate"]
    for result in results:
        critic = result["evaluation"]["critic"]
        known = critic["num_states"]
        assert known == pytest.approx(24 * (1 - critic["unparsed_rate"])) and known > 12
        assert sum(critic["reliability"]["count"]) == known
        assert sum(part["num_states"] for part in critic["by_turn"].values()) == known
        weighted = np.average(critic["reliability"]["predicted"], weights=critic["reliability"]["count"])
        assert critic["predicted_success"] == pytest.approx(weighted)
        assert 0 <= critic["brier"] <= 1 and (math.isnan(critic["auc"]) or 0 <= critic["auc"] <= 1)
        assert sum(part["num_states"] for part in critic["replayed"]["by_age"].values()) == critic["replayed"]["num_states"]
        refinement = critic["refinement"]
        assert 0 < refinement["num_states"] <= 24 and refinement["num_lost"] == 0
        difference = refinement["success_of_refined"] - refinement["success_of_action"]
        assert refinement["gain"] == pytest.approx(difference)
        assert result["evaluation"]["repeated"]["pass_at_4"] >= result["evaluation"]["repeated"]["success_rate"]
        assert result["evaluation"]["env_runners"]["action_entropy"] > 0
    assert {"state_1", "state_2", "state_3"} == results[0]["evaluation"]["critic"]["fixed"].keys()
    assert results[-1]["seconds"]["evaluation_critic"] > 0


def fork(number: int, arm: str, branch: int, success: bool) -> SimpleNamespace:
    infos = {"success": success}
    name = f"fork-{number:06d}-{arm}-{branch:04d}"
    return SimpleNamespace(id_=name, get_infos=lambda index: infos, get_return=lambda: float(success))


def test_what_came_of_the_forks_is_counted_by_states(monkeypatch):
    """Two states: the refined action wins one and ties the other. A third, of which a fork was lost, is left out."""
    monkeypatch.setattr("rllib_nlac.algorithm.examination.episode_success", lambda episode: bool(episode.get_return()))
    outcomes = {0: ((False, False), (True, True)), 1: ((True, False), (False, True)), 2: ((True, True), (False,))}
    episodes = [
        fork(number, arm, branch, won)
        for number, arms in outcomes.items()
        for arm, own in zip(("action", "refined"), arms, strict=True)
        for branch, won in enumerate(own)
    ]
    found = compared(episodes)
    assert (found["num_states"], found["num_decided"], found["num_lost"]) == (2, 1, 1)
    assert found["win_rate"] == 1 and found["gain"] == 0.5
    assert found["success_of_action"] == 0.25 and found["success_of_refined"] == 0.75


def test_the_predicted_chance_is_the_share_of_futures_that_end_well():
    futures = [Future("", True), Future("", False), Future("", True), Future("", True)]
    assert predicted_success(futures) == 0.75 and predicted_success([]) is None


def evaluation(success: float, auc: float, predicted: float, pass_at_4: float, states: int = 400) -> dict:
    return {
        "env_runners": {"success_rate": success, "success_low": success - 0.03, "success_high": success + 0.03},
        "critic": {
            "auc": auc,
            "predicted_success": predicted,
            "success": success,
            "bias_error": 0.01,
            "num_states": states,
        },
        "repeated": {"pass_at_2": pass_at_4, "pass_at_4": pass_at_4, "num_tasks": 200},
    }


class TestTrends:
    def said(self, *evaluations: dict) -> dict[str, str | None]:
        said: dict[str, str | None] = {}
        trends = Trends(said.__setitem__)
        for each in evaluations:
            trends.heed_evaluation(each)
        return said

    def test_what_falls_as_success_rises_is_said(self):
        said = self.said(evaluation(0.4, 0.8, 0.42, 0.9), evaluation(0.6, 0.6, 0.9, 0.65))
        assert "AUC fell from 0.80 to 0.60" in said["AUC falls"]
        assert "hopes more than it should: it predicts success for 0.90 of the turns where 0.60 came" in said["bias grows"]
        assert "pass@4 fell from 0.90 to 0.65" in said["pass@k falls"]

    def test_what_falls_with_success_is_no_news(self):
        said = self.said(evaluation(0.6, 0.8, 0.62, 0.9), evaluation(0.4, 0.6, 0.9, 0.65))
        assert set(said.values()) == {None}

    def test_what_may_be_chance_is_not_said(self):
        few = {"states": 20}
        said = self.said(evaluation(0.4, 0.8, 0.42, 0.9, **few), evaluation(0.6, 0.65, 0.62, 0.85, **few))
        assert set(said.values()) == {None}

    def test_without_a_critic_nothing_is_said(self):
        plain = [{"env_runners": evaluation(s, 0, 0, 0)["env_runners"]} for s in (0.4, 0.6)]
        assert set(self.said(*plain).values()) == {None}

    def test_a_leap_away_from_the_base_and_answers_that_climb(self):
        said: dict[str, str | None] = {}
        trends = Trends(said.__setitem__)
        rates = {"future": {"unparsed_answer_rate": 0.01}}
        for kl in (0.1, 0.12, 0.11):
            trends.heed_iteration({"kl_to_base": kl, "language_stages": rates})
        assert set(said.values()) == {None}
        trends.heed_iteration({"kl_to_base": 0.9, "language_stages": {"future": {"unparsed_answer_rate": 0.3}}})
        assert "KL 0.9 nats after 0.11" in said["KL leaps"]
        assert "30% do not parse, where it was 1%" in said["the critic's futures climb"]
        trends.heed_iteration({"kl_to_base": 0.12, "language_stages": rates})
        assert set(said.values()) == {None}  # over: it may be said again
