"""The KL of the policy to its base, of a whole model and of an adapter: its value, its gradient, and where it has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, to_multi_agent_batch
from rllib_nlac.learner.losses import answer_mean, token_kl


class TestKL:
    @given(st.lists(st.lists(st.floats(-5, 5), min_size=6, max_size=6), min_size=2, max_size=2))
    def test_it_is_what_the_definition_says(self, logits):
        own, base = torch.tensor(logits[0]), torch.tensor(logits[1])
        p, q = own.softmax(-1).double(), base.softmax(-1).double()
        expected = float((p * (p / q).log()).sum())
        both = torch.stack([own, base]), torch.stack([base, base])
        mask = torch.tensor([[1.0, 0.0]])
        found = answer_mean(token_kl(both[0][None], both[1][None]), mask)
        assert float(found) == pytest.approx(expected, abs=1e-4) and found.shape == (1,)

    @pytest.mark.parametrize("lora", [None, {"rank": 8}])
    def test_its_gradient_draws_the_policy_to_its_base(self, make_learner, lora):
        """Fails where the base is not the model as it was loaded, or critic sequences are drawn too."""
        distances = []
        for coefficient in (0.0, 20.0):
            learner = make_learner(lr=1e-3, kl_to_base_coeff=coefficient, lora=lora)
            assert learner.knows_base
            prompt, answer = [(3, 10, 11)], [(20, 21, 1)]
            base = learner.base_logprobs_of(prompt, answer)[0]
            np.testing.assert_allclose(learner.logprobs_of(prompt, answer)[0], base, atol=1e-6)
            warm = learner.base_logprobs_of(prompt, answer, 0.5)[0]
            np.testing.assert_allclose(learner.logprobs_of(prompt, answer, 0.5)[0], warm, atol=1e-6)
            assert warm.shape == (3,) and np.abs(warm - base).max() > 1e-3
            sequences = [TrainingSequence(prompt[0], answer[0], POLICY, 0, 0, 1.0)]
            for number in range(8):
                learner.update(batch=to_multi_agent_batch(sequences, 1), timesteps={"num_env_steps_sampled_lifetime": number})
            np.testing.assert_allclose(learner.base_logprobs_of(prompt, answer)[0], base, atol=1e-6)
            distances.append(float(np.abs(learner.logprobs_of(prompt, answer)[0] - base).sum()))
        assert distances[1] < 0.5 * distances[0]

    def test_a_critics_sequence_has_none(self, make_learner):
        """Fails where the critic is drawn to the base, which is to learn what the base does not know."""
        learner = make_learner(lr=1e-2, kl_to_base_coeff=1e3)
        both = [TrainingSequence((3, 10, 11), (20, 21, 1), role, role, 0, 1.0) for role in (CRITIC, POLICY)]
        learner.update(batch=to_multi_agent_batch(both, 2), timesteps={"num_env_steps_sampled_lifetime": 0})
        rows = {name: torch.as_tensor(column) for name, column in to_multi_agent_batch(both, 2)["default_policy"].items()}
        losses, kl = (each.detach().tolist() for each in learner._sequence_losses(rows))
        (logprobs,) = learner.logprobs_of([both[0].prompt_ids], [both[0].answer_ids])
        assert losses == pytest.approx([-logprobs.mean()] * 2, abs=1e-4) and kl[0] == 0 and kl[1] > 0.01

    def test_what_is_logged_is_the_loss_alone(self, make_learner):
        """Fails where the KL is part of what is logged as L2, and so of a turn's priority."""
        found = []
        for coefficient in (0.0, 1e3):
            learner = make_learner(lr=1e-2, kl_to_base_coeff=coefficient)
            rows = [TrainingSequence((3, 10, 11), (20, 21, 1), POLICY, 0, 0, 1.0)]
            for number in range(2):  # from the second step on the policy is no longer its base
                before = -learner.logprobs_of([rows[0].prompt_ids], [rows[0].answer_ids])[0].mean()
                results = learner.update(
                    batch=to_multi_agent_batch(rows, 1), timesteps={"num_env_steps_sampled_lifetime": number}
                )["default_policy"]
                found.append((results["policy_loss"].peek(), before))
        assert all(logged == pytest.approx(before, rel=1e-4) for logged, before in found)

    def test_without_a_coefficient_a_whole_model_keeps_no_copy(self, make_learner):
        assert not make_learner().knows_base
