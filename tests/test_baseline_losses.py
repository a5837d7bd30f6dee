"""What each baseline trains on and with which weight, worked out by hand; no engine, no Ray."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from micro import build_learner, played, save_micro_model
from scripted_engine import ScriptedEngine

from rllib_nlac import NLACConfig
from rllib_nlac.ablations import Frozen
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.grpo import GRPO, GRPOConfig, group_advantages, has_spread
from rllib_nlac.baselines.nlql import BestOfStages, NLQLConfig, choose, value_of
from rllib_nlac.baselines.nlrl import NLRL, NLRLConfig
from rllib_nlac.baselines.rft import RFT, RFTConfig
from rllib_nlac.baselines.rollouts import RolloutCritic
from rllib_nlac.baselines.scalar_critic import ScalarCritic, ScalarCriticConfig
from rllib_nlac.baselines.self_distillation import SelfDistillation, SelfDistillationConfig
from rllib_nlac.baselines.stock import TextAPPOConfig, TextPPOConfig
from rllib_nlac.engine.chat import PromptTooLong, Wanted
from rllib_nlac.episode import GENERATION, TASK_SEED
from rllib_nlac.language.critique import transcript
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.learner.batch import CRITIC, POLICY
from rllib_nlac.replay.buffer import ReplaySample, transition_at
from rllib_nlac.sampling.collector import CollectionError
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import BellmanTarget, Critique, Future, Generation, Message, Refinement, Seen, Weights


class Metrics:
    def __init__(self) -> None:
        self.logged: dict = {}

    def log_value(self, name, value, window=None, reduce=None) -> None:
        assert window == 1 or reduce == "sum"  # each iteration's own value, no running average
        self.logged[name] = value


def fake(**config) -> SimpleNamespace:
    """An algorithm's state without an algorithm."""
    defaults = {"minibatch_size": 100, "num_epochs": 1}
    return SimpleNamespace(
        config=SimpleNamespace(**{**defaults, **config}), metrics=Metrics(), rng=np.random.default_rng(0), pool=[]
    )


class BranchingRunner:
    """Plays branches by name only."""

    def __init__(self, number: int) -> None:
        self.number, self.engines, self.error = number, [], None
        self.played = False

    @contextmanager
    def lent(self, engine):
        self.engines.append(engine)
        yield

    def branch(self, prefixes, count):
        self.played = True
        if self.error is not None:
            raise self.error
        return [[f"{episode} by {self.number}, {b}" for b in range(count)] for episode, _ in prefixes]

    def get_metrics(self):
        return f"metrics {self.number}"

    def get_state(self):
        return {"of": self.number}


class BranchingGroup:
    """The first is the local one; the answers of the others come in the wrong order."""

    lost: tuple[int, ...] = ()

    def __init__(self, workers) -> None:
        self.workers, self.local_env_runner, self.asked = workers, workers[0], []

    def healthy_env_runner_ids(self):
        return [worker.number for worker in self.workers[1:]]

    def foreach_env_runner(self, functions, *, remote_worker_ids, **how):
        self.asked.append(how)
        chosen = [worker for worker in self.workers if worker.number in remote_worker_ids]
        answers = [(w.number, function(w)) for w, function in zip(chosen, functions, strict=True)]
        return [answer for number, answer in reversed(answers) if number not in self.lost]


@pytest.mark.parametrize("kind", [GRPOConfig, RFTConfig, NLRLConfig, SelfDistillationConfig, NLQLConfig, ScalarCriticConfig])
def test_a_configuration_builds_its_own_algorithm_or_the_one_that_is_given(kind):
    own = kind().algo_class
    assert own.__name__ == kind.__name__.removesuffix("Config") and type(own.get_default_config()) is kind
    derived = type("Derived", (own,), {})
    assert kind(algo_class=derived).algo_class is derived


@pytest.mark.parametrize("config", [GRPOConfig, ScalarCriticConfig, TextPPOConfig, TextAPPOConfig])
def test_a_policy_gradient_needs_the_distribution_that_the_engine_samples_from(config):
    made = config().environment("TwentyQuestions").language(language_model="tiny", prompts="compact", max_action_tokens=12)
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

    def test_sequences(self):
        a = fake(normalize_by_std=True)
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
        assert got == [(1, 1.0, pytest.approx(1 / 8)), (3, 1.0, pytest.approx(3 / 8)), (4, -1.0, pytest.approx(1 / 2))]
        assert a.metrics.logged["informative_group_rate"] == 0.5
        assert GRPO.training_sequences(a, [episodes[1], episodes[3]]) == []
        assert a.metrics.logged["informative_group_rate"] == 0.0

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


class TestRolloutCritics:
    def algorithm(self, **config):
        a = fake(**{"policy_loss_coeff": 1.0, "rollouts_per_action": 3, "env": "E", **config})
        a.stages = SimpleNamespace(predict_ids=lambda t: (9, len(t.state)))
        a._transition = lambda episode, t: RolloutCritic._transition(a, episode, t)
        a._sequences = lambda targets, refinements: RolloutCritic._sequences(a, targets, refinements)
        a.heed_stages = lambda report: None
        return a

    def texts(self):
        transitions = [transition_at("E", played([0.0, 0.0, 1.0]), t) for t in range(3)]
        answer = Generation((1,), (30, 31), np.zeros(2), True, 0)
        targets = [
            BellmanTarget(t, answer if i else None, None, None, None) for i, t in enumerate((*transitions, *transitions))
        ]
        refinements = [Refinement(t, (), None, None, answer if i else None, False, "x") for i, t in enumerate(transitions)]
        return targets, refinements

    @pytest.mark.parametrize("policy", [1.0, 0.5])
    def test_both_losses_weigh_by_the_coefficient_whatever_the_number_of_their_texts(self, policy):
        a = self.algorithm(policy_loss_coeff=policy)
        sequences = a._sequences(*self.texts())
        total = 1 + policy
        weights = {role: [s.weight for s in sequences if s.role == role] for role in (CRITIC, POLICY)}
        assert weights[CRITIC] == pytest.approx([1 / total / 5] * 5) and weights[POLICY] == pytest.approx(
            [policy / total / 2] * 2
        )
        for s in sequences:
            assert s.answer_ids == (30, 31)
            assert re.fullmatch(r"turn [0-2] of a rollout" if s.role == CRITIC else r"turn [12] of a judged episode", s.origin)
            assert s.prompt_ids in (((2, 3, 4, 5), (2, 3, 4, 5, 6)) if s.role == POLICY else ((9, 1), (9, 3), (9, 5)))

    def test_a_coefficient_of_0_switches_off(self):
        assert {s.role for s in self.algorithm(policy_loss_coeff=0.0)._sequences(*self.texts())} == {CRITIC}

    def test_one_step_of_each_episode_is_judged_by_all_of_its_rollouts(self, monkeypatch):
        a = self.algorithm()
        asked, seen = [], {}
        goes_on = [played([0.0] * 5, name="x", success=False), played([0.0] * 4, name="y", success=True)]

        def branch(prefixes, count):
            asked.append((prefixes, count))
            return [goes_on, []]  # of the second episode all branches were lost

        def describe(rollouts, report):
            seen["rollouts"] = rollouts
            return [[BellmanTarget(t, None, transcript(t) if t.reward < 5 else None, None, None) for t in g] for g in rollouts]

        def improvement(judged, report, futures):
            seen.update(judged=judged, futures=futures)

        a.branch, a.describe = branch, describe
        a.stages.improvement = improvement
        refinement = Refinement(transition_at("E", goes_on[0], 0), (), None, None, None, False, "not_refined")
        a.stages.drive = lambda report, stage: ([refinement],)
        monkeypatch.setattr("rllib_nlac.baselines.rollouts.log_stages", lambda *_: None)
        episodes = [played([0.0, 0.0, 0.0], success=True, name="a"), played([7.0], success=True, name="b")]
        assert RolloutCritic.training_sequences(a, episodes) == []
        ((prefixes, count),) = asked
        assert count == 2 and [episode for episode, _ in prefixes] == episodes
        steps = [n for _, n in prefixes]
        assert 1 <= steps[0] <= 3 and steps[1] == 1
        lengths = [[1 + len(t.following) for t in group] for group in seen["rollouts"]]
        assert lengths == [[3 - steps[0] + 1, 5 - steps[0] + 1, 4 - steps[0] + 1], [1]]
        assert all(t is group[0] for t, group in zip(seen["judged"], seen["rollouts"], strict=True))
        assert [t.action for t in seen["judged"]] == [f"turn {n - 1}" for n in steps]
        assert [[f.success for f in futures] for futures in seen["futures"]] == [[True, False, True], []]

    def test_any_step_may_be_judged(self, monkeypatch):
        a = self.algorithm()
        picked = Counter()

        def branch(prefixes, count):
            picked.update(n for _, n in prefixes)
            return [[] for _ in prefixes]

        a.branch = branch
        a.describe = lambda rollouts, report: [[] for _ in rollouts]
        a.stages.improvement, a.stages.drive = (lambda *_: None), (lambda *_: ([],))
        monkeypatch.setattr("rllib_nlac.baselines.rollouts.log_stages", lambda *_: None)
        RolloutCritic.training_sequences(a, [played([0.0] * 4) for _ in range(200)])
        assert sum(picked.values()) == 200
        shares = np.array([picked[n] for n in (1, 2, 3, 4)]) / 200
        assert np.abs(shares - 0.25).max() < 0.1

    @pytest.mark.parametrize("runners", [0, 1, 2, 3])
    def test_branches_are_shared_out_and_come_back_in_their_places(self, runners):
        """With several EnvRunners each plays every n-th prefix, on the algorithm's engine; their answers come in any order."""
        a, aggregated, states = self.algorithm(sample_timeout_s=77.0), [], {}
        a.engine, a.metrics = "engine", SimpleNamespace(aggregate=lambda *given, key: aggregated.append((given, key)))
        a.collector = SimpleNamespace(runner_states=states) if runners != 1 else None
        workers = [BranchingRunner(number) for number in range(runners + 1)]
        group = BranchingGroup(workers)
        a.env_runner_group = group
        prefixes = [(f"episode {i}", i) for i in range(5)]
        branches = RolloutCritic.branch(a, prefixes, 2)
        who = [i % runners + 1 if runners else 0 for i in range(5)]
        assert branches == [[f"episode {i} by {who[i]}, {b}" for b in range(2)] for i in range(5)]
        played = [worker for worker in workers if worker.played]
        assert {key for _, key in aggregated} == {"env_runners"} and len(aggregated) == 1
        assert sorted(aggregated[0][0][0]) == [f"metrics {worker.number}" for worker in played]
        assert all(worker.engines == (["engine"] if runners else []) for worker in played)
        assert states == ({worker.number: {"of": worker.number} for worker in played} if runners > 1 else {})
        assert group.asked == ([{"local_env_runner": False, "timeout_seconds": 77.0}] if runners else [])

    def test_of_a_lost_runner_there_are_no_branches_and_a_failing_one_is_named(self):
        a = self.algorithm(sample_timeout_s=77.0)
        a.engine, a.metrics, a.collector = "engine", SimpleNamespace(aggregate=lambda *_, **__: None), None
        workers = [BranchingRunner(number) for number in range(3)]
        a.env_runner_group = group = BranchingGroup(workers)
        group.lost = (1,)
        assert [len(own) for own in RolloutCritic.branch(a, [(str(i), 0) for i in range(5)], 2)] == [0, 2, 0, 2, 0]
        group.lost, workers[2].error = (), OSError("the simulator fell over")
        with pytest.raises(CollectionError, match="EnvRunner 2 failed: OSError: the simulator fell over"):
            RolloutCritic.branch(a, [("a", 0), ("b", 0)], 2)

    def test_needs_at_least_the_rollout_that_was_played(self):
        config = NLRLConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        assert config.rollouts_per_action == 4
        config.training(rollouts_per_action=1).validate()
        with pytest.raises(ValueError, match="rollouts_per_action is 0 and must be at least 1"):
            config.training(rollouts_per_action=0).validate()

    def test_nlrl_describes_every_rollout(self):
        a = self.algorithm()
        flat = []

        def backup(transitions, report):
            flat.extend(transitions)
            return transitions

        a.stages.backup = backup
        a.stages.drive = lambda report, transitions: ([f"y{i}" for i in range(len(transitions))],)
        groups = [[transition_at("E", played([0.0, 1.0]), t) for t in (0, 1)], [transition_at("E", played([0.0]), 0)]]
        assert NLRL.describe(a, groups, StageReport()) == [["y0", "y1"], ["y2"]] and flat == [*groups[0], *groups[1]]

    def test_self_distillation_shows_replies_and_generates_nothing(self):
        won, lost = (transition_at("E", played([0.0] * 3, success=s), 1, n_step=3) for s in (True, False))
        assert transcript(won) == Future("reply 1 reply 2 SUCCESS", True)
        assert transcript(lost) == Future("reply 1 reply 2 FAILURE", False)
        ((first, second),) = SelfDistillation.describe(None, [[won, lost]], StageReport())
        assert first.generation is None and first.transition is won and (first.next_action, first.next_future) == (None, None)
        assert first.future == transcript(won) and second.future == transcript(lost)


YES, NO = Critique("Optimal: Yes", True, "", ""), Critique("Optimal: No", False, "", "x")
GOOD, BAD = Future("SUCCESS", True), Future("FAILURE", False)


class TestNLQL:
    def test_the_best_of_one_is_refused(self):
        config = NLQLConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        with pytest.raises(ValueError, match="num_candidates is 1 and must be at least 2"):
            config.training(num_candidates=1).validate()

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
        Frozen() if weights is Weights.INITIAL else NLAC_AS_IT_IS
        stages = BestOfStages(
            engine, chat, lambda env: compact, settings_, 0, Frozen() if weights is Weights.INITIAL else NLAC_AS_IT_IS
        )
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


class TestScalarCritic:
    def algorithm(self, **config):
        a = fake(
            **{"gamma": 0.9, "entropy_alpha": 0.5, "vf_loss_coeff": 3.0, "minibatch_size": 2, "num_candidates": 2, **config}
        )
        a._q = lambda generations, target: np.array([10.0 * target + len(g.token_ids) for g in generations])
        return a

    def action(self, *logprobs: float) -> Generation:
        return Generation((1,), tuple(range(len(logprobs))), np.array(logprobs, np.float32), True, 0)

    def test_targets_hold_rewards_discount_entropy_and_end_with_the_episode(self):
        episode, cut = played([1.0, 2.0, 4.0]), played([1.0], truncated=True)
        following = self.action(-1.0, -2.0)
        one = [transition_at("E", episode, t) for t in range(3)]
        # Q̄ is 10 and 2 for two tokens; -α log π adds 0.5 · 3.
        soft = 12.0 + 1.5
        a = self.algorithm()
        targets = ScalarCritic._targets(a, [one[0], one[2], one[1]], [following, None, self.action(-4.0)])
        assert targets == pytest.approx([1 + 0.9 * soft, 4.0, 2 + 0.9 * (11 + 2.0)])
        two = [transition_at("E", episode, t, n_step=2) for t in range(3)]
        assert ScalarCritic._targets(a, two, [following, None, None]) == pytest.approx(
            [1 + 0.9 * 2 + 0.81 * soft, 2 + 0.9 * 4, 4.0]
        )
        assert ScalarCritic._targets(a, [transition_at("E", cut, 0)], [None]) == [1.0]

    @pytest.mark.parametrize("epochs", [1, 2])
    def test_sequences(self, epochs):
        a = self.algorithm(num_epochs=epochs)
        transitions = [transition_at("E", played([0.0, 0.0, 1.0]), t) for t in range(3)]
        sample = ReplaySample(transitions, np.array([1.0, 0.5, 0.25], np.float32), [0, 1, 2])
        candidates = [[self.action(-i - 0.5), self.action(-i - 1.0)] for i in range(3)]
        advantages = np.array([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])
        made = ScalarCritic._sequences(a, sample, [5.0, 6.0, 7.0], candidates, advantages)
        assert len(made) == 9 * epochs and {s.minibatch for s in made} == set(range(2 * epochs))
        for s in made:
            i, share = s.item, float(sample.weights[s.item]) / 2
            if s.role == CRITIC:
                assert s.prompt_ids == transitions[i].generation.prompt_ids and s.answer_ids == (10, 11)
                assert s.scalar == 5.0 + i and s.weight == pytest.approx(3.0 * share)
            else:
                g = candidates[i][s.scalar < 0]
                assert abs(s.scalar) == i + 1 and s.logprobs is g.logprobs and s.answer_ids == g.token_ids
                assert s.prompt_ids == (1,) and s.weight == pytest.approx(share / 2)
        for epoch in range(epochs):
            own = [s for s in made if s.minibatch // 2 == epoch]
            assert Counter((s.item, s.role) for s in own) == {(i, r): 1 + r for i in range(3) for r in (CRITIC, POLICY)}
        assert [s.minibatch for s in made if s.role == CRITIC][:3] == [0, 0, 1] and made[0].item == 0

    def test_a_training_step(self, monkeypatch):
        """Candidates and next actions in one call, advantages beside their mean, priorities from the critic alone."""
        a = self.algorithm()
        episode = played([1.0, 2.0, 4.0])
        transitions = [transition_at("E", episode, t, n_step=2) for t in (0, 1)]
        sample = ReplaySample(transitions, np.ones(2, np.float32), [7, 8])
        asked, learned = [], {}

        def generate(states):
            asked.append(states)
            return [self.action(*[-float(i)] * (i + 1)) for i in range(len(states))]

        def learn(sequences, count):
            learned.update(sequences=sequences, count=count)
            return {CRITIC: np.array([4.0, 1.0]), POLICY: np.array([100.0, 100.0])}

        updated = {}
        a.collect, a.replay, a._generate, a.learn = (lambda: ["episode"]), (lambda episodes: sample), generate, learn
        a._targets = lambda *arguments: ScalarCritic._targets(a, *arguments)
        a._sequences = lambda *arguments: ScalarCritic._sequences(a, *arguments)
        a.prioritise = lambda *arguments: ScalarCritic.prioritise(a, *arguments)
        a.local_replay_buffer = SimpleNamespace(
            update_priorities_of=lambda nodes, p: updated.update(nodes=nodes, p=p), holds=lambda sample: np.ones(2, bool)
        )
        a.sync_weights, a.weight_version = (lambda: updated.update(synced=True)), 1
        monkeypatch.setattr("rllib_nlac.baselines.scalar_critic.log_replay", lambda *_: None)
        ScalarCritic.training_step(a)
        (states,) = asked
        expected = [transitions[0].state] * 2 + [transitions[1].state] * 2 + [episode.get_extra_model_outputs("messages", 2)]
        assert [state.messages for state in states] == expected
        # As the engine saw them: the prompts of both, and behind the second one its turn.
        ids = [t.generation.prompt_ids for t in transitions]
        assert [state.seen for state in states[:4]] == [Seen(i) for i in ids for _ in range(2)]
        assert states[4].seen == Seen(ids[1], transitions[1].generation.token_ids)
        # Action i has i + 1 tokens of log-probability -i: Q is i + 1, log π is -i (i + 1), Q - α log π is (i + 1)(1 + i / 2).
        soft = [1.0, 3.0, 6.0, 10.0]
        critic = {s.item: s.scalar for s in learned["sequences"] if s.role == CRITIC}
        policy = [s.scalar for s in learned["sequences"] if s.role == POLICY]
        assert critic == pytest.approx({0: 1 + 0.9 * 2 + 0.81 * (15 + 0.5 * 20), 1: 2 + 0.9 * 4})
        assert policy == pytest.approx([soft[0] - 2, soft[1] - 2, soft[2] - 8, soft[3] - 8])
        assert updated["nodes"] == [7, 8] and updated["synced"] and learned["count"] == 2
        top = np.quantile([4.0, 1.0], 0.95)
        assert updated["p"] == pytest.approx([top + 1e-3, 1 + 1e-3]) and a.metrics.logged["q_mean"] == 5.0

    def test_values_of_policy_and_target_weights_in_any_groups(self, tmp_path):
        learner = build_learner(
            ScalarCriticConfig(), language_model=save_micro_model(tmp_path), max_tokens_per_micro_batch=12, lr=0.1, tau=0.0
        )
        torch.nn.init.normal_(learner.trained.head.weight)
        sequences = [(3, 4, 5), (6, 7, 8, 9, 10, 11, 12), (13,), (14, 15, 16, 17)]

        def expected():
            hidden = [
                learner.lm(input_ids=torch.tensor([s]), output_hidden_states=True).hidden_states[-1][0, -1] for s in sequences
            ]
            return [learner.trained.head(h).item() for h in hidden]

        now = learner.q_values(sequences, target=False)
        assert now == pytest.approx(expected(), rel=1e-4, abs=1e-4) and len(set(now.tolist())) == 4
        assert learner.q_values(sequences, target=True).tolist() == [0.0] * 4  # taken before the head was changed
        learner.target.update(learner.trainer.parts())
        assert learner.q_values(sequences, target=True).tolist() == [0.0] * 4  # τ is 0
        learner.target.tau = 1.0
        learner.target.update(learner.trainer.parts())
        assert learner.q_values(sequences, target=True) == pytest.approx(now, rel=1e-4, abs=1e-4)

    def test_an_action_of_the_policy_in_each_state(self, chat):
        engine = ScriptedEngine(chat, lambda prompt, weights: prompt.split("object ")[1].split(".")[0])
        a = fake(action_sampling=Sampling(24, 0.7, 0.8))
        a.chat, a.engine = chat, engine
        states = [(Message("user", f"Guess object {i}."),) for i in range(50)]
        answers = ScalarCritic._generate(a, [Wanted(state) for state in states])
        assert [chat.decode(g.token_ids) for g in answers] == [str(i) for i in range(50)]
        asked = [request for _, request in engine.requests]
        assert [r.prompt_ids for r in asked] == [chat.prompt_ids(state) for state in states]
        assert {(r.max_tokens, r.temperature, r.top_p) for r in asked} == {(24, 0.7, 0.8)}
        assert {weights for weights, _ in engine.requests} == {Weights.POLICY} and len(engine.calls) == 1
        seeds = np.array([r.seed for r in asked])
        assert len(set(seeds.tolist())) == 50 and seeds.min() >= 0 and 2**28 < seeds.max() < 2**31
        with pytest.raises(PromptTooLong):  # a prompt must leave room for the action
            a.config.action_sampling = Sampling(chat.max_context)
            ScalarCritic._generate(a, [Wanted(states[0])])

    @pytest.mark.parametrize("is_local", [True, False])
    def test_the_first_learner_says_what_actions_are_worth(self, is_local):
        class Learner:
            def q_values(self, sequences, target):
                return [len(s) + 100.0 * target for s in sequences]

        a, called = fake(), []

        class Group:
            _learner = Learner()

            def __len__(self):
                return 2

            def foreach_learner(self, function):
                called.append(function)
                for number in (1, 0):
                    learner = Learner()
                    learner._learner_index = number
                    yield SimpleNamespace(ok=True, actor_id=number, get=partial(function, learner))

        a.learner_group = Group()
        a.learner_group.is_local = is_local
        actions = [self.action(-1.0), self.action(-1.0, -2.0)]
        assert ScalarCritic._q(a, actions, target=False) == [2.0, 3.0]
        assert ScalarCritic._q(a, actions, target=True) == [102.0, 103.0]
        assert len(called) == (0 if is_local else 2)
        assert ScalarCritic._q(a, [], target=True).shape == (0,)

    def test_targets_of_actions_need_whole_parameters(self):
        config = ScalarCriticConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        config.deepspeed_config = {"zero_optimization": {"stage": 2}}
        config.validate()
        config.deepspeed_config = {"zero_optimization": {"stage": 3}}
        with pytest.raises(ValueError, match=r"must have a zero_optimization\.stage below 3: values need whole parameters"):
            config.validate()

    def test_settings(self):
        config = ScalarCriticConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        assert (config.tau, config.num_candidates, config.entropy_alpha, config.clip_param) == (0.05, 4, 0.01, 0.2)
        with pytest.raises(ValueError, match="num_candidates is 1 and must be at least 2"):
            config.copy(copy_frozen=False).training(num_candidates=1).validate()
        with pytest.raises(ValueError, match="tau is None"):
            config.copy(copy_frozen=False).training(tau=None).validate()
