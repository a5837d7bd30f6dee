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

    Metrics (seconds):
        play: Playing episodes. Largest part: more `num_envs_per_env_runner` or `num_env_runners`.
        replay: Keeping and drawing transitions.
        waves, wave_1: The language stages, and each wave. For less: fewer `num_futures`, a lower `judged_fraction`, more
            `num_engines`.
        branches: Rollouts of NLRL and self-distillation from the middle of an episode (`rollouts_per_action`).
        logprob_gap: Comparing engine and learner.
        learner: Gradient steps.
        record: Writing what `rllib inspect` reads (`record`).
        sync, first_sync: Sending weights to the engines; the first one, before the iteration, is not part of its time.
        evaluation, evaluation_before, evaluation_critic: Evaluation, the one before training, and the part that asks the
            critic.
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
    """Verdicts, refinements, parse failures, tokens and time of the language stages.

    Metrics (language_stages):
        verdict_yes_rate: Share of critiques that say "Optimal: Yes". Near 1 nothing is refined, near 0 nothing is accepted:
            read critiques.
        predicted_success_rate: Share of judged transitions whose first future predicts success. Far above the true success
            rate, the critic overestimates; 0 where it has seen no success yet.
        target_success_rate: The same share of Bellman targets. Far from `predicted_success_rate`, the critic does not learn its
            targets (`num_epochs`) or they lag behind (`tau`).
        refinement_changed_rate: Share of judged actions that refinement changed. 0 from the start: the refine role repeats the
            action.
        policy_trained_rate: Share of judged transitions that teach the policy. Near 0 the rates of reasons below say why.
        refined_rate: Share whose refined action is learned. It falls as the policy learns.
        kept_rate: Share that was refined to the same action, which is learned unless `train_on_yes` is "never".
        yes_success_rate: Share with verdict yes and predicted success: the action itself is learned.
        yes_skipped_rate: Share with verdict yes and without predicted success: nothing is learned (`train_on_yes`).
        not_refined_rate: Share for which no refinement was asked (`num_refinements: 0`).
        rejected_rate: Share whose refined action was judged and not accepted; it counts `rejected_weight`.
        unparsed_future_rate, unparsed_critique_rate, unparsed_action_rate, unparsed_target_rate: Share of items dropped because
            that text did not parse.
        ROLE/unparsed_answer_rate: Share of a role's answers that do not parse; above 0.1, read one.
        ROLE/cut_off_rate: Share of a role's answers that do not parse because their token limit cut them off: raise it.
        num_prompt_too_long: Prompts that exceed the context (`max_context`, `history_turns`).
        num_unstructured: Answers without the form that the engine was asked to enforce (`structured_answers`).
        num_reasoning_rewritten, num_reasoning_emptied: Reasoning of thinking models that was rewritten, or emptied because it
            still quoted.
        prefix_cache_hit_rate, retokenised_prompts: The roles' prompts: share of their tokens in the prefix cache, and how many
            were encoded anew.
        num_engine_calls, num_generated_tokens: Cost of the stages.
        num_kept_answers, num_kept_tokens: Greedy answers to a prompt already answered in the same batch, which are reused, and
            their tokens.
        wave_1/tokens_per_s: Speed of a wave; its time is `seconds/wave_1`.
    """
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
    """Size, priorities, success and age of what was replayed; age in versions of the weights, which a log does not tell.

    Metrics (replay_buffer):
        num_transitions, num_episodes, num_bytes: Size of the buffer; it grows to `capacity`, or to `max_bytes`.
        priority_mean: Mean of p^α. It rises while the losses rise.
        importance_weight_mean: Mean of the weights that correct for priorities. Very small: a few transitions dominate; lower
            `alpha`.
        success_rate: Share of drawn turns from episodes that succeeded. Far below the share of such episodes: raise
            `success_share`.
        staleness_mean, staleness_max: Age of replayed turns in versions of the weights.
    """
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
    """How many syncs ago the weights were new that generated the turns just collected.

    Metrics (collection):
        staleness_mean, staleness_max: Age in syncs of the weights that played; at most `max_staleness`, and 0 on-policy.
    """
    ages = [version - g.weight_version for episode in episodes for g in generations_of(episode)]
    if ages:
        metrics.log_value((COLLECTION, "staleness_mean"), float(np.mean(ages)), window=1)
        metrics.log_value((COLLECTION, "staleness_max"), max(ages), window=1)


def log_faults(metrics: MetricsLogger, engine: Any, collector: Any, num_learner_restarts: int) -> None:
    """What was lost and made good since the run began, or went on; RLlib counts the EnvRunners under ``fault_tolerance``.

    Metrics (faults):
        num_engine_restarts, num_learner_restarts: Engines and learners that were lost and started again.
        num_lost_shares: Shares of episodes that other EnvRunners played because theirs was lost.
    """
    metrics.log_value((FAULTS, "num_engine_restarts"), engine.num_restarts, window=1)
    metrics.log_value((FAULTS, "num_lost_shares"), collector.num_lost_shares if collector else 0, window=1)
    metrics.log_value((FAULTS, "num_learner_restarts"), num_learner_restarts, window=1)


def log_sync(metrics: MetricsLogger, report: SyncReport) -> None:
    """Version, duration and size of a weight sync.

    Metrics (sync):
        weight_version: Version of the weights. Without a change nothing was learned.
        time_s, num_bytes: Duration and size of the last sync.
    """
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

    Metrics (top level):
        logprob_gap: Largest difference of a token's log-probability between engine and learner: 1e-6 in float32, some tenths in
            bfloat16. If it is larger or grows, the engine serves other weights: report it.
        kl_to_base: KL(policy, base) in nats a token, with `lora` or `kl_to_base_coeff`. The larger, the more is forgotten:
            lower `lr`.
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
