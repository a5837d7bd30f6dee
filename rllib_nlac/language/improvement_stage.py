"""Stages 5 and 6 for a batch, as a generator: rounds of futures, critique and refinement of each transition's action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllib_nlac.engine.chat import Chat
from rllib_nlac.language import critique, reasoning, refine
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Ask, Stage, Variant
from rllib_nlac.types import Critique, Future, Refinement, Transition

Judgement = tuple[list[tuple[Future, ...]], list[Critique | None]]


def improvement_stage(
    transitions: Sequence[Transition],
    prompts: Sequence[PromptSet],
    settings: StageSettings,
    chat: Chat,
    report: StageReport,
    rng: np.random.Generator,
    futures: Sequence[tuple[Future, ...]] | None = None,
    variant: Variant = NLAC_AS_IT_IS,
) -> Stage[list[Refinement]]:
    """Critique and refinement of every transition's action, in up to m rounds, until the evaluator says yes.

    Args:
        transitions: The batch.
        prompts: The prompt set of each transition.
        settings: Sampling and decisions.
        chat: For the correction of reasoning.
        report: Counts what is lost.
        rng: For the ablation that permutes futures.
        futures: What the evaluator sees in the first round; None asks the successor model.
        variant: What an ablation does otherwise.
    """
    transitions = yield from variant.judged(transitions, settings)
    attempts = [refine.Attempt(t, p, t.action) for t, p in zip(transitions, prompts, strict=True)]
    for number in range(max(settings.num_refinements, 1)):
        seen, critiques = yield from _judge(attempts, settings, report, rng, variant, futures if number == 0 else None)
        for attempt, shown, judgement in zip(attempts, seen, critiques, strict=True):
            if number == 0:
                attempt.futures, attempt.critique = shown, judgement
            elif judgement and judgement.optimal:
                attempt.accepted = True
        if settings.num_refinements == 0:
            break
        yield from _refine(attempts, critiques, settings, report)
    if settings.rejected_weight < 1 and variant.predicts and any(attempt.refined for attempt in attempts):
        _, verdicts = yield from _judge(attempts, settings, report, rng, variant, verifies=True)
        for attempt, verdict in zip(attempts, verdicts, strict=True):
            attempt.rejected = attempt.open_action is not None and not (verdict and verdict.optimal)
    if settings.reasoning is not None:
        thoughts = [reasoning.action_thought(a.prompts, a.transition.state, a.refined, a.advice, chat) for a in attempts]
        limit = settings.action.max_tokens
        corrected = yield from reasoning.correction_stage(thoughts, settings.reasoning, limit, chat, report)
        for attempt, g in zip(attempts, corrected, strict=True):
            attempt.refined = (g, chat.said(g)) if g is not None else attempt.refined
    refinements = [refine.decide(a, settings, _is_well_formed(a.transition, chat, settings)) for a in attempts]
    report.counts.update(f"refinement_{refinement.reason}" for refinement in refinements)
    return refinements


def _is_well_formed(transition: Transition, chat: Chat, settings: StageSettings) -> bool:
    turn = chat.opened(transition.generation.prompt_ids, transition.action)
    return parse_action(turn, settings.action_format) is not None and not chat.invents_a_turn(transition.generation)


def _judge(
    attempts: Sequence[refine.Attempt],
    settings: StageSettings,
    report: StageReport,
    rng: np.random.Generator,
    variant: Variant,
    parsed: Sequence[tuple[Future, ...]] | None = None,
    verifies: bool = False,
) -> Stage[Judgement]:
    """Futures and critiques of the open actions; neither is asked for where there is none.

    Where it ``verifies``, the open actions are refined ones that nobody refines any more.
    """
    judged = [critique.Judged(a.prompts, a.transition.state, a.open_action, a.seen, a.transition.id) for a in attempts]
    if parsed is None and not variant.predicts:
        parsed = [() if a.refined else variant.known(a.transition) for a in attempts]
    if parsed is None:
        asks_for, k, weights = "verification" if verifies else "future", settings.num_futures, variant.future_weights
        parsed = yield from critique.future_stage(asks_for, judged, settings.future, k, weights, report)
    shown = variant.shown(parsed, rng)
    role = "verification" if verifies else "critique"
    return shown, (yield from critique.critique_stage(role, judged, shown, settings, report))


def _refine(
    attempts: Sequence[refine.Attempt], critiques: Sequence[Critique | None], settings: StageSettings, report: StageReport
) -> Stage[None]:
    """Asks for a better action where the verdict is no. If the answer does not parse, the action of the round before stays."""
    answers = yield Ask(
        "refinement",
        [
            refine.refine_prompt(a.prompts, a.transition.state, a.open_action, c) if a.open_action is not None else None
            for a, c in zip(attempts, critiques, strict=True)
        ],
        settings.refine,
        settings.judge_weights,
        [a.seen for a in attempts],
        settings.refine.patterns(a.transition.action_form for a in attempts),
    )
    new = [refine.read_action(answer, settings.action_format) for answer in answers]
    report.note("refinement", answers, new, [a.transition.id for a in attempts])
    for attempt, turn, judgement in zip(attempts, new, critiques, strict=True):
        if turn is not None:
            attempt.refined = turn
            attempt.advice = (*attempt.advice, judgement) if judgement else attempt.advice
        attempt.action = attempt.refined[1] if attempt.refined else None
