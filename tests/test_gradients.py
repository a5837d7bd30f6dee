"""Losses, batches and gradient steps against plain torch and numbers worked out by hand."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from micro import GRADIENT, VOCABULARY, build_learner, gradient_of, parameters_of, played, save_micro_model, update
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac import NLACConfig
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.learner.batch import (
    CRITIC,
    POLICY,
    TrainingSequence,
    into_minibatches,
    micro_batches,
    shard_evenly,
    to_multi_agent_batch,
    turn_sequences,
)
from rllib_nlac.learner.learner import SEQUENCE_LOSSES
from rllib_nlac.learner.losses import answer_logprobs, clipped_policy_loss, priorities
from rllib_nlac.learner.value_head import ValueHeadModel
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import ReplaySample, transition_at
from rllib_nlac.types import BellmanTarget, Generation, Refinement

TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def micro_model(tmp_path_factory) -> str:
    return save_micro_model(tmp_path_factory.mktemp("micro"))


@pytest.fixture()
def learner_of(micro_model):
    """A learner by the class of its configuration."""

    def learner_of(kind, **changes):
        return build_learner(kind(), language_model=micro_model, action_temperature=TEMPERATURE, **{**GRADIENT, **changes})

    return learner_of


def sequences_of_both_roles(count: int = 7, minibatch: int = 0, seed: int = 0) -> list[TrainingSequence]:
    """Sequences of different lengths, weights, scalars and behaviour log-probabilities."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt = tuple(int(x) for x in rng.integers(2, VOCABULARY, rng.integers(1, 9)))
        answer = tuple(int(x) for x in rng.integers(2, VOCABULARY, rng.integers(1, 6)))
        behaviour = rng.normal(-3.7, 0.4, len(answer)).astype(np.float32)
        weight, scalar = float(rng.uniform(0.05, 0.4)), float(rng.normal())
        made.append(TrainingSequence(prompt, answer, int(rng.integers(2)), i, minibatch, weight, scalar, behaviour))
    return made


class TestAnswerLogprobs:
    def test_the_temperature_divides_the_logits(self):
        logits, ids = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
        for temperature in (1.0, 0.5, 2.0):
            expected = torch.log_softmax(logits / temperature, -1).gather(-1, ids[..., None])[..., 0]
            torch.testing.assert_close(answer_logprobs(logits, ids, temperature), expected)
        torch.testing.assert_close(answer_logprobs(logits, ids), answer_logprobs(logits, ids, 1.0))

    def test_half_precision_is_computed_in_float32(self):
        logits = torch.full((1, 1, 4), 20.0, dtype=torch.bfloat16)
        assert answer_logprobs(logits, torch.zeros(1, 1, dtype=torch.long)).item() == pytest.approx(math.log(0.25), rel=1e-6)


class TestClippedLoss:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "gain", "has_gradient"),
        [
            (1.5, 1.0, 1.2, False),  # a good token that is likelier already: nothing to gain beyond 1 + ε
            (0.5, 1.0, 0.5, True),  # a good token that became rarer comes back
            (1.5, -1.0, -1.5, True),  # a bad token that became likelier goes back
            (0.5, -1.0, -0.8, False),  # a bad token that is rarer already: nothing to gain beyond 1 - ε
            (1.1, 2.0, 2.2, True),
            (0.9, -2.0, -1.8, True),
        ],
    )
    def test_it_clips_on_both_sides_and_only_where_there_is_nothing_more_to_gain(self, ratio, advantage, gain, has_gradient):
        logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
        loss = clipped_policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), 0.2)
        loss.sum().backward()
        assert loss.item() == pytest.approx(-gain)
        assert logprobs.grad.item() == pytest.approx(-gain if has_gradient else 0.0)

    @given(st.integers(1, 4), st.integers(1, 5), st.floats(0.05, 0.5), st.integers(0, 2**31))
    @settings(max_examples=60)
    def test_it_is_the_mean_over_an_answers_tokens_written_out(self, rows, width, clip, seed):
        generator = torch.Generator().manual_seed(seed)
        now, then = (torch.randn(rows, width, generator=generator) for _ in range(2))
        advantage = torch.randn(rows, generator=generator)
        mask = torch.rand(rows, width, generator=generator) < 0.6
        loss = clipped_policy_loss(now, then, advantage, mask, clip)
        for row in range(rows):
            gains = []
            for i in range(width):
                if mask[row, i]:
                    ratio, a = math.exp(now[row, i] - then[row, i]), advantage[row].item()
                    gains.append(min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a))
            assert loss[row].item() == pytest.approx(-sum(gains) / max(len(gains), 1), rel=1e-4, abs=1e-5)

    def test_at_the_behaviour_policy_it_is_the_policy_gradient(self):
        """Its gradient is -A/|a| Σ ∇ log π, whatever ε is."""
        logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
        clipped_policy_loss(logprobs, logprobs.detach(), torch.tensor([3.0]), torch.tensor([[1, 1, 0]]), 0.2).sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.5, -1.5, 0.0]]))


class TestPriorities:
    @given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=12))
    @settings(max_examples=40)
    def test_of_transitions_with_both_losses(self, losses):
        both = [critic + policy for critic, policy in losses]
        top = np.quantile(both, 0.95)
        result = priorities(*np.array(losses).T)
        np.testing.assert_allclose(result, [min(value, top) + 1e-3 for value in both], rtol=1e-9)


class TestBatch:
    def test_every_column(self):
        sequences = [
            TrainingSequence((3, 4), (5, 6, 7), POLICY, 8, 9, 0.25, -1.5, (-0.1, -0.2, -0.3)),
            TrainingSequence((3, 4, 5, 6), (7,), CRITIC, 2, 1, 0.5, 2.0),
        ]
        made = to_multi_agent_batch(sequences, env_steps=6)
        rows = made[DEFAULT_MODULE_ID]
        assert rows["ids"].tolist() == [[3, 4, 5, 6, 7], [3, 4, 5, 6, 7]] and made.env_steps() == 6
        assert rows["prompt_length"].tolist() == [2, 4] and rows["length"].tolist() == [5, 5]
        assert rows["role"].tolist() == [1, 0] and rows["item"].tolist() == [8, 2] and rows["minibatch"].tolist() == [9, 1]
        assert rows["weight"].tolist() == [0.25, 0.5] and rows["scalar"].tolist() == [-1.5, 2.0]
        np.testing.assert_allclose(rows["logprobs"], [[0, 0, -0.1, -0.2, -0.3], [0] * 5], rtol=1e-6)
        assert rows["ids"].dtype == np.int64 and {rows[n].dtype for n in ("weight", "scalar", "logprobs")} == {np.dtype("f4")}

    @given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=25), st.integers(1, 4))
    @settings(max_examples=80)
    def test_shares_of_learners(self, made, learners):
        sequences = [TrainingSequence((1,) * n, (2,), POLICY, i, step, 1.0 + i, 7.0) for i, (n, step) in enumerate(made)]
        even = shard_evenly(sequences, learners)
        size = len(even) // learners
        shares = [even[i * size : (i + 1) * size] for i in range(learners)]
        steps = {s.minibatch for s in sequences}
        for step in steps:
            members = [[s for s in share if s.minibatch == step] for share in shares]
            assert len({len(part) for part in members}) == 1
            # The long ones are dealt out like the short ones: nobody's n-th is longer than the next learner's, but for fillers.
            real = [[len(s.prompt_ids) for s in part if s.item >= 0] for part in members]
            assert all(part == sorted(part) for part in real)
            assert sum(s.minibatch == step for s in sequences) == sum(map(len, real))
        fillers = [s for s in even if s.item < 0]
        assert all(s.item == -1 and s.weight == 0.0 for s in fillers) and len(fillers) < learners * len(steps)
        assert sorted((s.item, s.weight) for s in even if s.item >= 0) == [(i, 1.0 + i) for i in range(len(made))]
        if learners == 1:
            assert not fillers

    def test_learners_get_long_and_short_sequences_alike(self):
        sequences = [TrainingSequence((1,) * n, (2,), POLICY, n, 0, 1.0) for n in (4, 1, 3, 2)]
        assert [s.item for s in shard_evenly(sequences, 2)] == [1, 3, 2, 4]

    @given(st.lists(st.floats(0.1, 5), min_size=1, max_size=30), st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
    @settings(max_examples=60)
    def test_minibatches_keep_the_weights_in_relation(self, weights, size, epochs, seed):
        sequences = [TrainingSequence((1,), (2,), POLICY, i, 0, w, 3.0) for i, w in enumerate(weights)]
        made = into_minibatches(sequences, size, epochs, np.random.default_rng(seed))
        each = -(-len(weights) // size)
        assert [s.minibatch for s in made] == sorted(s.minibatch for s in made)
        assert {s.minibatch for s in made} == set(range(each * epochs))
        for step in range(each * epochs):
            members = [s for s in made if s.minibatch == step]
            assert len(members) <= size and sum(s.weight for s in members) == pytest.approx(1.0)
            whole = sum(weights[s.item] for s in members)
            assert all(s.weight == pytest.approx(weights[s.item] / whole) and s.scalar == 3.0 for s in members)
        for epoch in range(epochs):
            items = [s.item for s in made if s.minibatch // each == epoch]
            assert sorted(items) == list(range(len(weights)))

    def test_each_epoch_has_an_order_of_its_own(self):
        sequences = [TrainingSequence((1,), (2,), POLICY, i, 0, 1.0) for i in range(40)]
        made = [s.item for s in into_minibatches(sequences, 8, 3, np.random.default_rng(0))]
        orders = [tuple(made[i : i + 40]) for i in (0, 40, 80)]
        assert len(set(orders)) == 3 and tuple(range(40)) not in orders

    def test_a_turn_weighs_as_many_tokens_as_it_has(self):
        """Together with the mean over a turn's tokens: the mean over the episode's, as GRPO has it."""
        sequences = turn_sequences(played([0.0, 0.0, 1.0, 0.0], lengths=[1, 4, 0, 3]), advantage=-0.7)
        assert [s.weight for s in sequences] == pytest.approx([1 / 8, 4 / 8, 3 / 8])
        assert [s.prompt_ids for s in sequences] == [(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6, 7)]
        assert [len(s.answer_ids) for s in sequences] == [1, 4, 3] and {s.scalar for s in sequences} == {-0.7}
        assert {(s.role, s.item, s.minibatch) for s in sequences} == {(POLICY, 0, 0)}
        np.testing.assert_allclose(sequences[1].logprobs, [-0.1, -0.2, -0.3, -0.4], rtol=1e-6)
        assert {s.scalar for s in turn_sequences(played([1.0]))} == {0.0}

    def test_micro_batches_are_as_few_as_the_budget_allows_and_begin_with_the_longest(self):
        lengths = torch.tensor([5, 2, 9, 4, 1, 5, 30])
        groups = [group.tolist() for group in micro_batches(lengths, torch.tensor([0, 1, 2, 3, 5, 6]), 10)]
        assert groups[:2] == [[6], [2]] and sorted(groups[2]) == [0, 5] and groups[3] == [3, 1] and len(groups) == 4


def forward(learner, s: TrainingSequence) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits of the answer's tokens and the head's value at the end, of one sequence without padding."""
    ids = torch.tensor([[*s.prompt_ids, *s.answer_ids]])
    out = learner.lm(input_ids=ids, output_hidden_states=True)
    head = getattr(learner.trained, "head", None)
    value = head(out.hidden_states[-1][0, -1]).squeeze(-1) if head is not None else None
    return out.logits[0, len(s.prompt_ids) - 1 : -1], value


def nll(learner, s: TrainingSequence) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(forward(learner, s)[0], torch.tensor(s.answer_ids))


def policy_gradient(learner, s: TrainingSequence) -> torch.Tensor:
    logprobs = (forward(learner, s)[0] / TEMPERATURE).log_softmax(-1)[range(len(s.answer_ids)), s.answer_ids]
    gains = []
    for now, then in zip(logprobs, s.logprobs, strict=True):
        ratio = (now - float(then)).exp()
        gains.append(torch.min(ratio * s.scalar, ratio.clamp(0.8, 1.2) * s.scalar))
    return -torch.stack(gains).mean()


def actor_critic(learner, s: TrainingSequence) -> torch.Tensor:
    return (forward(learner, s)[1] - s.scalar) ** 2 if s.role == CRITIC else policy_gradient(learner, s)


KINDS = [(NLACConfig, nll), (GRPOConfig, policy_gradient), (ScalarCriticConfig, actor_critic)]


def expected_gradient(learner, loss, sequences) -> torch.Tensor:
    """Gradient of Σ w · loss, sequence by sequence."""
    total = sum(s.weight * loss(learner, s) for s in sequences)
    gradients = torch.autograd.grad(total, list(learner.trained.parameters()), allow_unused=True)
    pairs = zip(gradients, learner.trained.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def assert_close(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.norm()) > 1e-3
    assert float((mine - expected).norm() / expected.norm()) < 2e-3


class TestGradient:
    @pytest.mark.parametrize("packing", ["auto", "never"])
    @pytest.mark.parametrize("budget", [1, 20, 10_000])
    @pytest.mark.parametrize(("kind", "loss"), KINDS, ids=lambda x: x.__name__)
    def test_it_is_that_of_the_weighted_sum_however_it_is_cut(self, learner_of, kind, loss, budget, packing):
        learner = learner_of(kind, max_tokens_per_micro_batch=budget, learner_model={"packing": packing})
        if hasattr(learner.trained, "head"):
            torch.nn.init.normal_(learner.trained.head.weight, std=0.3)
        sequences = sequences_of_both_roles()
        expected = expected_gradient(learner, loss, sequences)
        losses = [float(loss(learner, s)) for s in sequences]
        before = parameters_of(learner)
        results = update(learner, sequences)
        assert_close(before - parameters_of(learner), expected)
        assert float(results["gradient_norm"].peek()) == pytest.approx(float(expected.norm()), rel=1e-4)
        for role, name in ((CRITIC, "critic_loss"), (POLICY, "policy_loss")):
            own = [value for value, s in zip(losses, sequences, strict=True) if s.role == role]
            assert float(results[name].peek()) == pytest.approx(np.mean(own), rel=1e-3, abs=1e-5)
        table = np.concatenate(results[SEQUENCE_LOSSES].peek())
        np.testing.assert_allclose(table[:, 3], losses, rtol=1e-3, atol=1e-5)
        assert table[:, :2].tolist() == [[s.item, s.role] for s in sequences]

    @pytest.mark.parametrize("role", [CRITIC, POLICY])
    def test_a_minibatch_may_lack_a_role(self, learner_of, role):
        learner = learner_of(NLACConfig)
        sequences = [s for s in sequences_of_both_roles(9) if s.role == role]
        expected = expected_gradient(learner, nll, sequences)
        losses = np.mean([float(nll(learner, s)) for s in sequences])
        before = parameters_of(learner)
        results = update(learner, sequences)
        assert_close(before - parameters_of(learner), expected)
        names = {CRITIC: "critic_loss", POLICY: "policy_loss"}
        assert float(results[names[role]].peek()) == pytest.approx(losses, rel=1e-4)
        assert names[1 - role] not in results

    def test_a_filler_of_another_learners_share_changes_nothing(self, learner_of):
        plain, filled = learner_of(NLACConfig), learner_of(NLACConfig)
        sequences = sequences_of_both_roles(3)
        fillers = [s for s in shard_evenly(sequences, 5) if s.item < 0]
        assert len(fillers) == 2
        assert_close(gradient_of(filled, [*fillers, *sequences]), gradient_of(plain, sequences))
        results = update(filled, [*fillers, *sequences])
        assert np.concatenate(results[SEQUENCE_LOSSES].peek())[:, 0].tolist() == [0, 1, 2]

    @pytest.mark.parametrize("kind", [NLACConfig, ScalarCriticConfig])
    def test_a_learner_with_fewer_micro_batches_than_another_adds_empty_ones(self, learner_of, kind, monkeypatch):
        plain, waiting = learner_of(kind), learner_of(kind)
        forwards = []
        waiting.lm.register_forward_hook(lambda *_: forwards.append(1))
        monkeypatch.setattr(waiting.trainer, "most_of_any_learner", lambda count: count + 3)
        sequences = sequences_of_both_roles()
        assert_close(gradient_of(waiting, sequences), gradient_of(plain, sequences))
        assert len(forwards) == 4

    def test_each_minibatch_is_a_step_and_the_target_follows_each(self, learner_of):
        tau = 0.25
        parts = [sequences_of_both_roles(4, minibatch=i, seed=i) for i in range(3)]
        one_by_one, at_once = (learner_of(NLACConfig, tau=tau, lr=1e-2, optimizer={"eps": 1e-3}) for _ in range(2))
        average = parameters_of(one_by_one)
        for part in parts:
            update(one_by_one, part)
            average = (1 - tau) * average + tau * parameters_of(one_by_one)
        results = update(at_once, [s for part in parts for s in part])
        torch.testing.assert_close(parameters_of(at_once), parameters_of(one_by_one), rtol=1e-4, atol=1e-6)
        target = torch.cat([tensor.flatten() for tensor in at_once.target.state.values()])
        torch.testing.assert_close(target, average, rtol=1e-4, atol=1e-6)
        assert int(results["num_gradient_steps"].peek()) == 3
        assert int(results["num_tokens_trained"].peek()) == sum(
            len(s.prompt_ids) + len(s.answer_ids) for part in parts for s in part
        )

    def test_each_update_reports_its_own_means_and_sums(self, learner_of):
        """As they reach a run's result, which holds nothing of the updates before: fails with a running average."""
        learner, whole = learner_of(NLACConfig, lr=10.0), MetricsLogger(root=True)
        for i in range(3):
            part = sequences_of_both_roles(3 + i, seed=i)
            losses = {role: [float(nll(learner, s)) for s in part if s.role == role] for role in (CRITIC, POLICY)}
            norm = float(expected_gradient(learner, nll, part).norm())
            started = time.perf_counter()
            whole.aggregate([update(learner, part)])
            elapsed = time.perf_counter() - started
            results, tokens = whole.reduce(), sum(len(s.prompt_ids) + len(s.answer_ids) for s in part)
            assert float(results["critic_loss"]) == pytest.approx(np.mean(losses[CRITIC]), rel=1e-4)
            assert float(results["policy_loss"]) == pytest.approx(np.mean(losses[POLICY]), rel=1e-4)
            assert float(results["gradient_norm"]) == pytest.approx(norm, rel=1e-4)
            assert (results["num_tokens_trained"], results["num_gradient_steps"], results["num_stopped_steps"]) == (
                tokens,
                1,
                0,
            )
            assert 0 < tokens / float(results["tokens_per_s"]) <= elapsed

    def test_no_more_passes_are_made_than_there_are_micro_batches_and_none_keeps_a_cache(self, learner_of):
        """Keys and values of a cache would be held until the backward pass."""
        learner, outputs = learner_of(NLACConfig, max_tokens_per_micro_batch=20, learner_model={"packing": "never"}), []
        learner.lm.register_forward_hook(lambda module, given, output: outputs.append(output))
        sequences = sequences_of_both_roles()
        lengths = torch.tensor([len(s.prompt_ids) + len(s.answer_ids) for s in sequences])
        update(learner, sequences)
        assert len(outputs) == len(list(micro_batches(lengths, torch.arange(len(sequences)), 20))) > 1
        assert all(output.past_key_values is None for output in outputs)

    def test_the_gradient_is_clipped_as_a_whole(self, learner_of):
        free, clipped = learner_of(NLACConfig), learner_of(NLACConfig, grad_clip=0.01)
        sequences = sequences_of_both_roles()
        whole, cut = gradient_of(free, sequences), gradient_of(clipped, sequences)
        assert float(whole.norm()) > 0.1 and float(cut.norm()) == pytest.approx(0.01, rel=1e-2)
        assert float(torch.cosine_similarity(whole, cut, dim=0)) > 0.999


class TestLogprobsOf:
    def test_at_any_temperature(self, learner_of):
        learner = learner_of(GRPOConfig)
        sequences = sequences_of_both_roles(4)
        for temperature in (1.0, 0.5):
            made = learner.logprobs_of([s.prompt_ids for s in sequences], [s.answer_ids for s in sequences], temperature)
            for mine, s in zip(made, sequences, strict=True):
                logprobs = (forward(learner, s)[0] / temperature).log_softmax(-1)
                expected = logprobs[range(len(s.answer_ids)), s.answer_ids]
                np.testing.assert_allclose(mine, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


class TestSequencesOfNLAC:
    """Weights of the two losses, for a batch whose importance weights differ."""

    def algorithm(self, **changes):
        settings = {"minibatch_size": 3, "num_epochs": 1}
        config = SimpleNamespace(**{**settings, "policy_loss_coeff": 1.0, **changes})
        return SimpleNamespace(config=config, rng=np.random.default_rng(0), variant=NLAC_AS_IT_IS)

    def batch(self, with_target=(0, 1, 3, 4), with_action=(1, 2, 4), light=()):
        episode = played([0.0] * 6)
        transitions = [transition_at("E", episode, t) for t in range(5)]
        sample = ReplaySample(transitions, np.array([1.0, 0.5, 0.25, 0.8, 0.4], np.float32), [0] * 5)

        def text(i: int, wanted) -> Generation | None:
            return Generation((1,), (20 + i, 1), np.zeros(2), True, 0) if i in wanted else None

        targets = [BellmanTarget(t, text(i, with_target), None, None, None, (9, t.id)) for i, t in enumerate(transitions)]
        refinements = [
            Refinement(t, (), None, None, text(i, with_action), False, "refined", 0.5 if i in light else 1.0)
            for i, t in enumerate(transitions)
        ]
        return sample, targets, refinements

    def weights(self, sequences, role) -> dict[tuple[int, int], float]:
        return {(s.minibatch, s.item): s.weight for s in sequences if s.role == role}

    def test_each_loss_is_the_importance_weighted_mean_of_its_own_sequences(self):
        sequences = NLAC.sequences_of(self.algorithm(), *self.batch())
        # Minibatch 0 holds items 0-2, of which two have a target and two an action; minibatch 1 holds 3 and 4.
        assert self.weights(sequences, CRITIC) == pytest.approx(
            {(0, 0): 1.0 / 2, (0, 1): 0.5 / 2, (1, 3): 0.8 / 2, (1, 4): 0.4 / 2}
        )
        assert self.weights(sequences, POLICY) == pytest.approx({(0, 1): 0.5 / 2, (0, 2): 0.25 / 2, (1, 4): 0.4})

    def test_prompts_and_answers(self):
        sample, targets, refinements = self.batch()
        for s in NLAC.sequences_of(self.algorithm(), sample, targets, refinements):
            t = sample.transitions[s.item]
            assert s.answer_ids == (20 + s.item, 1)
            assert s.prompt_ids == ((9, t.id) if s.role == CRITIC else t.generation.prompt_ids)

    def test_light_refinements_and_coefficients(self):
        algorithm = self.algorithm(policy_loss_coeff=3.0)
        sequences = NLAC.sequences_of(algorithm, *self.batch(light=(1,)))
        assert self.weights(sequences, CRITIC)[0, 0] == pytest.approx(1.0 / 2)
        assert self.weights(sequences, POLICY) == pytest.approx(
            {(0, 1): 3 * 0.5 * 0.5 / 1.5, (0, 2): 3 * 0.25 / 1.5, (1, 4): 3 * 0.4}
        )

    def test_without_a_role_the_other_is_as_it_was(self):
        whole = NLAC.sequences_of(self.algorithm(), *self.batch())
        for role, nothing in ((CRITIC, {"with_action": ()}), (POLICY, {"with_target": ()})):
            left = NLAC.sequences_of(self.algorithm(), *self.batch(**nothing))
            assert {s.role for s in left} == {role}
            assert self.weights(left, role) == self.weights(whole, role)

    def test_epochs(self):
        sequences = NLAC.sequences_of(self.algorithm(num_epochs=3), *self.batch())
        for epoch in range(3):
            own = [s for s in sequences if s.minibatch // 2 == epoch]
            assert sorted(s.item for s in own if s.role == CRITIC) == [0, 1, 3, 4]
            assert sorted(s.item for s in own if s.role == POLICY) == [1, 2, 4]


class TestValueHead:
    def test_it_reads_the_last_hidden_state_where_it_is_told_to(self, micro_model):
        from transformers import AutoModelForCausalLM

        model = ValueHeadModel(AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32))
        ids = torch.tensor([[3, 4, 5, 6, 0, 0], [7, 8, 9, 10, 11, 12]])
        logits, values = model(ids, positions=torch.tensor([3, 4]))
        assert logits.shape == (2, 1, VOCABULARY) and values.tolist() == [0.0, 0.0]  # zero at the start
        torch.nn.init.normal_(model.head.weight)
        torch.nn.init.constant_(model.head.bias, 0.5)
        logits, values = model(ids, positions=torch.tensor([3, 4]), logits_to_keep=4)
        for row, end in ((0, 4), (1, 5)):
            out = model.lm(input_ids=ids[row : row + 1, :end], output_hidden_states=True)
            expected = out.hidden_states[-1][0, -1] @ model.head.weight[0] + 0.5
            assert values[row].item() == pytest.approx(expected.item(), abs=1e-5)
        torch.testing.assert_close(logits[1], model.lm(input_ids=ids[1:]).logits[0, 2:])
        assert values.dtype is torch.float32
