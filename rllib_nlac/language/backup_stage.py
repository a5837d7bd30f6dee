"""Stage 4 for a batch, as a generator: next actions, their futures, and the Bellman targets that rest on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.language import backup, critique, reasoning
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Answer, Ask, Stage, Variant
from rllib_nlac.types import BellmanTarget, Future, Generation, Transition, Weights


def backup_stage(
    transitions: Sequence[Transition],
    prompts: Sequence[PromptSet],
    settings: StageSettings,
    chat: Chat,
    report: StageReport,
    variant: Variant = NLAC_AS_IT_IS,
) -> Stage[list[BellmanTarget]]:
    """The Bellman target y of every transition. With n steps the last one's y comes first, and each earlier y uses the next."""
    if not variant.bootstraps:
        return _with_prompts(prompts, _observed(transitions, prompts, settings, chat), chat, report)
    chains = [(t, *t.following) for t in transitions]
    ends = [chain[-1] for chain in chains]
    next_actions, next_futures = yield from _continuation(transitions, ends, prompts, settings, chat, report, variant)

    later: list[Future | None] = list(next_futures)
    targets = [backup.read_target(t, None, None, None, p.forms.future) for t, p in zip(transitions, prompts, strict=True)]
    for depth in range(max(map(len, chains), default=0)):
        due = [i for i, chain in enumerate(chains) if len(chain) > depth]
        steps = [chains[i][-1 - depth] for i in due]
        forms = [prompts[i].forms.future for i in due]
        if settings.backup_by == "composed":
            texts = [backup.composed_target(s, later[i], f) for i, s, f in zip(due, steps, forms, strict=True)]
            answers: list[Answer | None] = [_unasked(text, settings, chat) for text in texts]
        else:
            answers = yield Ask(
                "target",
                [backup.target_prompt(prompts[i], step, later[i]) for i, step in zip(due, steps, strict=True)],
                settings.backup,
                settings.backup_weights,
                [step.seen for step in steps],
                settings.backup.patterns(forms),
            )
        for i, step, form, answer in zip(due, steps, forms, answers, strict=True):
            targets[i] = backup.read_target(step, answer, next_actions[i], next_futures[i], form)
            later[i] = targets[i].future
        report.note("target", answers, [targets[i].future for i in due], [transitions[i].id for i in due])
    if settings.reasoning is not None:
        thoughts = [reasoning.target_thought(p, target, chat) for p, target in zip(prompts, targets, strict=True)]
        generations = yield from reasoning.correction_stage(
            thoughts, settings.reasoning, settings.future.max_tokens, chat, report
        )
        targets = [replace(t, generation=g or t.generation) for t, g in zip(targets, generations, strict=True)]
    targets = _with_prompts(prompts, targets, chat, report)
    return targets


def _unasked(text: str | None, settings: StageSettings, chat: Chat) -> Answer | None:
    """A target that the package wrote, as if a model had."""
    if text is None:
        return None
    ids = chat.encode(text)
    weights = settings.backup_weights
    return Generation((), ids, np.zeros(0, np.float32), len(ids) <= settings.backup.max_tokens, 0, weights), text


def _observed(
    transitions: Sequence[Transition], prompts: Sequence[PromptSet], settings: StageSettings, chat: Chat
) -> list[BellmanTarget]:
    """Targets without a bootstrap, for which nobody is asked."""
    targets = []
    for transition, form in zip(transitions, (p.forms.future for p in prompts), strict=True):
        answer = _unasked(backup.observed_target(transition, form), settings, chat)
        targets.append(backup.read_target(transition, answer, None, None, form))
    return targets


def _with_prompts(
    prompts: Sequence[PromptSet], targets: Sequence[BellmanTarget], chat: Chat, report: StageReport
) -> list[BellmanTarget]:
    """Adds the ids of the prompts that targets are trained under: the predictions', which may be longer than the backups'.

    Where prompt and target together exceed the context, there is nothing to train on.
    """
    wanted = [
        Wanted(p.predict_messages(target.transition.state, target.transition.action), len(g.token_ids), target.transition.seen)
        for p, target in zip(prompts, targets, strict=True)
        if (g := target.generation) is not None
    ]
    made = iter(chat.prompts(wanted))
    finished = []
    for target in targets:
        prompt = next(made) if target.generation is not None else None
        if isinstance(prompt, PromptTooLong):
            report.counts["prompt_too_long"] += 1
            target = replace(target, generation=None)
        elif prompt is not None:
            target = replace(target, prompt_ids=prompt.ids)
        finished.append(target)
    return finished


def _continuation(
    transitions: Sequence[Transition],
    ends: Sequence[Transition],
    prompts: Sequence[PromptSet],
    settings: StageSettings,
    chat: Chat,
    report: StageReport,
    variant: Variant,
) -> Stage[tuple[list[str | None], list[Future | None]]]:
    """a' and d' after every transition. Of several a', the first one that the evaluator approves, or else the first."""
    count = settings.num_next_actions
    states = [(p, t) for p, t in zip(prompts, ends, strict=True) for _ in range(count)]
    answers = yield Ask(
        "next_action",
        [backup.next_action_prompt(t) for _, t in states],
        settings.action,
        Weights.POLICY,
        [t.next_seen for _, t in states],
        settings.action.patterns(t.next_action_form for _, t in states),
    )
    actions = [chat.said(answer[0]) if answer else None for answer in answers]  # as a turn that was played
    seen = [answer[0].seen if answer else None for answer in answers]
    answers = yield Ask(
        "next_future",
        [backup.next_future_prompt(p, t, a) for (p, t), a in zip(states, actions, strict=True)],
        settings.future,
        variant.next_future_weights,
        seen,
        settings.future.patterns(p.forms.future for p, _ in states),
    )
    futures = [critique.read_future(answer, p.forms.future) for answer, (p, _) in zip(answers, states, strict=True)]
    about = [t.id for t in transitions for _ in range(count)]
    report.note("future", answers, futures, about)
    if count == 1:
        return actions, futures
    judged = [
        critique.Judged(p, t.next_state, action, known, transition)
        for (p, t), action, known, transition in zip(states, actions, seen, about, strict=True)
    ]
    shown = [(d,) if d else () for d in futures]
    verdicts = yield from critique.critique_stage("next_critique", judged, shown, settings, report)
    chosen = []
    for start in range(0, len(states), count):
        known = [i for i in range(start, start + count) if futures[i]] or [start]
        chosen.append(next((i for i in known if (verdict := verdicts[i]) and verdict.optimal), known[0]))
    return [actions[i] for i in chosen], [futures[i] for i in chosen]
