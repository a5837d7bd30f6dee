"""The scalar critic: what it trains on and with which weight, worked out by hand; no engine, no Ray."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lone_algorithm import fake
from micro import build_learner, played, save_micro_model
from scripted_engine import ScriptedEngine

from rllib_nlac.baselines.scalar_critic import ScalarCritic, ScalarCriticConfig
from rllib_nlac.engine.chat import PromptTooLong, Wanted
from rllib_nlac.language.settings import Sampling
from rllib_nlac.learner.batch import CRITIC, POLICY
from rllib_nlac.replay.buffer import ReplaySample, transition_at
from rllib_nlac.types import Generation, Message, Seen, Weights


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
            i, share = s.item, float(sample.weights[s.item]) / len({o.item for o in made if o.minibatch == s.minibatch})
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
        a = self.algorithm(action_sampling=Sampling(24))
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
        a.chat, a.check_lessons = SimpleNamespace(prompts=list), lambda lessons: updated.update(lessons=len(lessons))
        a._prompted = lambda sample: ScalarCritic._prompted(a, sample)
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
        answers = ScalarCritic._generate(a, chat.prompts([Wanted(state, 24) for state in states]))
        assert [chat.decode(g.token_ids) for g in answers] == [str(i) for i in range(50)]
        asked = [request for _, request in engine.requests]
        assert [r.prompt_ids for r in asked] == [chat.prompt_ids(state) for state in states]
        assert {(r.max_tokens, r.temperature, r.top_p) for r in asked} == {(24, 0.7, 0.8)}
        assert {weights for weights, _ in engine.requests} == {Weights.POLICY} and len(engine.calls) == 1
        seeds = np.array([r.seed for r in asked])
        assert len(set(seeds.tolist())) == 50 and seeds.min() >= 0 and 2**28 < seeds.max() < 2**31

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
        a._with_learners = lambda call: call()
        actions = [self.action(-1.0), self.action(-1.0, -2.0)]
        assert ScalarCritic._q(a, actions, target=False) == [2.0, 3.0]
        assert ScalarCritic._q(a, actions, target=True) == [102.0, 103.0]
        assert len(called) == (0 if is_local else 2)
        assert ScalarCritic._q(a, [], target=True).shape == (0,)

    def test_what_exceeds_the_context_is_left_out(self, chat):
        """As after a restore with a smaller context. Fails where one such turn ends the run, or is taken for an end."""
        a = fake(action_sampling=Sampling(24, 0.7, 0.8))
        transitions = [transition_at("E", played([0.0, 0.0, 1.0]), t) for t in range(3)]
        sample = ReplaySample(transitions, np.array([1.0, 0.5, 0.25], np.float32), [7, 8, 9])
        long = PromptTooLong("too long")
        for lost, kept in ({0: [1, 2], 2: [0, 1], 3: [1, 2], 4: [0, 2]}).items():  # of three states and what follows two
            numbers = count()
            a.chat = SimpleNamespace(prompts=lambda all, n=numbers, lost=lost: [long if next(n) == lost else w for w in all])
            part, states, following = ScalarCritic._prompted(a, sample)
            assert part.transitions == [transitions[i] for i in kept] and part.nodes == [7 + i for i in kept]
            assert part.weights.tolist() == [float(sample.weights[i]) for i in kept]
            assert [s.messages for s in states] == [transitions[i].state for i in kept]
            assert [n is None for n in following] == [i == 2 for i in kept]
        for room, left in ((24, 3), (chat.max_context, 0)):  # a prompt must leave room for the action
            a.chat, a.config.action_sampling = chat, Sampling(room)
            assert len(ScalarCritic._prompted(a, sample)[1]) == left
        told = []
        a.collect, a.replay, a.check_lessons = list, (lambda episodes: sample), (lambda lessons: told.append(list(lessons)))
        a._prompted = lambda sample: ScalarCritic._prompted(a, sample)
        ScalarCritic.training_step(a)  # and neither asks nor learns
        assert told == [[]]

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
