"""Numbers that are not finite: they stop an update before it reaches anything, and a run before it serves them."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.tune.registry import register_env

from rllib_nlac.baselines.grpo import GRPOConfig, PolicyGradientLearner, group_advantages
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig, ScalarCriticLearner
from rllib_nlac.baselines.stock import TextPPOConfig
from rllib_nlac.engine.shared import NotFiniteError, broken_tensors, require_finite
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, to_multi_agent_batch
from rllib_nlac.learner.learner import SEQUENCE_LOSSES, LanguageLearner
from rllib_nlac.learner.losses import priorities
from rllib_nlac.learner.stopped import StoppedSteps
from rllib_nlac.replay.buffer import TextReplayBuffer

NAN, INF = math.nan, math.inf
GOOD = [
    TrainingSequence((3, 10, 11, 12), (20, 21, 1), CRITIC, 0, 0, 0.25),
    TrainingSequence((3, 10), (30, 31, 32, 33, 1), POLICY, 0, 0, 0.5),
    TrainingSequence((3, 40, 41, 42), (22, 1), CRITIC, 1, 1, 0.125),
    TrainingSequence((3, 50, 51), (60, 1), POLICY, 1, 1, 1.0),
]


def with_(place: int, **changes) -> list[TrainingSequence]:
    return [replace(s, **changes) if i == place else s for i, s in enumerate(GOOD)]


@pytest.fixture()
def make_learner(config):
    def make(kind=LanguageLearner, **settings):
        own = {LanguageLearner: config, PolicyGradientLearner: GRPOConfig(), ScalarCriticLearner: ScalarCriticConfig()}[kind]
        own = own.copy(copy_frozen=False).language(language_model="tiny").training(lr=1e-3, tau=0.5)
        for key, value in settings.items():
            setattr(own, key, value)
        spec = own.get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        learner = kind(config=own, module_spec=spec)
        learner.build()
        return learner

    return make


def update(learner, sequences):
    return learner.update(batch=to_multi_agent_batch(sequences, 2), timesteps={"num_env_steps_sampled_lifetime": 0})


def everything(learner) -> dict[str, torch.Tensor]:
    """Weights, target, and what the optimizer remembers."""
    exported = {f"{w} {n}": t for w, state in learner.export_weights().items() for n, t in state.items()}
    moments = learner.get_optimizer(DEFAULT_MODULE_ID).state_dict()["state"]
    return exported | {f"{i} {n}": torch.as_tensor(t).clone() for i, state in moments.items() for n, t in state.items()}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


BROKEN = {
    "a weight that is none": (LanguageLearner, {"weight": NAN}),
    "an infinite weight": (LanguageLearner, {"weight": INF}),
    "a gradient whose norm overflows": (LanguageLearner, {"weight": 1e37}),
    "an advantage that is none": (PolicyGradientLearner, {"scalar": NAN, "logprobs": (0.0,) * 5}),
    "a ratio that overflows": (PolicyGradientLearner, {"scalar": -1.0, "logprobs": (-1e30,) * 5}),
    "a value target that is none": (ScalarCriticLearner, {"scalar": NAN}),
    "a value target whose square overflows": (ScalarCriticLearner, {"scalar": 1e30}),
}


class TestLearner:
    @pytest.mark.parametrize("name", BROKEN)
    def test_a_step_that_is_not_finite_changes_nothing(self, make_learner, name):
        kind, change = BROKEN[name]
        learner = make_learner(kind, max_tokens_per_micro_batch=8)
        steps = [replace(s, minibatch=0, logprobs=s.logprobs or (-1.0,) * len(s.answer_ids)) for s in GOOD]
        update(learner, steps)
        before = everything(learner)
        place = 0 if kind is ScalarCriticLearner else 1
        results = update(learner, [replace(s, **change) if i == place else s for i, s in enumerate(steps)])
        assert same(before, everything(learner))
        metrics = results[DEFAULT_MODULE_ID]
        assert int(metrics["num_stopped_steps"].peek()) == 1 and int(metrics["num_gradient_steps"].peek()) == 0
        update(learner, steps)
        after = everything(learner)
        assert not same(before, after) and not broken_tensors(after)

    def test_the_next_steps_are_those_of_a_learner_that_never_met_it(self, make_learner):
        learners = [make_learner() for _ in range(2)]
        update(learners[0], with_(0, weight=NAN)[:2])
        for learner in learners:
            update(learner, GOOD)
        assert same(*map(everything, learners))

    def test_of_a_batch_the_other_steps_are_made(self, make_learner):
        learner, other = make_learner(), make_learner()
        results = update(learner, with_(0, weight=NAN))[DEFAULT_MODULE_ID]
        update(other, GOOD[2:])
        assert same(everything(learner), everything(other))
        assert int(results["num_stopped_steps"].peek()) == int(results["num_gradient_steps"].peek()) == 1
        (table,) = results[SEQUENCE_LOSSES].peek()
        assert table[:, 2].tolist() == [0, 0, 1, 1] and np.isfinite(table[:, 4]).tolist() == [False, False, True, True]
        assert float(results["critic_loss"].peek()) == pytest.approx(table[2, 3], rel=1e-6)


def table(*norms: float, loss: float = 1.0) -> np.ndarray:
    return np.array([[i, CRITIC, i, loss, norm] for i, norm in enumerate(norms)])


def numbered(count: int) -> list[TrainingSequence]:
    return [TrainingSequence((1,), (2,), CRITIC, i, i, 1.0, origin=f"transition {70 + i}") for i in range(count)]


class TestStoppedSteps:
    def test_three_in_a_row_are_too_many_over_batches_too(self):
        stopped = StoppedSteps()
        for norms, expected in (((NAN, 1.0, INF), 1), ((NAN, 2.0), 0), ((1.0, NAN), 1), ((INF, INF, 1.0), 3)):
            assert not stopped.too_many
            stopped.note(numbered(len(norms)), table(*norms))
            assert stopped.in_a_row == expected
        assert stopped.too_many and stopped.last.minibatch == 1

    def test_a_person_hears_of_every_batch_with_one_and_of_no_other(self):
        stopped = StoppedSteps()
        for norms, said in (((NAN, 1.0, 1.0), "minibatch 0"), ((1.0, 2.0), None), ((1.0, INF, 1.0), "minibatch 1")):
            stopped.note(numbered(len(norms)), table(*norms))
            assert said in stopped.notice if said else stopped.notice is None

    def test_what_was_in_it_is_in_the_log_by_name_role_and_minibatch(self, caplog):
        stopped = StoppedSteps()
        sequences = [
            TrainingSequence((1,), (2,), role, i, 4, 1.0, origin=f"transition {7 + i}")
            for i, role in enumerate((CRITIC, POLICY, CRITIC))
        ]
        with caplog.at_level(logging.WARNING):
            stopped.note(sequences, np.array([[0, CRITIC, 4, 1.0, NAN], [1, POLICY, 4, NAN, NAN], [2, CRITIC, 4, 1.0, NAN]]))
        assert "minibatch 4 has a gradient of norm nan, and losses that are not finite: transition 8 (policy), loss nan; " in (
            caplog.text
        )
        assert "also in it: transition 7 (critic); transition 9 (critic)" in caplog.text
        assert "minibatch 4" in stopped.notice


class TestPriorities:
    def test_a_stopped_update_says_nothing_of_priorities(self):
        result = priorities(np.array([1.0, INF, NAN, 3.0]), np.array([1.0, NAN, INF, NAN]))
        assert np.isnan(result).tolist() == [False, True, True, False]
        np.testing.assert_allclose(result[[0, 3]], [2.001, np.quantile([2.0, 4.0], 0.95) + 1e-3])  # L2 of the last is not known
        assert np.isnan(priorities(np.array([INF]), np.array([NAN]))).all()

    @pytest.mark.parametrize("value", [NAN, INF, -1.0, 0.0])
    def test_the_buffer_refuses_others(self, value):
        with pytest.raises(ValueError, match="priorities must be finite and positive"):
            TextReplayBuffer(env="x").update_priorities_of([0, 1], np.array([1.0, value]))


class TestGroups:
    @pytest.mark.parametrize("size", range(2, 12))
    def test_equal_returns_teach_nothing_whatever_their_sum_rounds_to(self, size):
        """The mean of seven times 0.1 is not 0.1, and a division by the spread makes 1 of the difference."""
        assert group_advantages(np.full(size, 0.1), True).tolist() == [0.0] * size
        assert group_advantages(np.array([0.1 + 0.2, 0.3]), True).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("returns", [[0.0, 3e38], [1e-200, 2e-200], [-3e38, 3e38], [0.0, 5e-324]])
    def test_extreme_returns_give_finite_advantages(self, returns):
        assert np.isfinite(group_advantages(np.array(returns), True)).all()


class TestWeights:
    def test_broken_ones_are_counted(self):
        state = {
            "a": torch.tensor([1.0, NAN]),
            "b": torch.tensor([[INF, -INF], [0.0, 1.0]], dtype=torch.bfloat16),
            "c": torch.full((3,), 3e38),
            "d": torch.zeros(0),
        }
        assert broken_tensors(state) == {"a": 1, "b": 2}
        with pytest.raises(NotFiniteError, match="the weights are not finite in 2 of 4 tensors, first in a: 1 of 2 numbers"):
            require_finite(state, "the weights")
        require_finite({"c": state["c"], "d": state["d"]}, "the weights")


class Unlucky(gym.Wrapper):
    """Twenty questions whose reward is no number in every third episode."""

    episodes = 0

    def reset(self, **options):
        Unlucky.episodes += 1
        return super().reset(**options)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, (NAN if Unlucky.episodes % 3 == 0 else reward), *rest


WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}
register_env("Unlucky", lambda config: Unlucky(TwentyQuestions(**WORLD)))


def small(config, env: str = "TwentyQuestions"):
    config.environment(env, env_config={} if env == "Unlucky" else dict(WORLD)).debugging(seed=0)
    config.language(language_model="tiny")
    config.training(lr=1e-3, train_batch_size_per_learner=32, minibatch_size=8)
    config.num_envs_per_env_runner = 4
    config.env_runners(num_env_runners=0)
    if not isinstance(config, TextPPOConfig):
        config.training(episodes_per_iteration=16)
    if hasattr(config, "roles"):
        config.roles(max_future_tokens=24, max_critique_tokens=32)
    return config


@pytest.fixture()
def lent(engine, lent_engine, monkeypatch):
    monkeypatch.setattr("rllib_nlac.baselines.stock_runner.local_engine", lambda config, chat: engine)
    return engine


def learners_weights(algorithm) -> dict[str, torch.Tensor]:
    return dict(algorithm.learner_group._learner.module[DEFAULT_MODULE_ID].named_parameters())


class TestRuns:
    @pytest.mark.parametrize("make", ["NLAC", "GRPO", "ScalarCritic", "PPO"])
    def test_rewards_that_are_none_lose_their_episodes_and_reach_no_weight(self, config, ray_session, lent, make):
        made = {"NLAC": lambda: config, "GRPO": GRPOConfig, "ScalarCritic": ScalarCriticConfig, "PPO": TextPPOConfig}[make]()
        algorithm = small(made, "Unlucky").build_algo()
        try:
            result = algorithm.train()
            assert result["env_runners"]["env_failures"] > 0 and math.isfinite(result["env_runners"]["episode_return_mean"])
            assert not broken_tensors(learners_weights(algorithm))
        finally:
            algorithm.stop()

    def test_a_learning_rate_beyond_all_bounds_ends_the_run_and_names_the_way_back(
        self, config, ray_session, lent, tmp_path, monkeypatch
    ):
        served = []
        take = lent.set_weights
        monkeypatch.setattr(lent, "set_weights", lambda *a: served.append(broken_tensors(a[2])) or take(*a))
        algorithm = small(config).training(lr=1e6).build_algo()
        try:
            path = algorithm.save_to_path(str(tmp_path / "good"))
            with pytest.raises(NotFiniteError, match=f"Go on from the last good checkpoint, {path}, with a lower lr"):
                for _ in range(5):
                    algorithm.train()
            assert lent.holds(lent._policy_state) and not broken_tensors(lent._policy_state)
        finally:
            algorithm.stop()
        assert len(served) >= 2 and not any(served)
