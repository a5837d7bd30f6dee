"""Where an ablation may do otherwise than NLAC. The stages call these hooks; what the hooks do here is NLAC itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.types import Future, Generation, Message, Seen, Transition, Weights

Answer = tuple[Generation, str]
Prompt = tuple[Message, ...] | None
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ask:
    """What one stage asks of the model in one wave.

    Attributes:
        role: What the answers are for.
        prompts: One that is None is not asked, and its answer is None.
        sampling: How they are answered.
        weights: By whom.
        seen: What an engine has seen of each prompt; None, or nothing at all, where that is not known.
        patterns: Regular expression that each answer must match; None, or nothing at all, where it is free.
    """

    role: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    weights: Weights
    seen: Sequence[Seen | None] = ()
    patterns: Sequence[str | None] = ()


Stage = Generator[Ask, list[Answer | None], Result]


class Variant:
    """NLAC's own choices.

    Attributes:
        future_weights: Which weights predict d.
        next_future_weights: Which weights predict d'.
        predicts: Whether there is a successor model. Without one nothing is backed up, and the evaluator reads ``known``.
        bootstraps: Whether a target rests on a prediction of what follows the next action. Otherwise it is the real reply
            alone, with success only where the episode ended with it.
        trains_critic: Whether the successor model is trained.
        judges_new_actions: Whether other actions than the stored ones are judged.
        unrefined_because: Why no turn can be refined before it is played; empty where it can.
    """

    future_weights = Weights.POLICY
    next_future_weights = Weights.TARGET
    predicts = True
    bootstraps = True
    trains_critic = True
    judges_new_actions = False
    unrefined_because = ""

    def judged(self, transitions: Sequence[Transition], settings: StageSettings) -> Stage[Sequence[Transition]]:
        """The transitions whose actions are judged and refined: the stored ones."""
        yield from ()
        return transitions

    def known(self, transition: Transition) -> tuple[Future, ...]:
        """What is known of a stored action's future without a successor model: nothing."""
        return ()

    def shown(self, futures: Sequence[tuple[Future, ...]], rng: np.random.Generator) -> list[tuple[Future, ...]]:
        """What the evaluator sees for each transition: its own futures."""
        return list(futures)


NLAC_AS_IT_IS = Variant()


def answered_by(settings: StageSettings, variant: Variant) -> dict[str, Weights]:
    """Which weights answer each role. A target that no model writes has none."""
    asked = settings.backup_by == "written" and variant.bootstraps
    return {
        "next_action": Weights.POLICY,
        "next_future": variant.next_future_weights,
        **({"target": settings.backup_weights} if asked else {}),
        "future": variant.future_weights,
        "critique": settings.judge_weights,
        "refinement": settings.judge_weights,
    }
