"""How far engine, policy and base are from each other, and what the stages report, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from micro import played
from numbered_episodes import episode as numbered
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from scripted_roles import transition

from rllib_nlac.diagnostics import metrics as metrics_module
from rllib_nlac.diagnostics.metrics import (
    COLLECTION,
    REPLAY,
    STAGES,
    compare_with_learner,
    log_collection,
    log_replay,
    log_stages,
)
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling
from rllib_nlac.types import BellmanTarget, Critique, Future, Generation, Refinement

TURN = Generation((1,), (2,), np.zeros(1, np.float32), True, 0)
YES, NO = Critique("c", True, "r", ""), Critique("c", False, "r", "f")


def refinement(reason: str, critique: Critique | None, generation: Generation | None, kept: bool, won=None) -> Refinement:
    """``won`` is what the first of two futures says; the second is always a success."""
    futures = () if won is None else (Future("first", won), Future("second", True))
    return Refinement(transition(), futures, critique, "a", generation, kept, reason)


class TestShares:
    def logged(self, report: StageReport) -> dict[str, float]:
        refinements = [
            refinement("yes_success", YES, TURN, kept=True, won=True),
            refinement("yes_skipped", YES, None, kept=True, won=True),
            refinement("kept", NO, TURN, kept=True, won=False),
            *[refinement("refined", NO, TURN, kept=False, won=False) for _ in range(3)],
            refinement("unparsed_critique", None, None, kept=False, won=False),
            refinement("not_judged", None, None, kept=False),
        ]
        targets = [
            BellmanTarget(transition(), TURN, Future("f", True), None, None),
            *[BellmanTarget(transition(), TURN, Future("f", False), None, None) for _ in range(2)],
            BellmanTarget(transition(), None, None, None, None),
        ]
        for each in refinements:
            report.counts[f"refinement_{each.reason}"] += 1
        metrics = MetricsLogger(root=True)
        log_stages(metrics, report, targets, refinements)
        return {name: value for name, value in metrics.peek(STAGES).items() if name.endswith("_rate")}

    def test_of_the_stages(self):
        """Shares of the seven that were judged; the eighth was not, and counts for nothing."""
        found = self.logged(StageReport(prompt_tokens=8, cached_tokens=2))
        assert found == pytest.approx(
            {
                "verdict_yes_rate": 2 / 6,  # one critique of the seven did not parse
                "predicted_success_rate": 2 / 7,
                "target_success_rate": 1 / 3,
                "unparsed_target_rate": 1 / 4,
                "refinement_changed_rate": 3 / 7,
                "policy_trained_rate": 5 / 7,
                "prefix_cache_hit_rate": 2 / 8,
                **{f"{reason}_rate": 0.0 for reason in Refinement.REASONS if reason != "not_judged"},
                **dict.fromkeys(("yes_success_rate", "yes_skipped_rate", "kept_rate", "unparsed_critique_rate"), 1 / 7),
                "refined_rate": 3 / 7,
            }
        )

    def test_where_no_targets_were_asked_for_there_is_no_share_of_them(self):
        found = self.logged(StageReport(backs_up=False))
        assert math.isnan(found["target_success_rate"]) and math.isnan(found["unparsed_target_rate"])

    def test_of_what_is_replayed(self):
        transitions = [
            replace(transition(n), episode_success=n == 0, generation=replace(TURN, weight_version=version), task_seed=seed)
            for n, (version, seed) in enumerate(((6, 3), (1, 0), (2, 7), (0, None)))  # of a log nobody knows the age
        ]
        buffer = SimpleNamespace(get_num_timesteps=lambda: 9, get_num_episodes=lambda: 2, num_bytes=70, mean_priority=0.5)
        sample = SimpleNamespace(transitions=transitions, weights=np.array([1.0, 0.5, 0.25, 0.25]))
        metrics = MetricsLogger(root=True)
        log_replay(metrics, buffer, sample, version=6)
        assert metrics.peek(REPLAY) == {
            "num_transitions": 9,
            "num_episodes": 2,
            "num_bytes": 70,
            "priority_mean": 0.5,
            "importance_weight_mean": 0.5,
            "success_rate": 1 / 4,
            "staleness_mean": 3.0,
            "staleness_max": 5.0,
        }

    def test_of_what_is_collected(self):
        """The number of such an episode is the version of the weights that played it."""
        metrics = MetricsLogger(root=True)
        log_collection(metrics, [numbered(4, 1), numbered(1, 4), numbered(4, 1)], version=6)
        assert metrics.peek(COLLECTION) == {"staleness_mean": 4.0, "staleness_max": 5}


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

    learner = SimpleNamespace(logprobs_of=logprobs_of, knows_base=False)
    monkeypatch.setattr(metrics_module, "on_every_learner", lambda group, function: [function(learner)])
    assert compare_with_learner(None, [episode], 3, sampling) == (pytest.approx(max(gap, 0.0), abs=1e-6), None)
    assert seen == [([generation.prompt_ids], [generation.token_ids], asked)]
    assert math.isnan(compare_with_learner(None, [episode], 4, sampling)[0])  # of other weights


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
        assert compare_with_learner(None, [episode], 3, sampling)[1] == pytest.approx(expected) and seen == [asked, asked]
        assert compare_with_learner(None, [episode], 4, sampling)[1] is None  # of other weights
        learner.knows_base = False
        assert compare_with_learner(None, [episode], 3, sampling)[1] is None

    def test_it_looks_at_early_and_late_turns(self, monkeypatch):
        """Fails where first turns speak for whole episodes: those have the shortest prompts, and nothing of what came."""
        asked: list = []
        learner = SimpleNamespace(
            knows_base=True,
            logprobs_of=lambda prompts, answers, _: asked.extend(prompts) or [np.zeros(len(ids)) for ids in answers],
            base_logprobs_of=lambda _, answers, __: [np.zeros(len(ids)) for ids in answers],
        )
        monkeypatch.setattr(metrics_module, "on_every_learner", lambda group, function: [function(learner)])
        compare_with_learner(None, [played([0.0] * 3, task=task) for task in range(4)], 3, Sampling(8, 1.0))
        assert [len(prompt) for prompt in asked] == [3, 4, 5, 3]

    def test_its_mean_over_samples_is_the_kl(self, monkeypatch):
        p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
        ids = np.random.default_rng(0).choice(3, 200_000, p=p)
        learner = SimpleNamespace(
            knows_base=True, logprobs_of=lambda *_: [np.log(p[ids])], base_logprobs_of=lambda *_: [np.log(q[ids])]
        )
        monkeypatch.setattr(metrics_module, "on_every_learner", lambda group, function: [function(learner)])
        _, found = compare_with_learner(None, [played([1.0], lengths=[len(ids)])], 3, Sampling(8, 1.0))
        assert found == pytest.approx(float((p * np.log(p / q)).sum()), rel=0.02)
