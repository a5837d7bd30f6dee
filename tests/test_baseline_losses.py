"""What each baseline trains on and with which weight, worked out by hand; no engine, no Ray."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_algorithm import fake
from micro import played
from scripted_engine import ScriptedEngine

from rllib_nlac import NLACConfig
from rllib_nlac.ablations import Frozen
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.grpo import GRPO, GRPOConfig, PolicyGradientLearner, group_advantages, has_spread
from rllib_nlac.baselines.nlql import NLQL, BestOfStages, NLQLConfig, choose, value_of
from rllib_nlac.baselines.nlrl import NLRLConfig
from rllib_nlac.baselines.rft import RFT, RFTConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig, ScalarCriticLearner
from rllib_nlac.baselines.self_distillation import SelfDistillationConfig
from rllib_nlac.baselines.stock import TextAPPOConfig, TextPPOConfig
from rllib_nlac.episode import GENERATION, TASK_SEED
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.learner.batch import POLICY
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Critique, Future, Generation, Weights


@pytest.mark.parametrize("kind", [GRPOConfig, RFTConfig, NLRLConfig, SelfDistillationConfig, NLQLConfig, ScalarCriticConfig])
def test_a_configuration_builds_its_own_algorithm_or_the_one_that_is_given(kind):
    own = kind().algo_class
    assert own.__name__ == kind.__name__.removesuffix("Config") and type(own.get_default_config()) is kind
    derived = type("Derived", (own,), {})
    assert kind(algo_class=derived).algo_class is derived


@pytest.mark.parametrize("config", [GRPOConfig, ScalarCriticConfig, TextPPOConfig, TextAPPOConfig])
def test_a_policy_gradient_needs_the_distribution_that_the_engine_samples_from(config):
    made = config().environment("TwentyQuestions").language(language_model="tiny")
    made.language(action_temperature=0.5).validate()
    with pytest.raises(ValueError, match=r"action_temperature is 0 and must be at least 0\.01: .*no gradient"):
        made.language(action_temperature=0).validate()
    with pytest.raises(ValueError, match=r"action_top_p is 0\.9 and must be 1"):
        made.language(action_temperature=1.0, action_top_p=0.9).validate()


def test_what_would_change_a_gradient_step_is_refused():
    config = NLACConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
    with pytest.raises(ValueError, match="has 'gradient_accumulation_steps': remove it and set max_tokens_per_micro_batch"):
        config.copy(copy_frozen=False).deepspeed(deepspeed_config={"gradient_accumulation_steps": 4}).validate()
    with pytest.raises(ValueError, match="grad_clip_by is 'value' and must be global_norm"):
        config.copy(copy_frozen=False).training(grad_clip_by="value").validate()
    with pytest.raises(ValueError, match="action_top_p is 0 and must be above 0"):
        config.copy(copy_frozen=False).language(action_top_p=0).validate()


class TestGRPO:
    @given(st.integers(2, 16), st.sampled_from([0.1, 0.3, 0.7, 1 / 3, 1.1, -0.1, 250.1]), st.booleans())
    @settings(max_examples=100)
    def test_equal_returns_teach_nothing_whatever_their_mean_rounds_to(self, size, value, normalize):
        """The mean of three times 0.1 is not 0.1, and the deviation from it not 0."""
        assert group_advantages(np.full(size, value), normalize).tolist() == [0.0] * size
        rounded = np.array([value + 0.1 + 0.2 - 0.3, *[value] * (size - 1)])
        assert group_advantages(rounded, normalize).tolist() == [0.0] * size and not has_spread(rounded)

    def test_small_returns_may_differ(self):
        assert group_advantages(np.array([0.0, 1e-6]), True).tolist() == pytest.approx([-1.0, 1.0])
        assert has_spread(np.array([0.0, 1e-6])) and has_spread(np.array([-5.0, 5.0]))

    @pytest.mark.parametrize(("level", "rounding"), [(0.0, 1e-10), (0.5, 1e-10), (1.0, 1e-10), (-1e4, 1e-6)])
    def test_what_counts_as_rounding_grows_with_the_returns(self, level, rounding):
        assert has_spread(np.array([level, level + 1.1 * rounding, level]))
        assert not has_spread(np.array([level, level + 0.9 * rounding, level]))

    def test_advantages_in_closed_form(self):
        """By the deviation of the group itself, not of a population that it were drawn from."""
        returns = np.array([1.0, 0.0, 0.0, 0.0])
        assert group_advantages(returns, False).tolist() == [0.75, -0.25, -0.25, -0.25]
        assert group_advantages(returns, True) == pytest.approx(np.array([3, -1, -1, -1]) / np.sqrt(3))

    @pytest.mark.parametrize(("normalize", "advantage"), [(True, 1.0), (False, 0.5)])
    def test_sequences(self, normalize, advantage):
        a = fake(normalize_by_std=normalize)
        a.advantages = lambda returns: GRPO.advantages(a, returns)
        episodes = [
            played([0.0, 1.0], task=5, lengths=[1, 3], name="a"),
            played([1.0], task=6, name="b"),
            played([0.0], task=5, lengths=[4], name="c"),
            played([1.0], task=6, name="d"),
        ]
        sequences = GRPO.training_sequences(a, episodes)
        # Task 6 says nothing. Each episode of task 5 weighs 1, shared among its tokens, over the step's sum.
        got = sorted((len(s.answer_ids), s.scalar, s.weight) for s in sequences)
        assert got == [
            (1, advantage, pytest.approx(1 / 8)),
            (3, advantage, pytest.approx(3 / 8)),
            (4, -advantage, pytest.approx(1 / 2)),
        ]
        assert a.metrics.logged["informative_group_rate"] == 0.5
        assert GRPO.training_sequences(a, [episodes[1], episodes[3]]) == []
        assert a.metrics.logged["informative_group_rate"] == 0.0

    @pytest.mark.parametrize("kind", [PolicyGradientLearner, ScalarCriticLearner])
    def test_ratios_are_clipped_where_the_config_says(self, kind):
        """Ratios of 1.25 and 0.9, beyond 0.05 from 1; fails where the clip is always 0.2."""
        learner = kind.__new__(kind)
        learner.config = SimpleNamespace(clip_param=0.05, action_temperature=1.0)
        now = torch.log(torch.tensor([[0.5, 0.5], [0.45, 0.45]]))
        learner._answers = lambda *_: (now, torch.ones(2, 2), torch.zeros(2), 0.0)
        rows = {
            "ids": torch.zeros(2, 3, dtype=torch.int64),
            "prompt_length": torch.tensor([1, 1]),
            "length": torch.tensor([3, 3]),
            "logprobs": torch.log(torch.tensor([[1.0, 0.4, 0.4], [1.0, 0.5, 0.5]])),
            "scalar": torch.tensor([2.0, -1.0]),
            "role": torch.full((2,), POLICY),
        }
        assert learner._sequence_losses(rows)[0].tolist() == pytest.approx([-2 * 1.05, 0.95])

    def test_defaults_are_the_papers(self):
        config = GRPOConfig()
        assert (config.episodes_per_task, config.clip_param, config.normalize_by_std) == (8, 0.2, True)
        with pytest.raises(ValueError, match="episodes_per_task is 1 and must be at least 2"):
            config.environment("TwentyQuestions").language(prompts="compact")
            config.env_runners(num_env_runners=0)
            config.episodes_per_task = 1
            config.validate()


class TestGroups:
    def runner(self, config, chat, index: int, **changes) -> TextEnvRunner:
        own = config.copy(copy_frozen=False)
        for key, value in changes.items():
            setattr(own, key, value)
        runner = TextEnvRunner(config=own, worker_index=index)
        runner.attach(ScriptedEngine(chat, lambda *_: "Is it big?"))
        return runner

    @pytest.mark.parametrize("seed", [0, None])
    def test_runners_play_tasks_and_samples_of_their_own(self, config, chat, seed):
        """Without a seed, too: runners with equal seeds would each play the others' episodes."""
        runners = [self.runner(config, chat, index, seed=seed) for index in (0, 1, 2)]
        starts = [runner._next_start() for runner in runners for _ in range(50)]
        assert len({s.task_seed for s in starts}) == len({s.sampling_seed for s in starts}) == 150
        again = self.runner(config, chat, 1, seed=seed)
        assert [again._next_start() for _ in range(50)] == starts[50:100]

    @pytest.mark.parametrize("seed", [0, None])
    def test_evaluation_has_tasks_of_its_own(self, config, chat, seed):
        training, evaluation = (self.runner(config, chat, 1, seed=seed, in_evaluation=on) for on in (False, True))
        of_training, of_evaluation = ({r._next_start().task_seed for _ in range(200)} for r in (training, evaluation))
        assert not of_training & of_evaluation

    def test_a_task_has_its_whole_group_after_one_was_lost(self, config, chat):
        runner = self.runner(config, chat, 0, episodes_per_task=4)
        runner.sample(num_episodes=5)  # as where one episode of four was lost and replaced
        for _ in range(2):
            groups = Counter(e.custom_data[TASK_SEED] for e in runner.sample(num_episodes=8))
            assert sorted(groups.values()) == [4, 4]


class TestRFT:
    def test_who_is_imitated_and_with_which_weight(self):
        a = fake(min_return=None, pool_size=0)
        episodes = [
            played([0.0, 0.0], lengths=[1, 3], success=True),
            played([1.0], success=False),
            played([0.5], lengths=[2]),
            played([-1.0]),
        ]
        a.accepts = lambda episode: RFT.accepts(a, episode)
        sequences = RFT.training_sequences(a, episodes)
        assert sorted((len(s.answer_ids), s.weight) for s in sequences) == [
            (1, pytest.approx(1 / 8)),
            (2, pytest.approx(1 / 2)),
            (3, pytest.approx(3 / 8)),
        ]
        assert {(s.role, s.scalar) for s in sequences} == {(POLICY, 0.0)} and a.metrics.logged["accepted_rate"] == 0.5
        assert RFT.training_sequences(a, []) == [] and a.metrics.logged["accepted_rate"] == 0.0

    def test_by_default_success_is_imitated_and_nothing_kept(self):
        assert RFTConfig().min_return is None and RFTConfig().pool_size == 0

    def test_a_least_return(self):
        a = fake(min_return=0.5)
        assert [RFT.accepts(a, played([r], success=False)) for r in (0.4, 0.5, 0.6)] == [False, True, True]

    @pytest.mark.parametrize(("size", "kept"), [(0, ["b0", "b1"]), (2, ["b0", "b1"]), (3, ["a1", "b0", "b1"]), (9, None)])
    def test_the_pool_keeps_the_latest_and_all_of_this_iteration(self, size, kept):
        a = fake(min_return=0.0, pool_size=size)
        a.accepts = lambda episode: True
        first = [played([1.0], name=f"a{i}") for i in range(2)]
        second = [played([1.0], name=f"b{i}") for i in range(2)]
        RFT.training_sequences(a, first)
        sequences = RFT.training_sequences(a, second)
        assert [e.id_ for e in a.pool] == (kept or ["a0", "a1", "b0", "b1"]) and len(sequences) == len(a.pool)

    def test_a_restored_run_has_its_pool(self, monkeypatch):
        monkeypatch.setattr(LanguageAlgorithm, "setup", lambda self, config: assert_empty(self.pool))
        monkeypatch.setattr(LanguageAlgorithm, "own_state", lambda self: {"rest": 5})
        restored = []
        monkeypatch.setattr(LanguageAlgorithm, "set_own_state", lambda self, state: restored.append(state["rest"]))

        def assert_empty(pool):
            assert pool == []

        first, second = (RFT.__new__(RFT) for _ in range(2))
        for each in (first, second):
            RFT.setup(each, None)
        first.pool = [played([1.0, 2.0], name="a"), played([3.0], name="b")]
        second.set_own_state(first.own_state())
        assert restored == [5] and [(e.id_, e.get_return()) for e in second.pool] == [("a", 3.0), ("b", 3.0)]
        assert second.pool[0].get_extra_model_outputs(GENERATION, 1).token_ids == (10, 11)


YES, NO = Critique("Optimal: Yes", True, "", ""), Critique("Optimal: No", False, "", "x")
GOOD, BAD = Future("SUCCESS", True), Future("FAILURE", False)


class TestNLQL:
    def test_the_best_of_one_is_refused(self):
        config = NLQLConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        with pytest.raises(ValueError, match="num_candidates is 1 and must be at least 2"):
            config.training(num_candidates=1).validate()

    def test_the_stages_draw_as_many_candidates_as_the_config_says(self, monkeypatch):
        stages, a = BestOfStages.__new__(BestOfStages), NLQL.__new__(NLQL)
        monkeypatch.setattr(NLAC, "setup", lambda self, config: setattr(self, "stages", stages))
        a.config = SimpleNamespace(num_candidates=3)
        a.setup(None)
        assert stages.num_candidates == 3

    def test_what_speaks_of_stored_actions_is_refused(self):
        config = NLQLConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        config.copy(copy_frozen=False).validate()
        with pytest.raises(ValueError, match="critic_input is 'backed_up' and speaks of stored actions"):
            config.copy(copy_frozen=False).training(critic_input="backed_up").validate()

    def test_the_value_is_the_verdict_and_then_the_share_of_successes(self):
        assert value_of(YES, (BAD,)) == 2.0 and value_of(NO, (GOOD,)) == 1.0
        assert value_of(NO, (GOOD, BAD, BAD, BAD)) == 0.25 and value_of(YES, ()) == 2.0

    def test_what_is_learned(self):
        t = transition_at("E", played([0.0, 1.0]), 0)
        other = Generation((1,), (40,), np.zeros(1), True, 0)
        answers = [(t.generation, "turn 0"), (other, "b"), None]
        kept = choose(t, answers, [(GOOD,), (BAD,), ()], [YES, YES, None])
        assert (kept.reason, kept.kept, kept.generation, kept.critique) == ("kept", True, t.generation, YES)
        changed = choose(t, answers, [(BAD,), (GOOD,), ()], [YES, YES, None])
        assert (changed.reason, changed.kept, changed.action, changed.generation) == ("refined", False, "b", other)
        assert changed.futures == (GOOD,)
        equal = choose(t, answers, [(BAD,), (BAD,), ()], [NO, NO, None])
        assert (equal.reason, equal.generation, equal.action, equal.kept) == ("not_refined", None, "turn 0", True)
        only = choose(t, answers, [(GOOD,), (BAD,), ()], [None, NO, None])  # one judged action beats nothing
        assert (only.reason, only.generation) == ("not_refined", None)
        first = choose(t, [(other, "a"), (other, "b"), (other, "c")], [(GOOD,), (GOOD,), (BAD,)], [YES, YES, YES])
        assert first.action == "a"

    def test_the_same_action_under_another_thought_is_kept(self, chat, compact):
        thoughts = iter("ab")

        def answer(prompt, _):
            if "Evaluate." in prompt:
                return "Optimal: Yes\nReason: r"
            if "Predict." in prompt:
                return f"Future: x {'SUCCESS' if 'Thought: b' in prompt else 'FAILURE'}"
            return f"Thought: {next(thoughts)}\nAction: Is it big?"

        short = Sampling(24)
        settings_ = StageSettings(short, short, short, short, short, num_futures=1, action_format="react")
        stages = BestOfStages(ScriptedEngine(chat, answer), chat, lambda env: compact, settings_, 0, NLAC_AS_IT_IS)
        stages.num_candidates = 2
        t = replace(transition_at("TwentyQuestions", played([0.0, 1.0]), 0), action="Thought: c\nAction: Is it big?")
        report = StageReport()
        ((kept,),) = stages.drive(report, stages.improvement([t], report))
        assert (kept.reason, kept.kept, kept.action) == ("kept", True, "Thought: b\nAction: Is it big?")

    @pytest.mark.parametrize("weights", [Weights.POLICY, Weights.INITIAL])
    def test_waves(self, chat, compact, weights):
        """n actions of the policy, k futures of each, a critique of each; the roles answer by the weights that are set."""
        moves = iter(["Is it big?", "Is it alive?", "Is it alive?", "Can it fly?"])

        def answer(prompt, _):
            if "Evaluate." in prompt:
                good = prompt.split("Evaluate.\n")[1].count("SUCCESS")
                return "Optimal: No\nReason: r\nFix: Is it a dog?" if good < 2 else "Optimal: Yes\nReason: r"
            if "Predict." in prompt:
                return f"Future: x {'SUCCESS' if 'alive' in prompt else 'FAILURE'}"
            return next(moves)

        engine = ScriptedEngine(chat, answer)
        short = Sampling(12)
        settings_ = StageSettings(short, short, short, short, short, num_futures=2)
        variant = Frozen() if weights is Weights.INITIAL else NLAC_AS_IT_IS
        stages = BestOfStages(engine, chat, lambda env: compact, settings_, 0, variant)
        stages.num_candidates = 2
        t = transition_at("TwentyQuestions", played([0.0, 1.0]), 0)
        report = StageReport()
        other = transition_at("TwentyQuestions", played([0.0, 1.0]), 1)
        ((refinement, second),) = stages.drive(report, stages.improvement([t, other], report))
        assert (second.action, second.transition) == ("Is it alive?", other)
        assert refinement.action == "Is it alive?" and refinement.critique.optimal and len(refinement.futures) == 2
        assert [(which, len(prompts)) for which, prompts in engine.calls] == [
            (Weights.POLICY, 4),
            (weights, 8),
            (Weights.TARGET, 4),
        ]
        assert report.counts["refinement_refined"] == 2
