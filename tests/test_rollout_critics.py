"""Critics of real rollouts, NLRL's and self-distillation's: what they branch, what they train on, with which weight."""

from __future__ import annotations

import copy
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from lone_algorithm import fake
from micro import played

from rllib_nlac.baselines.nlrl import NLRL, NLRLConfig
from rllib_nlac.baselines.rollouts import RolloutCritic
from rllib_nlac.baselines.self_distillation import SelfDistillation
from rllib_nlac.episode import task_seed_of
from rllib_nlac.language.critique import transcript
from rllib_nlac.language.report import StageReport
from rllib_nlac.learner.batch import CRITIC, POLICY
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import BellmanTarget, Future, Generation, Refinement


class TestRolloutCritics:
    def algorithm(self, **config):
        a = fake(**{"policy_loss_coeff": 1.0, "rollouts_per_action": 3, "env": "E", **config})
        a._transition = lambda episode, t: RolloutCritic._transition(a, episode, t)
        a._sequences = lambda targets, refinements: RolloutCritic._sequences(a, targets, refinements)
        a.watch = SimpleNamespace(check_stages=lambda report: None)
        return a

    def texts(self):
        transitions = [transition_at("E", played([0.0, 0.0, 1.0]), t) for t in range(3)]
        answer = Generation((1,), (30, 31), np.zeros(2), True, 0)
        targets = [
            BellmanTarget(t, answer if i else None, None, None, None, (9, len(t.state)))
            for i, t in enumerate((*transitions, *transitions))
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
        refinement = Refinement(transition_at("E", goes_on[0], 0), (), None, None, None, False, "not_refined")
        a.stages = SimpleNamespace(improvement=improvement, drive=lambda report, stage: ([refinement],))
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
        a.stages = SimpleNamespace(improvement=lambda *_: None, drive=lambda *_: ([],))
        monkeypatch.setattr("rllib_nlac.baselines.rollouts.log_stages", lambda *_: None)
        RolloutCritic.training_sequences(a, [played([0.0] * 4) for _ in range(200)])
        assert sum(picked.values()) == 200
        shares = np.array([picked[n] for n in (1, 2, 3, 4)]) / 200
        assert np.abs(shares - 0.25).max() < 0.1

    def test_branches_are_played_by_the_runners_and_come_back_to_their_prefixes(self, monkeypatch):
        """Whatever the order in which they come; one that was lost is missing in its own place."""
        a, aggregated = self.algorithm(), []
        a.rng, a.env_runner_group = np.random.default_rng(0), "the runners of training"
        a.metrics = SimpleNamespace(aggregate=lambda given, key: aggregated.append((given, key)))
        asked: list[Start] = []

        def on_runners(algorithm, group, starts, work):
            assert (algorithm, group, work) == (a, "the runners of training", TextEnvRunner.play_forks)
            asked.extend(starts)
            return [played([0.0], name=s.name) for s in reversed(starts) if s.name != "b/2/0"], ["theirs"]

        monkeypatch.setattr("rllib_nlac.baselines.rollouts.on_runners", on_runners)
        prefixes = [(played([0.0] * 3, name=name), steps) for name, steps in (("a", 1), ("b", 2), ("c", 3))]
        branches = RolloutCritic.branch(a, prefixes, 2)
        assert [[b.id_ for b in own] for own in branches] == [["a/1/0", "a/1/1"], ["b/2/1"], ["c/3/0", "c/3/1"]]
        assert aggregated == [(["theirs"], "env_runners")]
        assert [s.prefix for s in asked] == [prefix for prefix in prefixes for _ in range(2)]
        assert [s.task_seed for s in asked] == [task_seed_of(episode) for episode, _ in prefixes for _ in range(2)]
        assert len({s.sampling_seed for s in asked}) == 6 and {s.role for s in asked} == {"branches"}

    def test_a_resumed_run_asks_with_the_seeds_that_it_would_have_asked_with(self):
        """They are drawn by the stages. Fails where a checkpoint leaves their random state out: it begins anew then."""
        a = self.algorithm()
        a.stages, a.rng = SimpleNamespace(rng=np.random.default_rng(3)), np.random.default_rng(4)
        a.weight_version, a.collector, a.env_runner, a._absent_runners = 1, None, None, {}
        a.stages.rng.integers(9, size=5)
        kept = copy.deepcopy(RolloutCritic.own_state(a))
        expected = a.stages.rng.integers(1 << 31, size=5).tolist()
        a.stages.rng = np.random.default_rng(3)  # as a new process has it
        RolloutCritic.set_own_state(a, kept)
        assert a.stages.rng.integers(1 << 31, size=5).tolist() == expected

    def test_needs_at_least_the_rollout_that_was_played(self):
        config = NLRLConfig().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
        assert config.rollouts_per_action == 4
        config.training(rollouts_per_action=1).validate()
        with pytest.raises(ValueError, match="rollouts_per_action is 0 and must be at least 1"):
            config.training(rollouts_per_action=0).validate()

    def test_where_that_one_is_enough_no_runner_is_asked(self):
        a = self.algorithm()
        a.rng = np.random.default_rng(0)
        assert RolloutCritic.branch(a, [(played([0.0], name=name), 1) for name in "ab"], 0) == [[], []]

    def test_nlrl_describes_every_rollout(self):
        a = self.algorithm()
        flat = []

        def backup(transitions, report):
            flat.extend(transitions)
            return transitions

        a.stages = SimpleNamespace(
            backup=backup, drive=lambda report, transitions: ([f"y{i}" for i in range(len(transitions))],)
        )
        groups = [[transition_at("E", played([0.0, 1.0]), t) for t in (0, 1)], [transition_at("E", played([0.0]), 0)]]
        assert NLRL.describe(a, groups, StageReport()) == [["y0", "y1"], ["y2"]] and flat == [*groups[0], *groups[1]]

    def test_self_distillation_shows_replies_and_generates_nothing(self):
        won, lost = (transition_at("E", played([0.0] * 3, success=s), 1, n_step=3) for s in (True, False))
        assert transcript(won) == Future("reply 1 reply 2 SUCCESS", True)
        assert transcript(lost) == Future("reply 1 reply 2 FAILURE", False)
        ((first, second),) = SelfDistillation.describe(None, [[won, lost]], StageReport())
        assert first.generation is None and first.transition is won and (first.next_action, first.next_future) == (None, None)
        assert first.future == transcript(won) and second.future == transcript(lost)
