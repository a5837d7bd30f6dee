"""Stages 4 to 6 for a batch of transitions, in dependent waves of generation, each one full engine call:

    1  a' ~ π_θ(.|s')          d_1..d_k ~ M_θ(.|s, a)
    2  d' ~ M_θ̄(.|s', a')      critique ~ E(s, a, d_1..d_k)
    3  y ~ B_θ̄(s', r, d')      a_r ~ π_r(.|s, a, critique)

The two columns are two generators, ``backup_stage`` and ``improvement_stage``: each is read from top to bottom and yields
what it asks of the model, and ``LanguageStages.drive`` answers what several of them ask at the same time in one call.
More rounds of refinement (m > 1), longer backups (n > 1), several a', fresh actions and judged refined actions add waves.
Where the stored action is judged by its target ("backed_up"), the second generator starts when the first has ended.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_nlac.activity import ANSWERS, activity
from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.language import backup, critique, reasoning, refine
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Answer, Ask, Stage, Variant
from rllib_nlac.types import (
    BellmanTarget,
    Critique,
    Future,
    Generation,
    Message,
    Refinement,
    Request,
    Seen,
    Transition,
    Weights,
    hash_seed,
)

Judgement = tuple[list[tuple[Future, ...]], list[Critique | None]]


def backup_stage(
    transitions: Sequence[Transition],
    prompts: Sequence[PromptSet],
    settings: StageSettings,
    chat: Chat,
    report: StageReport,
    variant: Variant = NLAC_AS_IT_IS,
) -> Stage[list[BellmanTarget]]:
    """The Bellman target y of every transition. With n steps the last one's y comes first, and each earlier y uses the next."""
    chains = [(t, *t.following) for t in transitions]
    ends = [chain[-1] for chain in chains]
    next_actions, next_futures = yield from _continuation(transitions, ends, prompts, settings, report, variant)

    later: list[Future | None] = list(next_futures)
    targets: list[BellmanTarget] = [backup.read_target(t, None, None, None) for t in transitions]
    for depth in range(max(map(len, chains), default=0)):
        due = [i for i, chain in enumerate(chains) if len(chain) > depth]
        steps = [chains[i][-1 - depth] for i in due]
        answers = yield Ask(
            [backup.target_prompt(prompts[i], step, later[i]) for i, step in zip(due, steps, strict=True)],
            settings.backup,
            settings.backup_weights,
            [step.seen for step in steps],
        )
        for i, step, answer in zip(due, steps, answers, strict=True):
            targets[i] = backup.read_target(step, answer, next_actions[i], next_futures[i])
            later[i] = targets[i].future
        report.note("target", answers, [targets[i].future for i in due], [transitions[i].id for i in due])
    if settings.reasoning is not None:
        thoughts = [reasoning.target_thought(p, target, chat) for p, target in zip(prompts, targets, strict=True)]
        generations = yield from _corrected(thoughts, settings.reasoning, chat, report)
        targets = [replace(t, generation=g or t.generation) for t, g in zip(targets, generations, strict=True)]
    targets = _with_prompts(prompts, targets, chat, report)
    report.counts["unparsed_target"] += sum(target.generation is None for target in targets)
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
    report: StageReport,
    variant: Variant,
) -> Stage[tuple[list[str | None], list[Future | None]]]:
    """a' and d' after every transition. Of several a', the first one that the evaluator approves, or else the first."""
    count = settings.num_next_actions
    states = [(p, t) for p, t in zip(prompts, ends, strict=True) for _ in range(count)]
    answers = yield Ask(
        [backup.next_action_prompt(t) for _, t in states], settings.action, Weights.POLICY, [t.next_seen for _, t in states]
    )
    actions = [answer[1] if answer else None for answer in answers]
    seen = [answer[0].seen if answer else None for answer in answers]
    answers = yield Ask(
        [backup.next_future_prompt(p, t, a) for (p, t), a in zip(states, actions, strict=True)],
        settings.future,
        variant.next_future_weights,
        seen,
    )
    futures = [next(iter(critique.read_futures([answer])), None) for answer in answers]
    about = [t.id for t in transitions]
    report.note("future", answers, futures, about)
    if count == 1:
        return actions, futures
    verdicts = yield from _critiques(
        [p for p, _ in states],
        [t.next_state for _, t in states],
        actions,
        [(d,) if d else () for d in futures],
        seen,
        settings,
        report,
        about,
    )
    chosen = []
    for start in range(0, len(states), count):
        known = [i for i in range(start, start + count) if futures[i]] or [start]
        chosen.append(next((i for i in known if (verdict := verdicts[i]) and verdict.optimal), known[0]))
    return [actions[i] for i in chosen], [futures[i] for i in chosen]


def _critiques(
    prompts: Sequence[PromptSet],
    states: Sequence[tuple[Message, ...]],
    actions: Sequence[str | None],
    futures: Sequence[Sequence[Future]],
    seen: Sequence[Seen | None],
    settings: StageSettings,
    report: StageReport,
    about: Sequence[int],
) -> Stage[list[Critique | None]]:
    """What the evaluator says of each action, given its futures; None where there is no action or no future."""
    answers = yield Ask(
        [
            critique.evaluate_prompt(p, s, a, d) if a is not None else None
            for p, s, a, d in zip(prompts, states, actions, futures, strict=True)
        ],
        settings.critique,
        settings.judge_weights,
        seen,
    )
    critiques = [critique.read_critique(answer) for answer in answers]
    report.note("critique", answers, critiques, about)
    return critiques


@dataclass
class Attempt:
    """What becomes of one transition's action in the rounds of critique and refinement.

    Attributes:
        transition: The transition.
        prompts: Its environment's.
        action: What the next round judges: the transition's action, then the refined ones; None where none is left.
        accepted: Whether the evaluator said yes; then it is not asked again.
        futures: What the evaluator saw in the first round.
        critique: What it said then.
        refined: The last refined turn.
        advice: The critiques of all rounds behind it.
        imitated: Whether the stored action is learned as it is.
        rejected: Whether the evaluator judged the refined action and did not say yes.
    """

    transition: Transition
    prompts: PromptSet
    action: str | None
    accepted: bool = False
    futures: tuple[Future, ...] = ()
    critique: Critique | None = None
    refined: Answer | None = None
    advice: tuple[Critique, ...] = ()
    imitated: bool = False
    rejected: bool = False

    @property
    def open_action(self) -> str | None:
        """The action that is still to be judged or refined."""
        return None if self.accepted else self.action

    @property
    def seen(self) -> Seen:
        """The state, and the action that is judged or refined, as they were sampled."""
        turn = self.refined[0] if self.refined else self.transition.generation
        return Seen(self.transition.generation.prompt_ids, turn.token_ids)


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
    attempts = [Attempt(t, p, t.action) for t, p in zip(transitions, prompts, strict=True)]
    for number in range(max(settings.num_refinements, 1)):
        seen, critiques = yield from _judge(attempts, settings, report, rng, variant, futures if number == 0 else None)
        for attempt, shown, judgement in zip(attempts, seen, critiques, strict=True):
            if number == 0:
                attempt.futures, attempt.critique = shown, judgement
                attempt.accepted = attempt.imitated = variant.imitates(attempt.transition, shown)
            elif judgement and judgement.optimal:
                attempt.accepted = True
        if settings.num_refinements == 0:
            break
        yield from _refine(attempts, critiques, settings, report)
    if settings.rejected_weight < 1 and any(attempt.refined for attempt in attempts):
        _, verdicts = yield from _judge(attempts, settings, report, rng, variant)
        for attempt, verdict in zip(attempts, verdicts, strict=True):
            attempt.rejected = attempt.open_action is not None and not (verdict and verdict.optimal)
    if settings.reasoning is not None:
        thoughts = [reasoning.action_thought(a.prompts, a.transition.state, a.refined, a.advice, chat) for a in attempts]
        for attempt, g in zip(attempts, (yield from _corrected(thoughts, settings.reasoning, chat, report)), strict=True):
            attempt.refined = (g, chat.decode(g.token_ids)) if g is not None else attempt.refined
    refinements = [
        refine.decide(
            a.transition,
            a.futures,
            a.critique,
            a.refined,
            settings.train_on_yes,
            asked=settings.num_refinements > 0,
            rejected=a.rejected,
            rejected_weight=settings.rejected_weight,
            imitated=a.imitated,
        )
        for a in attempts
    ]
    report.counts.update(f"refinement_{refinement.reason}" for refinement in refinements)
    return refinements


def _judge(
    attempts: Sequence[Attempt],
    settings: StageSettings,
    report: StageReport,
    rng: np.random.Generator,
    variant: Variant,
    parsed: Sequence[tuple[Future, ...]] | None = None,
) -> Stage[Judgement]:
    """Futures and critiques of the open actions; neither is asked for where there is none."""
    k = settings.num_futures
    if parsed is None:
        answers = yield Ask(
            [
                critique.future_prompt(a.prompts, a.transition.state, a.open_action) if a.open_action is not None else None
                for a in attempts
                for _ in range(k)
            ],
            settings.future,
            variant.future_weights,
            [a.seen for a in attempts for _ in range(k)],
        )
        parsed = [critique.read_futures(answers[i * k : (i + 1) * k]) for i in range(len(attempts))]
        each = [next(iter(critique.read_futures([answer])), None) for answer in answers]
        report.note("future", answers, each, [a.transition.id for a in attempts])
        asked = sum(a.open_action is not None for a in attempts)
        report.counts["unparsed_future"] += k * asked - sum(map(len, parsed))
    shown = variant.shown(parsed, rng)
    states = [a.transition.state for a in attempts]
    actions, turns = [a.open_action for a in attempts], [a.seen for a in attempts]
    prompts, about = [a.prompts for a in attempts], [a.transition.id for a in attempts]
    return shown, (yield from _critiques(prompts, states, actions, shown, turns, settings, report, about))


def _refine(
    attempts: Sequence[Attempt], critiques: Sequence[Critique | None], settings: StageSettings, report: StageReport
) -> Stage[None]:
    """Asks for a better action where the verdict is no. If the answer does not parse, the action of the round before stays."""
    answers = yield Ask(
        [
            refine.refine_prompt(a.prompts, a.transition.state, a.open_action, c) if a.open_action is not None else None
            for a, c in zip(attempts, critiques, strict=True)
        ],
        settings.refine,
        settings.judge_weights,
        [a.seen for a in attempts],
    )
    new = [refine.read_action(answer, settings.action_format) for answer in answers]
    report.note("refinement", answers, new, [a.transition.id for a in attempts])
    for attempt, turn, judgement in zip(attempts, new, critiques, strict=True):
        if turn is not None:
            attempt.refined = turn
            attempt.advice = (*attempt.advice, judgement) if judgement else attempt.advice
        attempt.action = attempt.refined[1] if attempt.refined else None


def _corrected(
    thoughts: Sequence[reasoning.Thought | None], sampling: Sampling, chat: Chat, report: StageReport
) -> Stage[list[Generation | None]]:
    """Each generation with its reasoning rewritten, or emptied if it still leaks; None where there is no reasoning."""
    if not any(thoughts):
        return [None] * len(thoughts)
    prompts, seen = [t.prompt if t else None for t in thoughts], [t.seen if t else None for t in thoughts]
    answers = yield Ask(prompts, sampling, Weights.TARGET, seen)
    generations: list[Generation | None] = []
    for thought, answer in zip(thoughts, answers, strict=True):
        if thought is None:
            generations.append(None)
            continue
        rewritten = reasoning.accepted(thought, answer, chat)
        report.counts["reasoning_rewritten" if rewritten else "reasoning_emptied"] += 1
        generations.append(reasoning.with_reasoning(thought, rewritten, chat))
    return generations


class LanguageStages:
    """Runs the waves on an engine.

    Args:
        engine: Holds the policy's and the target's weights.
        chat: Turns messages into tokens and back.
        prompts_for: The prompt set of an environment, by its registered name: that which a transition was really played in.
        settings: Sampling and decisions.
        seed: Seeds every request, so that equal weights and transitions give equal texts.
        variant: What an ablation does otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        prompts_for: Callable[[str], PromptSet],
        settings: StageSettings,
        seed: int = 0,
        variant: Variant = NLAC_AS_IT_IS,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.prompts_for = prompts_for
        self.settings = settings
        self.rng = np.random.default_rng(seed)
        self.variant = variant

    def run(self, transitions: Sequence[Transition]) -> tuple[list[BellmanTarget], list[Refinement], StageReport]:
        """Bellman targets and refinements of a batch, in its order.

        Args:
            transitions: The batch; one that occurs more than once has one target, and a refinement of its own each time.
        """
        report = StageReport()
        distinct = list({t.id: t for t in transitions}.values())
        share = self.settings.judged_fraction  # spread evenly, so that every minibatch has its part
        judged = [math.ceil((i + 1) * share) > math.ceil(i * share) for i in range(len(transitions))]
        chosen = list(itertools.compress(transitions, judged))
        if self.settings.critic_input == "backed_up":
            (new,) = self.drive(report, self.backup(distinct, report))
            targets = _of_each(transitions, new)
            known = [(y.future,) if y.future else () for y in itertools.compress(targets, judged)]
            (refined,) = self.drive(report, self.improvement(chosen, report, known))
        else:
            new, refined = self.drive(report, self.backup(distinct, report), self.improvement(chosen, report))
            targets = _of_each(transitions, new)
        rest = iter(refined)
        refinements = [
            next(rest) if is_judged else Refinement(t, (), None, None, None, False, "not_judged")
            for t, is_judged in zip(transitions, judged, strict=True)
        ]
        return targets, refinements, report

    def backup(self, transitions: Sequence[Transition], report: StageReport) -> Stage[list[BellmanTarget]]:
        """``backup_stage`` with these settings."""
        return backup_stage(transitions, self._prompts(transitions), self.settings, self.chat, report, self.variant)

    def improvement(
        self, transitions: Sequence[Transition], report: StageReport, futures: Sequence[tuple[Future, ...]] | None = None
    ) -> Stage[list[Refinement]]:
        """``improvement_stage`` with these settings."""
        prompts = self._prompts(transitions)
        return improvement_stage(transitions, prompts, self.settings, self.chat, report, self.rng, futures, self.variant)

    @property
    def answered_by(self) -> dict[str, Weights]:
        """Which weights answer each role."""
        return {
            "next_action": Weights.POLICY,
            "next_future": self.variant.next_future_weights,
            "target": self.settings.backup_weights,
            "future": self.variant.future_weights,
            "critique": self.settings.judge_weights,
            "refinement": self.settings.judge_weights,
        }

    def predict_ids(self, transition: Transition) -> tuple[int, ...]:
        """Prompt of M(.|s, a), under which the successor model is trained."""
        messages = self.prompts_for(transition.env).predict_messages(transition.state, transition.action)
        (prompt,) = self.chat.prompts([Wanted(messages, seen=transition.seen)])
        if isinstance(prompt, PromptTooLong):
            raise prompt
        return prompt.ids

    def drive(self, report: StageReport, *stages: Stage, seeds: Sequence[int] | None = None) -> list[Any]:
        """Runs stages side by side to their ends: what they ask in the same wave goes to the engine together.

        Args:
            report: Counts what the waves cost and lost.
            stages: The stages.
            seeds: One for each item of the batch, from which all requests about it get theirs, so that they do not depend on
                the others of the batch; None draws them one after the other.
        """
        results: list[Any] = [None] * len(stages)
        asked: dict[int, Ask] = {}

        def advance(place: int, answers: list[Answer | None] | None) -> None:
            try:
                asked[place] = stages[place].send(answers)  # type: ignore[arg-type]
            except StopIteration as end:
                results[place] = end.value
                asked.pop(place, None)

        for place in range(len(stages)):
            advance(place, None)
        while asked:
            places = list(asked)
            for place, answers in zip(places, self._wave(report, [asked[p] for p in places], seeds), strict=True):
                advance(place, answers)
        return results

    def _prompts(self, transitions: Sequence[Transition]) -> list[PromptSet]:
        return [self.prompts_for(transition.env) for transition in transitions]

    def _wave(
        self, report: StageReport, asks: Sequence[Ask], item_seeds: Sequence[int] | None = None
    ) -> list[list[Answer | None]]:
        """Answers every prompt that is not None, in one call of the engine; each request names its weights."""
        number = len(report.seconds) + 1
        started, name = time.perf_counter(), f"wave_{number}"
        answers: list[list[Answer | None]] = [[None] * len(ask.prompts) for ask in asks]
        places = [
            (part, place)
            for weights in sorted({ask.weights for ask in asks})
            for part, ask in enumerate(asks)
            for place, prompt in enumerate(ask.prompts if ask.weights is weights else ())
            if prompt is not None
        ]
        made = self.chat.prompts([_wanted(asks[part], place) for part, place in places])
        requests: list[Request] = []
        asked: list[tuple[int, int]] = []
        for (part, place), prompt in zip(places, made, strict=True):
            if isinstance(prompt, PromptTooLong):
                report.counts["prompt_too_long"] += 1
                continue
            report.counts["retokenised"] += prompt.retokenised
            if item_seeds is None:
                seed = int(self.rng.integers(1 << 31))
            else:  # a stage asks equally many prompts, k futures for example, of each of its items in turn
                item, place_of_item = divmod(place, len(asks[part].prompts) // len(item_seeds))
                seed = hash_seed(item_seeds[item], number, place_of_item)
            sampling, weights = asks[part].sampling, asks[part].weights
            limits = (sampling.max_tokens, sampling.temperature, sampling.top_p)
            requests.append(Request(prompt.ids, *limits, seed, logprobs=False, weights=weights))
            asked.append((part, place))
        if requests:
            report.calls += 1
            with activity.stage(f"wave {number}", len(requests), ANSWERS):
                generations = self.engine.generate(requests)
            for (part, place), generation in zip(asked, generations, strict=True):
                answers[part][place] = (generation, self.chat.decode(generation.token_ids))
                report.tokens[name] += len(generation.token_ids)
                report.prompt_tokens += len(generation.prompt_ids)
                report.cached_tokens += generation.cached_tokens
        report.seconds[name] = time.perf_counter() - started
        return answers


def _wanted(ask: Ask, place: int) -> Wanted:
    return Wanted(ask.prompts[place] or (), ask.sampling.max_tokens, ask.seen[place] if ask.seen else None)


def _of_each(transitions: Sequence[Transition], targets: Sequence[BellmanTarget]) -> list[BellmanTarget]:
    """The target of each transition of a batch. Copies of a transition share it, and each keeps its own record."""
    by_id = {target.transition.id: target for target in targets}
    return [replace(by_id[t.id], transition=t) for t in transitions]
