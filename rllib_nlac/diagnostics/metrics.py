"""What a run reports beside RLlib's own metrics, all of it through RLlib's metrics logger.

``seconds`` is what this iteration took. RLlib's timers are moving averages, in which the slow first iteration stays for long.
Its entries stand on the page 'Reading a run'. What an iteration did not do is 0 or not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.activity import activity
from rllib_nlac.diagnostics.record import age
from rllib_nlac.episode import generations_of
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.replay.buffer import ReplaySample, TextReplayBuffer
from rllib_nlac.sync.sync import SyncReport
from rllib_nlac.types import BellmanTarget, Generation, Refinement

STAGES, REPLAY, SYNC, COLLECTION, FAULTS = "language_stages", "replay_buffer", "sync", "collection", "faults"
SECONDS = "seconds"
COMPARED_TURNS = 12  # that engine and learner are compared by


@contextmanager
def timed(metrics: MetricsLogger, name: str, what: str, total: int = 0, unit: str = "") -> Iterator[None]:
    """A part of an iteration: its seconds are reported, and the progress line says what is being done.

    Args:
        metrics: Where to report.
        name: Key of the seconds.
        what: Name of the part for a person.
        total: Number of units to be done; 0 where nobody counts them.
        unit: Name of a unit, such as "episodes".
    """
    started = time.perf_counter()
    try:
        with activity.stage(what, total, unit):
            yield
    finally:
        metrics.log_value((SECONDS, name), time.perf_counter() - started, reduce="sum")


def log_stages(
    metrics: MetricsLogger, report: StageReport, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]
) -> None:
    """Verdicts, refinements, parse failures, tokens and time of the language stages."""
    count = len(refinements) - sum(r.reason == "not_judged" for r in refinements)
    judged = [refinement for refinement in refinements if refinement.critique]
    predicted = [refinement for refinement in refinements if refinement.futures]
    if not report.backs_up:  # nothing was asked for
        targets = []
    rates = {
        "verdict_yes_rate": _share(judged, lambda r: r.critique.optimal),
        "predicted_success_rate": _share(predicted, lambda r: r.futures[0].success),
        "target_success_rate": _share([t for t in targets if t.future], lambda t: t.future.success),
        "refinement_changed_rate": sum(r.generation is not None and not r.kept for r in refinements) / count,
        "policy_trained_rate": sum(r.generation is not None for r in refinements) / count,
        **{
            f"{reason}_rate": report.counts[f"refinement_{reason}"] / count
            for reason in Refinement.REASONS
            if reason != "not_judged"
        },
        "unparsed_target_rate": _share(targets, lambda t: t.future is None),
        "prefix_cache_hit_rate": report.cached_tokens / max(report.prompt_tokens, 1),
    }
    for name, value in rates.items():
        metrics.log_value((STAGES, name), value, window=1)
    for name in ("prompt_too_long", "unstructured", "reasoning_rewritten", "reasoning_emptied"):
        metrics.log_value((STAGES, f"num_{name}"), report.counts[name], reduce="sum")
    metrics.log_value((STAGES, "retokenised_prompts"), report.counts["retokenised"], reduce="sum")
    metrics.log_value((STAGES, "num_engine_calls"), report.calls, reduce="sum")
    metrics.log_value((STAGES, "num_generated_tokens"), sum(report.tokens.values()), reduce="sum")
    metrics.log_value((STAGES, "num_kept_answers"), report.kept_answers, reduce="sum")
    metrics.log_value((STAGES, "num_kept_tokens"), report.kept_tokens, reduce="sum")
    for role, count in report.answered.items():
        metrics.log_value((STAGES, role, "unparsed_answer_rate"), report.unparsed[role] / count, window=1)
        metrics.log_value((STAGES, role, "cut_off_rate"), report.cut_off[role] / count, window=1)
    for wave, seconds in report.seconds.items():
        metrics.log_value((SECONDS, wave), seconds, reduce="sum")
        metrics.log_value((STAGES, wave, "tokens_per_s"), report.tokens[wave] / max(seconds, 1e-9), window=1)


def log_replay(metrics: MetricsLogger, buffer: TextReplayBuffer, sample: ReplaySample, version: int) -> None:
    """Size, priorities, success and age of what was replayed; age in versions of the weights, which a log does not tell."""
    ages = [born for t in sample.transitions if (born := age(t, version)) is not None]
    for name, value in {
        "num_transitions": buffer.get_num_timesteps(),
        "num_episodes": buffer.get_num_episodes(),
        "num_bytes": buffer.num_bytes,
        "priority_mean": buffer.mean_priority,
        "importance_weight_mean": float(sample.weights.mean()),
        "success_rate": float(np.mean([transition.episode_success for transition in sample.transitions])),
        **({"staleness_mean": float(np.mean(ages)), "staleness_max": float(np.max(ages))} if ages else {}),
    }.items():
        metrics.log_value((REPLAY, name), value, window=1)


def log_collection(metrics: MetricsLogger, episodes: Sequence[SingleAgentEpisode], version: int) -> None:
    """How many syncs ago the weights were new that generated the turns just collected."""
    ages = [version - g.weight_version for episode in episodes for g in generations_of(episode)]
    if ages:
        metrics.log_value((COLLECTION, "staleness_mean"), float(np.mean(ages)), window=1)
        metrics.log_value((COLLECTION, "staleness_max"), max(ages), window=1)


def log_faults(metrics: MetricsLogger, engine: Any, collector: Any, num_learner_restarts: int) -> None:
    """What was lost and made good since the run began, or went on; RLlib counts the EnvRunners under ``fault_tolerance``."""
    metrics.log_value((FAULTS, "num_engine_restarts"), engine.num_restarts, window=1)
    metrics.log_value((FAULTS, "num_lost_shares"), collector.num_lost_shares if collector else 0, window=1)
    metrics.log_value((FAULTS, "num_learner_restarts"), num_learner_restarts, window=1)


def log_sync(metrics: MetricsLogger, report: SyncReport) -> None:
    """Version, duration and size of a weight sync."""
    metrics.log_value((SYNC, "weight_version"), report.version, window=1)
    metrics.log_value((SYNC, "time_s"), report.seconds, window=1)
    metrics.log_value((SYNC, "num_bytes"), report.num_bytes, window=1)


def compare_with_learner(
    learner_group: LearnerGroup, episodes: Sequence[SingleAgentEpisode], version: int, sampling: Sampling
) -> tuple[float, float | None]:
    """What the learner thinks of a few turns that the current weights generated.

    Args:
        learner_group: Computes log p_learner and log p_base.
        episodes: Episodes just collected.
        version: Version of the current weights.
        sampling: How the turns were sampled. Within a nucleus the engine's probabilities are larger, by a factor of 1 / top_p
            at most; only what lies beyond counts.

    Returns:
        The largest |log p_engine - log p_learner| over their tokens, which proves that the engine serves the weights of the
        last sync; NaN without turns. And KL(π_θ || π_base) in nats a token; None where nobody knows the base.

    Source: the estimator k3, never negative, J. Schulman, "Approximating KL divergence", 2020.
    """
    current = _current(episodes, version, COMPARED_TURNS)
    if not current:
        return float("nan"), None
    prompts, answers = [g.prompt_ids for g in current], [g.token_ids for g in current]
    # Of greedy turns vLLM reports the probabilities at temperature 1, under the whole distribution.
    temperature, top_p = (sampling.temperature, sampling.top_p) if sampling.temperature else (1.0, 1.0)

    def asked(learner: Any) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        base = learner.base_logprobs_of(prompts, answers, temperature) if learner.knows_base else None
        return learner.logprobs_of(prompts, answers, temperature), base

    own, base = on_every_learner(learner_group, asked)[0]
    excess = np.concatenate([g.sampled_logprobs - mine for mine, g in zip(own, current, strict=True)])
    gap = float(np.maximum(-excess, excess + np.log(top_p)).max())
    if base is None:
        return gap, None
    ratio = np.concatenate(base) - np.concatenate(own)
    return gap, float(np.mean(np.expm1(ratio) - ratio))


def _current(episodes: Sequence[SingleAgentEpisode], version: int, count: int) -> list[Generation]:
    """A turn each of a few episodes, early and late ones, as far as the current weights generated them."""
    found = [
        turns[number % len(turns)] for number, episode in enumerate(episodes[:count]) if (turns := generations_of(episode))
    ]
    return [generation for generation in found if generation.weight_version == version and generation.token_ids]


def _share(items: Sequence, condition: Callable[[Any], bool]) -> float:
    return sum(map(condition, items)) / len(items) if items else float("nan")
