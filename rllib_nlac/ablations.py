"""Ablations of NLAC as algorithms of their own: ``run: NLAC_FrozenCritic``. Each is a row of the comparison.

What differs is a ``Variant`` of the language stages; configuration, learner and everything else are NLAC's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ray.rllib.utils.annotations import override

from rllib_nlac.language import refine
from rllib_nlac.language.critique import transcript
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.variant import Ask, Stage, Variant
from rllib_nlac.nlac import NLAC, NLACConfig
from rllib_nlac.types import Future, Seen, Transition, Weights

NOTHING_KNOWN = Future("FAILURE", success=False)


class Frozen(Variant):
    """The critic stays what it was: the initial weights predict, and the successor model is not trained."""

    future_weights = next_future_weights = Weights.INITIAL
    trains_critic = False


class Constant(Variant):
    """The evaluator reads the same failure of every action: what is left is distillation of its advice."""

    trains_critic = False

    @override(Variant)
    def shown(self, futures: Sequence[tuple[Future, ...]], rng: np.random.Generator) -> list[tuple[Future, ...]]:
        return [(NOTHING_KNOWN,)] * len(futures)


class WhatCame(Variant):
    """There is no successor model: the evaluator reads what the log says came of the stored action, and how it ended.

    Of a refined action nothing came, so it is not judged.
    """

    predicts = trains_critic = False

    @override(Variant)
    def known(self, transition: Transition) -> tuple[Future, ...]:
        return (transcript(transition),)


class Permuted(Variant):
    """The evaluator reads the futures of another transition of the batch."""

    unrefined_because = (
        "this algorithm exchanges futures within a batch, and of turns that are played it depends on the runners which are "
        "asked about together"
    )

    @override(Variant)
    def shown(self, futures: Sequence[tuple[Future, ...]], rng: np.random.Generator) -> list[tuple[Future, ...]]:
        known = [place for place, own in enumerate(futures) if own]  # who has none, or is not asked about, keeps it so
        exchanged = dict(zip(known, rng.permutation(known).tolist(), strict=True))
        return [futures[exchanged[place]] if place in exchanged else () for place in range(len(futures))]


class Observed(Variant):
    """The successor model learns the next reply, as a world model does, and nothing of what comes later."""

    bootstraps = False


class Fresh(Variant):
    """The current policy's own action in s is judged and refined instead of the stored one: one more wave of generation."""

    judges_new_actions = True

    @override(Variant)
    def judged(self, transitions: Sequence[Transition], settings: StageSettings) -> Stage[Sequence[Transition]]:
        seen = [Seen(t.generation.prompt_ids) for t in transitions]
        prompts, patterns = [t.state for t in transitions], settings.action.patterns(t.action_form for t in transitions)
        answers = yield Ask("fresh_action", prompts, settings.action, Weights.POLICY, seen, patterns)
        drawn = [refine.read_action(answer, settings.action_format) for answer in answers]
        return [replace(t, generation=new[0], action=new[1]) if new else t for t, new in zip(transitions, drawn, strict=True)]


class FrozenCritic(NLAC):
    """The critic stays what it was before training."""

    variant = Frozen()


class ConstantFutures(NLAC):
    """Distillation of the evaluator's advice, without a critic."""

    variant = Constant()


class PermutedFutures(NLAC):
    """The critique rests on another transition's futures."""

    variant = Permuted()


class Hindsight(NLAC):
    """The evaluator reads what really came instead of predictions: the next ``n_step`` replies (by default all) and the end."""

    variant = WhatCame()

    @classmethod
    @override(NLAC)
    def get_default_config(cls) -> NLACConfig:
        # Nothing is predicted, so there is nothing that evaluation could compare with how games end.
        return super().get_default_config().training(n_step=1000).evaluation(evaluation_critic={"states": 0, "fixed_states": 0})


class NextObservation(NLAC):
    """The critic is a world model of one step: its target is the real next reply, without a bootstrap."""

    variant = Observed()


class FreshActions(NLAC):
    """Today's actions are refined instead of the stored ones."""

    variant = Fresh()


ABLATIONS: dict[str, type[NLAC]] = {
    f"NLAC_{cls.__name__}": cls
    for cls in (
        FrozenCritic,
        ConstantFutures,
        PermutedFutures,
        Hindsight,
        NextObservation,
        FreshActions,
    )
}
