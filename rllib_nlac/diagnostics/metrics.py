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


@contextmanager
def stage(metrics: MetricsLogger, name: str, what: str, total: int = 0, unit: str = "") -> Iterator[None]:
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
        metrics.log_value((STAGES, wave, "time_s"), seconds, window=1)
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


def logprob_gap(
    learner_group: LearnerGroup, episodes: Sequence[SingleAgentEpisode], version: int, sampling: Sampling, generations: int = 8
) -> float:
    """Largest |log p_engine - log p_learner| over the tokens of a few turns that the current weights generated.

    NaN where there are none. It proves that the engine serves the weights of the last sync.

    Args:
        learner_group: Computes log p_learner.
        episodes: Episodes just collected.
        version: Version of the current weights.
        sampling: How the turns were sampled. Within a nucleus the engine's probabilities are larger, by a factor of 1 / top_p
            at most; only what lies beyond counts.
        generations: Number of turns that are compared.
    """
    current = _current(episodes, version, generations)
    if not current:
        return float("nan")
    prompts, answers = [g.prompt_ids for g in current], [g.token_ids for g in current]
    # Of greedy turns vLLM reports the probabilities at temperature 1, under the whole distribution.
    temperature, top_p = (sampling.temperature, sampling.top_p) if sampling.temperature else (1.0, 1.0)
    own = on_every_learner(learner_group, lambda learner: learner.logprobs_of(prompts, answers, temperature))[0]
    excess = np.concatenate([g.sampled_logprobs - mine for mine, g in zip(own, current, strict=True)])
    return float(np.maximum(-excess, excess + np.log(top_p)).max())


def kl_to_base(
    learner_group: LearnerGroup, episodes: Sequence[SingleAgentEpisode], version: int, sampling: Sampling, generations: int = 32
) -> float | None:
    """KL(π_θ || π_base) in nats a token, by the turns that the current weights generated; None where nobody knows the base.

    Args:
        learner_group: Computes both probabilities.
        episodes: Episodes just collected.
        version: Version of the current weights.
        sampling: How the turns were sampled.
        generations: Number of turns that are looked at.

    Source: the estimator k3, never negative, J. Schulman, "Approximating KL divergence", 2020.
    """
    current = _current(episodes, version, generations)
    if not current:
        return None
    prompts, answers = [g.prompt_ids for g in current], [g.token_ids for g in current]
    temperature = sampling.temperature or 1.0

    def both(learner: Any) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        if not learner.knows_base:
            return None
        return tuple(ask(prompts, answers, temperature) for ask in (learner.logprobs_of, learner.base_logprobs_of))  # type: ignore[return-value]

    found = on_every_learner(learner_group, both)[0]
    if found is None:
        return None
    ratio = np.concatenate(found[1]) - np.concatenate(found[0])
    return float(np.mean(np.expm1(ratio) - ratio))


def _current(episodes: Sequence[SingleAgentEpisode], version: int, count: int) -> list[Generation]:
    """A turn each of a few episodes, early and late ones, as far as the current weights generated them."""
    found = [
        turns[number % len(turns)] for number, episode in enumerate(episodes[:count]) if (turns := generations_of(episode))
    ]
    return [generation for generation in found if generation.weight_version == version and generation.token_ids]


def _share(items: Sequence, condition: Callable[[Any], bool]) -> float:
    return sum(map(condition, items)) / len(items) if items else float("nan")
