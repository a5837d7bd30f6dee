"""NLQL (an ablation of arXiv 2512.04601): the language critic as in NLAC, but no refinement.

The policy proposes several actions, the critic judges each, and the best one by value is distilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.language import critique, refine
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import Answer, Ask, Stage, Variant
from rllib_nlac.nlac import NLAC, NLACConfig
from rllib_nlac.types import Critique, Future, Refinement, Seen, Transition, Weights


class NLQLConfig(NLACConfig):
    """Configures NLQL."""

    RANGES = {"num_candidates": ranges.Range(2, whole=True, why="the best of one teaches nothing")}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or NLQL)
        self.num_candidates = 4

    @override(AlgorithmConfig)
    def training(self, *, num_candidates: int | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets NLQL's own hyper-parameter beside NLAC's.

        Args:
            num_candidates: Actions of which the best is distilled.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)


class BestOfStages(LanguageStages):
    """The backup is NLAC's; the improvement chooses instead of correcting."""

    num_candidates = 4

    @override(LanguageStages)
    def improvement(
        self, transitions: Sequence[Transition], report: StageReport, futures: Sequence[tuple[Future, ...]] | None = None
    ) -> Stage[list[Refinement]]:
        settings, n, k = self.settings, self.num_candidates, self.settings.num_futures
        items = [(p, t) for p, t in zip(self._prompts(transitions), transitions, strict=True) for _ in range(n)]
        known = [Seen(t.generation.prompt_ids) for _, t in items]
        patterns = settings.action.patterns(t.action_form for _, t in items)
        answers = yield Ask("candidate", [t.state for _, t in items], settings.action, Weights.POLICY, known, patterns)
        actions = [refine.read_action(answer, settings.action_format) for answer in answers]
        judged = [
            critique.Judged(p, t.state, a[1] if a else None, a[0].seen if a else None)
            for (p, t), a in zip(items, actions, strict=True)
        ]
        predicted = yield from critique.future_stage("future", judged, settings.future, k, self.variant.future_weights, report)
        seen = self.variant.shown(predicted, self.rng)
        critiques = yield from critique.critique_stage("critique", judged, seen, settings, report)
        refinements = [
            choose(t, actions[part], seen[part], critiques[part], settings.action_format)
            for t, part in zip(transitions, (slice(i, i + n) for i in range(0, len(items), n)), strict=True)
        ]
        report.counts.update(f"refinement_{refinement.reason}" for refinement in refinements)
        return refinements


class Candidates(Variant):
    """New actions are judged, drawn by the stages."""

    judges_new_actions = True


class NLQL(NLAC):
    """NLAC with the best of several actions where NLAC refines one."""

    stages_class = BestOfStages
    variant = Candidates()

    @classmethod
    @override(NLAC)
    def get_default_config(cls) -> NLQLConfig:
        return NLQLConfig(algo_class=cls)

    @override(NLAC)
    def setup(self, config: Any) -> None:
        super().setup(config)
        assert isinstance(self.stages, BestOfStages)
        self.stages.num_candidates = self.config.num_candidates


def choose(
    transition: Transition,
    actions: Sequence[Answer | None],
    futures: Sequence[tuple[Future, ...]],
    critiques: Sequence[Critique | None],
    action_format: str = "plain",
) -> Refinement:
    """The candidate of the highest value; nothing is learned where all are worth the same."""
    judged = [i for i, (a, c) in enumerate(zip(actions, critiques, strict=True)) if a is not None and c is not None]
    if not judged:
        reason = "unparsed_critique" if any(actions) else "unparsed_action"
        return Refinement(transition, (), None, None, None, False, reason)
    values = {i: value_of(critiques[i], futures[i]) for i in judged}
    best = max(judged, key=values.__getitem__)
    answer = actions[best]
    assert answer is not None
    generation, action = answer
    kept = refine.is_same_action(action, transition.action, action_format)
    if min(values.values()) == max(values.values()):
        return Refinement(transition, futures[best], critiques[best], action, None, kept, "not_refined")
    return Refinement(transition, futures[best], critiques[best], action, generation, kept, "kept" if kept else "refined")


def value_of(judgement: Critique | None, futures: Sequence[Future]) -> float:
    """An order of critiques: the verdict first, then the share of predicted successes."""
    assert judgement is not None
    return 2.0 * judgement.optimal + sum(future.success for future in futures) / max(len(futures), 1)
