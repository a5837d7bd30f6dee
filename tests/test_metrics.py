"""How far engine, policy and base are from each other, by the turns just played, against numbers worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from micro import played

from rllib_nlac.algorithm import metrics as metrics_module
from rllib_nlac.algorithm.metrics import kl_to_base, logprob_gap
from rllib_nlac.language.settings import Sampling


@pytest.mark.parametrize(
    ("sampling", "asked", "engine", "gap"),
    [
        (Sampling(8, 1.0), 1.0, [-1.0, -2.0], 0.0),
        (Sampling(8, 0.7), 0.7, [-1.0, -2.5], 0.5),
        (Sampling(8, 0.7), 0.7, [-0.75, -2.0], 0.25),
        (Sampling(8, 0.0, 0.5), 1.0, [-1.0, -1.5], 0.5),  # greedy: the nucleus is ignored
        (Sampling(8, 1.0, 0.5), 1.0, [-0.5, -2.0 + math.log(2)], 0.0),  # within the nucleus up to 1 / 0.5 times as likely
        (Sampling(8, 1.0, 0.5), 1.0, [-1.0, -2.0 + math.log(2) + 0.2], 0.2),
        (Sampling(8, 1.0, 0.5), 1.0, [-1.3, -2.0], 0.3),
    ],
)
def test_the_gap_between_engine_and_learner(monkeypatch, sampling, asked, engine, gap):
    episode = played([1.0], lengths=[2])
    (generation,) = episode.get_extra_model_outputs("generation")
    generation.logprobs[:] = engine
    seen = []

    def logprobs_of(prompts, answers, temperature):
        seen.append((prompts, answers, temperature))
        return [np.array([-1.0, -2.0])]

    monkeypatch.setattr(
        metrics_module, "on_every_learner", lambda group, function: [function(SimpleNamespace(logprobs_of=logprobs_of))]
    )
    assert logprob_gap(None, [episode], 3, sampling) == pytest.approx(max(gap, 0.0), abs=1e-6)
    assert seen == [([generation.prompt_ids], [generation.token_ids], asked)]
    assert math.isnan(logprob_gap(None, [episode], 4, sampling))  # of other weights


class TestKLToBase:
    @pytest.mark.parametrize(("sampling", "asked"), [(Sampling(8, 0.7), 0.7), (Sampling(8, 0.0), 1.0)])
    def test_is_estimated_by_k3_at_the_tokens_of_turns_that_the_present_weights_sampled(self, monkeypatch, sampling, asked):
        """q/p - 1 - log(q/p) for the present policy p and its base q: the other way round it would be another KL."""
        own, base, seen = [-1.0, -2.0], [-1.5, -0.5], []

        def asking(logprobs):
            return lambda prompts, answers, temperature: seen.append(temperature) or [np.array(logprobs)]

        learner = SimpleNamespace(knows_base=True, logprobs_of=asking(own), base_logprobs_of=asking(base))
        monkeypatch.setattr(metrics_module, "on_every_learner", lambda group, function: [function(learner)])
        episode = played([1.0], lengths=[2])
        expected = np.mean([math.exp(q - p) - 1 - (q - p) for p, q in zip(own, base, strict=True)])
        assert kl_to_base(None, [episode], 3, sampling) == pytest.approx(expected) and seen == [asked, asked]
        assert kl_to_base(None, [episode], 4, sampling) is None  # of other weights
        learner.knows_base = False
        assert kl_to_base(None, [episode], 3, sampling) is None

    def test_it_looks_at_early_and_late_turns(self, monkeypatch):
        """Fails where first turns speak for whole episodes: those have the shortest prompts, and nothing of what came."""
        asked: list = []
        learner = SimpleNamespace(
            knows_base=True,
            logprobs_of=lambda prompts, *_: asked.extend(prompts) or [np.zeros(2)],
            base_logprobs_of=lambda *_: [np.zeros(2)],
        )
        monkeypatch.setattr(metrics_module, "on_every_learner", lambda group, function: [function(learner)])
        kl_to_base(None, [played([0.0] * 3, task=task) for task in range(4)], 3, Sampling(8, 1.0))
        assert [len(prompt) for prompt in asked] == [3, 4, 5, 3]

    def test_its_mean_over_samples_is_the_kl(self, monkeypatch):
        p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
        ids = np.random.default_rng(0).choice(3, 200_000, p=p)
        learner = SimpleNamespace(
            knows_base=True, logprobs_of=lambda *_: [np.log(p[ids])], base_logprobs_of=lambda *_: [np.log(q[ids])]
        )
        monkeypatch.setattr(metrics_module, "on_every_learner", lambda group, function: [function(learner)])
        found = kl_to_base(None, [played([1.0], lengths=[2])], 3, Sampling(8, 1.0))
        assert found == pytest.approx(float((p * np.log(p / q)).sum()), rel=0.02)
