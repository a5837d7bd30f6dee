"""The critic's predictions for given actions, asked as in training, to measure how good they are."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_nlac.language.critique import Judged, future_stage
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.variant import Stage
from rllib_nlac.types import Future, Transition, Weights


def prediction_stage(
    transitions: Sequence[Transition], prompts: Sequence[PromptSet], sampling: Sampling, k: int, weights: Weights
) -> Stage[list[tuple[Future, ...]]]:
    """k futures of every transition's action, those that parse.

    Args:
        transitions: Whose actions.
        prompts: The prompt set of each.
        sampling: Sampling of the successor model.
        k: Futures of each.
        weights: Which weights predict.
    """
    judged = [Judged(p, t.state, t.action, t.seen) for p, t in zip(prompts, transitions, strict=True)]
    return (yield from future_stage("future", judged, sampling, k, weights))


def predicted_success(futures: Sequence[Future]) -> float | None:
    """Predicted chance of success: the share of futures that end in success; None without futures."""
    return sum(future.success for future in futures) / len(futures) if futures else None
