"""Losses, batches, target weights, and the DeepSpeed gradient step."""

from __future__ import annotations

import copy
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gradient_steps import SEQUENCES, update, weights_of, zero
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, micro_batches, shard_evenly, to_multi_agent_batch
from rllib_nlac.learner.learner import SEQUENCE_LOSSES, LanguageLearner
from rllib_nlac.learner.losses import answer_logprobs, priorities, refinement_loss, successor_loss
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.learner.target import TargetWeights
from rllib_nlac.types import Weights


class TestLosses:
    def test_logprobs_are_those_of_softmax(self):
        logits = torch.randn(2, 5, 11)
        ids = torch.randint(11, (2, 5))
        expected = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
        torch.testing.assert_close(answer_logprobs(logits, ids), expected)

    @pytest.mark.parametrize("loss", [successor_loss, refinement_loss])
    def test_mean_over_the_answers_tokens_alone(self, loss):
        logprobs = torch.tensor([[-9.0, -1.0, -3.0, -9.0], [-9.0, -9.0, -9.0, -5.0]])
        mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])
        assert loss(logprobs, mask).tolist() == [2.0, 5.0]

    def test_a_50_50_target_has_its_minimum_at_both_branches(self):
        """The order of the KL's arguments: the mean over sampled targets is least at the targets' own frequencies."""
        theta = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.Adam([theta], lr=0.1)
        for _ in range(400):
            logprobs = torch.log_softmax(theta, 0)[[0, 1]][:, None]
            optimizer.zero_grad()
            successor_loss(logprobs, torch.ones(2, 1)).mean().backward()
            optimizer.step()
        torch.testing.assert_close(torch.softmax(theta, 0)[:2], torch.tensor([0.5, 0.5]), atol=0.01, rtol=0)


class TestPriorities:
    def test_sum_clip_and_floor(self):
        critic, policy = np.arange(100.0), np.zeros(100)
        result = priorities(critic, policy)
        assert result[0] == pytest.approx(1e-3) and result.max() == pytest.approx(np.quantile(critic, 0.95) + 1e-3)

    def test_a_loss_that_is_not_known_counts_as_the_mean_of_those_that_are(self):
        nan = np.nan
        result = priorities(np.array([1.0, 2.0, nan, nan]), np.array([nan, 3.0, 5.0, nan]))
        both = np.array([1.0 + 4.0, 2.0 + 3.0, 1.5 + 5.0, 1.5 + 4.0])
        np.testing.assert_allclose(result, np.minimum(both, np.quantile(both, 0.95)) + 1e-3, rtol=1e-6)
        np.testing.assert_allclose(priorities(np.array([2.0]), np.array([nan])), 2.001)

    def test_where_none_is_known_all_stay_as_they_are(self):
        assert np.isnan(priorities(np.full(3, np.nan), np.full(3, np.nan))).all()


@settings(max_examples=80)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 1200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    lengths = torch.tensor(lengths)
    rows = torch.arange(len(lengths))
    groups = list(micro_batches(lengths, rows, budget))
    assert sorted(torch.cat(groups).tolist()) == rows.tolist()
    for group in groups:
        assert len(group) == 1 or int(lengths[group].max()) * len(group) <= budget


def test_batch_columns():
    rows = to_multi_agent_batch(SEQUENCES, env_steps=3)[DEFAULT_MODULE_ID]
    assert rows["ids"].shape == (4, 9) and rows["ids"][0].tolist() == [3, 10, 11, 12, 20, 21, 1, 0, 0]
    assert rows["prompt_length"].tolist() == [4, 2, 7, 3] and rows["length"].tolist() == [7, 7, 9, 5]


@pytest.mark.parametrize("learners", [1, 2, 3])
def test_each_learner_gets_equally_many_of_every_step(learners):
    sequences = [TrainingSequence((1,) * (i + 1), (2,), CRITIC, i, i % 2, 1.0 + i) for i in range(7)]
    even = shard_evenly(sequences, learners)
    size = len(even) // learners
    shares = [even[i * size : (i + 1) * size] for i in range(learners)]
    assert len(even) % learners == 0
    for step in (0, 1):
        assert len({sum(s.minibatch == step for s in share) for share in shares}) == 1
    assert sorted(s.item for s in even if s.item >= 0) == list(range(7))
    assert sum(s.weight for s in even) == sum(s.weight for s in sequences)


class TestTarget:
    def state(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([1.0, 2.0])}

    @pytest.mark.parametrize(("tau", "expected"), [(0.0, [1.0, 2.0]), (1.0, [5.0, 5.0]), (0.25, [2.0, 2.75])])
    def test_step(self, tau, expected):
        target = TargetWeights([self.state()], tau)
        target.update([{"w": torch.tensor([5.0, 5.0])}])
        assert target.state["w"].tolist() == expected

    def test_a_small_tau_is_not_lost_to_bfloat16(self):
        target = TargetWeights([{"w": torch.ones(1, dtype=torch.bfloat16)}], 1e-4)
        for _ in range(100):
            target.update([{"w": torch.full((1,), 2.0, dtype=torch.bfloat16)}])
        assert target.state["w"].item() == pytest.approx(2 - (1 - 1e-4) ** 100, abs=1e-5)

    def test_it_is_a_copy(self):
        state = self.state()
        target = TargetWeights([state], 0.0)
        state["w"] += 1
        assert target.state["w"].tolist() == [1.0, 2.0]

    @settings(max_examples=40)
    @given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4), st.integers(1, 5))
    def test_shares_of_several_learners_are_the_whole(self, shapes, num_shares):
        def weights() -> list[dict[str, torch.Tensor]]:
            return [{str(i): torch.randn(shape)} for i, shape in enumerate(shapes)]

        start, later = weights(), weights()
        targets = [TargetWeights(start, 0.3, num_shares, rank) for rank in range(num_shares)]
        for target in targets:
            target.update(later)
        largest = max(sum(share.numel() for share in target.state.values()) for target in targets)
        assert largest <= sum(-(-tensor.numel() // num_shares) for part in start for tensor in part.values())
        for before, after in zip(start, later, strict=True):
            for name, tensor in before.items():
                together = torch.cat([target.state[name].flatten() for target in targets])
                torch.testing.assert_close(together, torch.lerp(tensor, after[name], 0.3).flatten())

    @pytest.mark.parametrize("num_shares", [1, 2, 3, 5])
    def test_a_parameter_is_put_together_from_the_shares_of_all(self, num_shares, monkeypatch):
        weights = {"m": torch.randn(3, 5).to(torch.bfloat16), "n": torch.randn(()), "v": torch.randn(4)}
        targets = [TargetWeights([weights], 0.5, num_shares, rank) for rank in range(num_shares)]
        for name, tensor in weights.items():

            def all_gather(shares, own, name=name):
                assert len(shares) == num_shares > 1
                for share, target in zip(shares, targets, strict=True):
                    assert (share.shape, share.dtype) == (own.shape, weights[name].dtype) == (own.shape, own.dtype)
                    share.zero_()[: len(target.state[name])] = target.state[name]
                assert any(torch.equal(share, own) for share in shares)

            monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
            for target in targets:
                whole = target.whole(name, like=tensor)
                assert whole.dtype is tensor.dtype and whole.shape == tensor.shape and torch.equal(whole, tensor)


def assert_same_step(before: dict, mine: dict, expected: dict, tolerance: float = 1e-2) -> None:
    """Compares two steps from the same weights as whole vectors: Adam turns the rounding of a gradient near 0 into the
    sign of a full step, so single elements may differ."""
    difference = sum(((mine[name] - expected[name]) ** 2).sum() for name in before)
    step = sum(((expected[name] - before[name]) ** 2).sum() for name in before)
    assert float((difference / step) ** 0.5) < tolerance


def reference_loss(model, sequences) -> torch.Tensor:
    """Σ w · mean NLL of the answer, sequence by sequence without padding."""
    total = torch.zeros(())
    for s in sequences:
        ids = torch.tensor([[*s.prompt_ids, *s.answer_ids]])
        logits = model(input_ids=ids).logits[0, len(s.prompt_ids) - 1 : -1]
        total = total + s.weight * torch.nn.functional.cross_entropy(logits, ids[0, len(s.prompt_ids) :])
    return total


class TestGradientStep:
    @pytest.mark.parametrize("budget", [1, 16, 8192])
    def test_equals_a_plain_torch_step_however_it_is_cut(self, make_learner, budget):
        """Weighting, masking and accumulation: fails with a loss on prompt tokens or a mean over micro-batches."""
        learner = make_learner(max_tokens_per_micro_batch=budget, grad_clip=1.0)
        model, before = copy.deepcopy(learner.lm), weights_of(learner)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        reference_loss(model, SEQUENCES).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results = update(learner)
        assert float(results[DEFAULT_MODULE_ID]["gradient_norm"].peek()) == pytest.approx(float(norm), rel=1e-4)
        assert_same_step(before, weights_of(learner), served_state(model))

    def test_per_sequence_losses_come_back_in_order(self, make_learner):
        learner = make_learner()
        expected = [float(reference_loss(learner.lm, [s]).detach() / s.weight) for s in SEQUENCES]
        results = update(learner)[DEFAULT_MODULE_ID]
        table = np.concatenate(results[SEQUENCE_LOSSES].peek())
        whole = sum(s.weight * loss for s, loss in zip(SEQUENCES, expected, strict=True))
        assert float(results["total_loss"].peek()) == pytest.approx(whole, rel=1e-4)  # weighted, as the gradient's is
        assert table[:, 0].tolist() == [0, 0, 1, 2] and table[:, 1].tolist() == [CRITIC, POLICY, CRITIC, POLICY]
        assert table[:, 2].tolist() == [0] * 4
        np.testing.assert_allclose(table[:, 3], expected, rtol=1e-4)

    def test_the_speed_is_that_of_all_learners(self, make_learner):
        """Each logs it and RLlib takes the mean. Fails where each logs its own: four would seem as slow as one."""
        learner = make_learner()
        rows = to_multi_agent_batch(SEQUENCES, 3)[DEFAULT_MODULE_ID]
        rows = {name: torch.as_tensor(column) for name, column in rows.items()}
        count = len(rows["length"])
        learner.trainer = SimpleNamespace(world_size=4)
        learner._log(rows, torch.zeros(count), torch.ones(count), [1.0], seconds=2.0)
        tokens = sum(len(s.prompt_ids) + len(s.answer_ids) for s in SEQUENCES)
        assert float(learner.metrics.peek((DEFAULT_MODULE_ID, "tokens_per_s"))) == 4 * tokens / 2

    def test_each_minibatch_is_one_step(self, make_learner):
        sequences = [
            TrainingSequence(s.prompt_ids, s.answer_ids, s.role, s.item, i // 2, s.weight) for i, s in enumerate(SEQUENCES)
        ]
        results = update(make_learner(), sequences)
        assert int(results[DEFAULT_MODULE_ID]["num_gradient_steps"].peek()) == 2

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_zero_stages_agree(self, make_learner, stage):
        plain, sharded = make_learner(optimizer={"eps": 1e-3}), make_learner(optimizer={"eps": 1e-3}, **zero(stage))
        before = weights_of(plain)
        for _ in range(3):
            norms = [float(update(learner)[DEFAULT_MODULE_ID]["gradient_norm"].peek()) for learner in (plain, sharded)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        assert_same_step(before, weights_of(sharded), weights_of(plain), tolerance=1e-5)

    @pytest.mark.parametrize("stage", [0, 3])
    def test_gradient_checkpointing_runs_each_layer_twice_and_changes_nothing(self, make_learner, stage):
        plain, checkpointed = (
            make_learner(**zero(stage), optimizer={"eps": 1e-3}, learner_model={"gradient_checkpointing": on})
            for on in (False, True)
        )
        before, runs = weights_of(plain), []
        for learner in (plain, checkpointed):
            learner.lm.model.layers[0].register_forward_pre_hook(lambda layer, _: runs.append(layer))
            update(learner)
        once, twice = (runs.count(learner.lm.model.layers[0]) for learner in (plain, checkpointed))
        assert once > 0 and twice == 2 * once
        assert_same_step(before, weights_of(checkpointed), weights_of(plain), tolerance=1e-5)

    def test_gradient_checkpointing_brings_no_dropout(self, make_learner, model_path, tmp_path):
        """The engine has none, and its log-probabilities must be the learner's."""
        folder = tmp_path / "with_dropout"
        shutil.copytree(model_path, folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
        learner = make_learner(language_model=str(folder), learner_model={"gradient_checkpointing": True})
        first, second = (learner.logprobs_of([(3, 10, 11)], [(20, 21, 1)])[0] for _ in range(2))
        np.testing.assert_array_equal(first, second)

    @pytest.mark.parametrize("budget", [1, 8192])
    def test_what_both_weight_sets_say_of_texts(self, make_learner, budget):
        """By texts of different lengths in one batch, and one by one: as each model says it alone."""
        learner = make_learner(tau=0.5, max_tokens_per_micro_batch=budget)
        update(learner)
        texts = [((3, 10, 11), (20, 21, 1)), ((3, 10), (22, 1)), ((3, 10, 11, 12, 13, 14), (23, 24, 25, 26, 1))]
        found = learner.token_logprobs(*zip(*texts, strict=True))
        states = learner.export_weights()
        assert found.keys() == {Weights.POLICY, Weights.TARGET} == states.keys()
        model = copy.deepcopy(learner.lm)
        for which, state in states.items():
            model.load_state_dict(state, strict=False)
            for (prompt, answer), own in zip(texts, found[which], strict=True):
                ids = torch.tensor([[*prompt, *answer]])
                with torch.no_grad():
                    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                expected = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
                np.testing.assert_allclose(own, expected, atol=2e-5)
        gaps = [abs(one - other).max() for one, other in zip(*found.values(), strict=True)]
        assert min(gaps) > 1e-4  # each set speaks for itself

    def test_one_set_is_given_where_one_is_asked_for(self, make_learner):
        learner = make_learner(tau=0.5)
        assert learner.export_weights(of=(Weights.POLICY,)).keys() == {Weights.POLICY}

    def test_a_target_in_another_precision_is_not_asked(self, make_learner):
        learner = make_learner(tau=0.5, learner_model={"dtype": "bfloat16"})
        assert learner.token_logprobs([(3, 10)], [(20, 1)]).keys() == {Weights.POLICY}

    def test_nothing_stands_in_for_weights_that_zero_3_gathers(self, make_learner):
        """Fails where the target's do: DeepSpeed's hooks find plain tensors in the place of its own."""
        learner, texts = make_learner(tau=0.5, **zero(3)), ([(3, 10)], [(20, 1)])
        (found,) = learner.token_logprobs(*texts).items()
        (expected,) = make_learner(tau=0.0).token_logprobs(*texts)[Weights.POLICY]
        assert found[0] is Weights.POLICY
        np.testing.assert_allclose(found[1][0], expected, atol=1e-5)

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_in_bfloat16_small_steps_add_up(self, make_learner, stage):
        """In float32 master weights: in bfloat16 most of these steps are lost (cosine 0.18, a length of 0.27)."""
        moved: list[dict[Weights, torch.Tensor]] = []
        for dtype in ("float32", "bfloat16"):
            learner = make_learner(lr=2e-5, tau=0.1, learner_model={"dtype": dtype}, **zero(stage))
            before = learner.export_weights()
            assert {tensor.dtype for tensor in before[Weights.POLICY].values()} == {getattr(torch, dtype)}
            for _ in range(30):
                update(learner)
            after = learner.export_weights()
            moved.append(
                {
                    which: torch.cat([(after[which][n].float() - w.float()).flatten() for n, w in before[which].items()])
                    for which in before
                }
            )
        for which, expected in moved[0].items():
            assert torch.cosine_similarity(expected, moved[1][which], dim=0) > 0.7
            assert 0.8 < moved[1][which].norm() / expected.norm() < 1.3

    @pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
    def test_target_weights_follow(self, make_learner, tau):
        learner = make_learner(tau=tau)
        before = weights_of(learner)
        update(learner)
        after, target = learner.export_weights().values()
        for name in before:
            torch.testing.assert_close(target[name], torch.lerp(before[name], after[name], tau), atol=1e-6, rtol=1e-5)

    def test_learning_rate_schedule_of_rllib(self, make_learner):
        learner = make_learner(lr=[[0, 1e-3], [100, 0.0]])
        learner.update(batch=to_multi_agent_batch(SEQUENCES, 3), timesteps={"num_env_steps_sampled_lifetime": 50})
        assert learner.trainer.engine.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)

    def test_learning_rate_schedule_of_deepspeed(self, make_learner):
        warmup = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
        }
        learner = make_learner(deepspeed_config={"scheduler": warmup})
        rates = []
        for _ in range(4):
            update(learner)
            rates.append(learner.trainer.engine.optimizer.param_groups[0]["lr"])
        assert rates == sorted(rates) and rates[0] < rates[-1] <= 1e-3


def test_a_schedule_begins_with_its_first_rate():
    assert LanguageLearner._first_lr(2e-3) == LanguageLearner._first_lr([[0, 2e-3], [100, 1e-3]]) == 2e-3
