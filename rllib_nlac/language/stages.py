"""Stages 4 to 6 for a batch of transitions, in dependent waves of generation, each one full engine call:

    1  a' ~ π_θ(.|s')          d_1..d_k ~ M_θ(.|s, a)
    2  d' ~ M_θ̄(.|s', a')      critique ~ E(s, a, d_1..d_k)
    3  y ~ B_θ̄(s', r, d')      a_r ~ π_r(.|s, a, critique)

The two columns are two generators, ``backup_stage`` and ``improvement_stage``: each is read from top to bottom and yields
what it asks of the model, and ``LanguageStages.drive`` answers what several of them ask at the same time in one call.
A further round of refinement (m > 1), a longer backup (n > 1), several a', fresh actions and verification yield more often.
Where the stored action is judged by its target ("backed_up"), the second begins when the first has ended.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rllib_nlac.activity import ANSWERS, activity
from rllib_nlac.engine.chat import Chat, PromptTooLong
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.language import backup, critique, reasoning, refine
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.types import (
    BellmanTarget,
    Critique,
    Future,
    Generation,
    Message,
    Refinement,
    Request,
    Transition,
    Weights,
    hash_seed,
)

Answer = tuple[Generation, str]
Prompt = tuple[Message, ...] | None
Judgement = tuple[list[tuple[Future, ...]], list[Critique | None]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ask:
    """What one stage asks of the model in one wave; a prompt that is None is not asked, and its answer is None."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    weights: Weights


Stage = Generator[Ask, list[Answer | None], Result]


@dataclass
class StageReport:
    """What the waves cost and lost.

    Attributes:
        counts: How often each of these happened: ``prompt_too_long``, ``unparsed_target`` and the like.
        tokens: Generated tokens by wave.
        seconds: Wall-clock by wave.
        calls: Engine calls.
        answered: How often each role answered: "future", "target", "critique", "refinement".
        unparsed: How many of these answers did not parse, by role.
        cut_off: How many of those that did not parse the token limit cut off, by role.
        examples: The first answer of each role that did not parse, as it came.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    unparsed: Counter[str] = field(default_factory=Counter)
    cut_off: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, role: str, answers: Sequence[Answer | None], parsed: Sequence[Any]) -> None:
        """Books what a role answered and what became of each answer, None where it did not parse."""
        for answer, result in zip(answers, parsed, strict=True):
            if answer is None:
                continue
            self.answered[role] += 1
            if result is None:
                self.unparsed[role] += 1
                self.cut_off[role] += not answer[0].finished
                self.examples.setdefault(role, answer[1])


def backup_stage(
    transitions: Sequence[Transition], prompts: Sequence[PromptSet], settings: StageSettings, chat: Chat, report: StageReport
) -> Stage[list[BellmanTarget]]:
    """y of every transition. With n steps, y of the last of them first, and each earlier one rests on the next one's."""
    chains = [(t, *t.following) for t in transitions]
    ends = [chain[-1] for chain in chains]
    next_actions, next_futures = yield from _continuation(ends, prompts, settings, report)

    later: list[Future | None] = list(next_futures)
    targets: list[BellmanTarget] = [backup.read_target(t, None, None, None) for t in transitions]
    for depth in range(max(map(len, chains), default=0)):
        due = [i for i, chain in enumerate(chains) if len(chain) > depth]
        steps = [chains[i][-1 - depth] for i in due]
        answers = yield Ask(
            [backup.target_prompt(prompts[i], step, later[i]) for i, step in zip(due, steps, strict=True)],
            settings.backup, settings.backup_weights,
        )  # fmt: skip
        for i, step, answer in zip(due, steps, answers, strict=True):
            targets[i] = backup.read_target(step, answer, next_actions[i], next_futures[i])
            later[i] = targets[i].future
        report.note("target", answers, [targets[i].future for i in due])
    if settings.reasoning is not None:
        thoughts = [reasoning.target_thought(p, target, chat) for p, target in zip(prompts, targets, strict=True)]
        generations = yield from _corrected(thoughts, settings.reasoning, chat, report)
        targets = [replace(t, generation=g or t.generation) for t, g in zip(targets, generations, strict=True)]
    fitting = [_fits(p, target, chat) for p, target in zip(prompts, targets, strict=True)]
    report.counts["prompt_too_long"] += fitting.count(False)
    targets = [t if fits else replace(t, generation=None) for t, fits in zip(targets, fitting, strict=True)]
    report.counts["unparsed_target"] += sum(target.generation is None for target in targets)
    return targets


def _fits(prompts: PromptSet, target: BellmanTarget, chat: Chat) -> bool:
    """Whether a target can be trained on: its prompt then is the prediction's, which may be longer than the backup's."""
    t, answer = target.transition, target.generation
    if answer is None:
        return True
    known = len(answer.prompt_ids) + len(answer.token_ids)  # of a prompt that differs in the instruction alone
    if known + len(prompts.predict.encode()) <= chat.max_context:
        return True
    try:
        chat.prompt_ids(prompts.predict_messages(t.state, t.action), room=len(answer.token_ids))
    except PromptTooLong:
        return False
    return True


def _continuation(
    ends: Sequence[Transition], prompts: Sequence[PromptSet], settings: StageSettings, report: StageReport
) -> Stage[tuple[list[str | None], list[Future | None]]]:
    """a' and d' behind every transition; of several a', the first whose d' the evaluator approves of, or else the first."""
    count = settings.num_next_actions
    states = [(p, t) for p, t in zip(prompts, ends, strict=True) for _ in range(count)]
    answers = yield Ask([backup.next_action_prompt(t) for _, t in states], settings.action, Weights.POLICY)
    actions = [answer[1] if answer else None for answer in answers]
    answers = yield Ask(
        [backup.next_future_prompt(p, t, a) for (p, t), a in zip(states, actions, strict=True)],
        settings.future, Weights.INITIAL if settings.future_weights is Weights.INITIAL else Weights.TARGET,
    )  # fmt: skip
    futures = [next(iter(critique.read_futures([answer])), None) for answer in answers]
    report.note("future", answers, futures)
    if count == 1:
        return actions, futures
    verdicts = yield from _critiques(
        [p for p, _ in states], [t.next_state for _, t in states], actions, [(d,) if d else () for d in futures],
        settings, report,
    )  # fmt: skip
    chosen = []
    for start in range(0, len(states), count):
        known = [i for i in range(start, start + count) if futures[i]] or [start]
        chosen.append(next((i for i in known if (verdict := verdicts[i]) and verdict.optimal), known[0]))
    return [actions[i] for i in chosen], [futures[i] for i in chosen]


def _critiques(
    prompts: Sequence[PromptSet], states: Sequence[tuple[Message, ...]], actions: Sequence[str | None],
    futures: Sequence[Sequence[Future]], settings: StageSettings, report: StageReport,
) -> Stage[list[Critique | None]]:  # fmt: skip
    """What the evaluator says of each action, given its futures; None where there is no action or no future."""
    answers = yield Ask(
        [critique.evaluate_prompt(p, s, a, d) if a is not None else None
         for p, s, a, d in zip(prompts, states, actions, futures, strict=True)],
        settings.critique, settings.judge,
    )  # fmt: skip
    critiques = [critique.read_critique(answer) for answer in answers]
    report.note("critique", answers, critiques)
    return critiques


def improvement_stage(
    transitions: Sequence[Transition], prompts: Sequence[PromptSet], settings: StageSettings, chat: Chat, report: StageReport,
    rng: np.random.Generator, futures: Sequence[tuple[Future, ...]] | None = None,
) -> Stage[list[Refinement]]:  # fmt: skip
    """Critique and refinement of every transition's action, up to m rounds: as many as it takes to find the evaluator's yes.

    Args:
        transitions: The batch.
        prompts: The prompt set of each transition.
        settings: Sampling and decisions.
        chat: For the correction of reasoning.
        report: Counts what is lost.
        rng: For the ablation that permutes futures.
        futures: What the first round's evaluator sees, where it is not the successor model's to say.
    """

    def judge(actions: Sequence[str | None], parsed: Sequence[tuple[Future, ...]] | None = None) -> Stage[Judgement]:
        """Futures and critiques; neither is asked for where there is no action."""
        if parsed is None:
            answers = yield Ask(
                [critique.future_prompt(p, t.state, a) if a is not None else None
                 for p, t, a in zip(prompts, transitions, actions, strict=True) for _ in range(k)],
                settings.future, settings.future_weights,
            )  # fmt: skip
            parsed = [critique.read_futures(answers[i * k : (i + 1) * k]) for i in range(count)]
            report.note("future", answers, [next(iter(critique.read_futures([answer])), None) for answer in answers])
            report.counts["unparsed_future"] += k * sum(a is not None for a in actions) - sum(map(len, parsed))
        seen = critique.evaluator_input(parsed, settings.critic_input, rng)
        return seen, (yield from _critiques(prompts, [t.state for t in transitions], actions, seen, settings, report))

    k, rounds = settings.num_futures, settings.num_refinements
    count = len(transitions)
    if settings.fresh_actions:
        answers = yield Ask([t.state for t in transitions], settings.action, Weights.POLICY)
        drawn = [refine.read_action(answer, settings.action_format) for answer in answers]
        transitions = [
            replace(t, generation=new[0], action=new[1]) if new else t for t, new in zip(transitions, drawn, strict=True)
        ]
    actions: list[str | None] = [t.action for t in transitions]
    refined: list[Answer | None] = [None] * count
    advice: list[tuple[Critique, ...]] = [()] * count  # the critiques of all rounds behind each refined action
    seen_first: list[tuple[Future, ...]] = []
    critiques_first: list[Critique | None] = []
    imitated = [False] * count  # stored actions that are learned as they are
    accepted = [False] * count  # these, and refined ones that a later round approved of: the evaluator is not asked again
    for number in range(max(rounds, 1)):
        seen, critiques = yield from judge(_but(accepted, actions), futures if number == 0 else None)
        if number == 0:
            seen_first, critiques_first = seen, critiques
            if settings.self_imitation:
                accepted = imitated = [refine.won_unforeseen(t, d) for t, d in zip(transitions, seen, strict=True)]
        else:
            accepted = [done or bool(c and c.optimal) for done, c in zip(accepted, critiques, strict=True)]
        if rounds == 0:
            break
        answers = yield Ask(
            [refine.refine_prompt(p, t.state, a, c) if a is not None else None
             for p, t, a, c in zip(prompts, transitions, _but(accepted, actions), critiques, strict=True)],
            settings.refine, settings.judge,
        )  # fmt: skip
        # Where a later round has nothing better to offer, the former round's action stands.
        new = [refine.read_action(answer, settings.action_format) for answer in answers]
        report.note("refinement", answers, new)
        advice = [(*former, c) if a and c else former for a, c, former in zip(new, critiques, advice, strict=True)]
        refined = [a or former for a, former in zip(new, refined, strict=True)]
        actions = [answer[1] if answer else None for answer in refined]
    rejected = [False] * count
    if settings.verify_refinements and any(refined):
        _, verdicts = yield from judge(_but(accepted, actions))
        rejected = [
            a is not None and not done and not (c and c.optimal)
            for a, done, c in zip(actions, accepted, verdicts, strict=True)
        ]  # fmt: skip
    if settings.reasoning is not None:
        thoughts = [
            reasoning.action_thought(p, t.state, answer, c, chat)
            for p, t, answer, c in zip(prompts, transitions, refined, advice, strict=True)
        ]
        generations = yield from _corrected(thoughts, settings.reasoning, chat, report)
        refined = [
            (g, chat.decode(g.token_ids)) if g is not None else answer for g, answer in zip(generations, refined, strict=True)
        ]
    refinements = [
        refine.decide(
            t, d, c, a, settings.train_on_yes, asked=rounds > 0, rejected=is_rejected, rejected_weight=settings.rejected_weight,
            imitated=is_imitated,
        )
        for t, d, c, a, is_rejected, is_imitated in zip(
            transitions, seen_first, critiques_first, refined, rejected, imitated, strict=True
        )
    ]  # fmt: skip
    report.counts.update(f"refinement_{refinement.reason}" for refinement in refinements)
    return refinements


def _but(accepted: Sequence[bool], actions: Sequence[str | None]) -> list[str | None]:
    """The actions that are still to be judged."""
    return [None if done else action for done, action in zip(accepted, actions, strict=True)]


def _corrected(
    thoughts: Sequence[reasoning.Thought | None], sampling: Sampling, chat: Chat, report: StageReport
) -> Stage[list[Generation | None]]:
    """The ids with each thought rewritten, or left empty where the rewriting still leaks; None where there is no thought."""
    if not any(thoughts):
        return [None] * len(thoughts)
    answers = yield Ask([t.prompt if t else None for t in thoughts], sampling, Weights.TARGET)
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
        prompts_for: The prompt set of an environment, by its registered name.
        settings: Sampling and decisions.
        seed: Seeds every request, so that equal weights and transitions give equal texts.
    """

    def __init__(
        self, engine: Engine, chat: Chat, prompts_for: Callable[[str], PromptSet], settings: StageSettings, seed: int = 0
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.prompts_for = prompts_for
        self.settings = settings
        self.rng = np.random.default_rng(seed)
        self._targets: dict[int, BellmanTarget]
        self._targets_version: int
        self.forget_targets()

    def run(
        self, transitions: Sequence[Transition], target_version: int = 0
    ) -> tuple[list[BellmanTarget], list[Refinement], StageReport]:
        """Bellman targets and refinements of a batch, in its order.

        Args:
            transitions: The batch; a transition may occur more than once.
            target_version: Version of θ̄. Targets are cached by transition until it changes.
        """
        report = StageReport()
        stale = self._without_target(transitions, target_version, report)
        share = self.settings.judged_fraction  # spread evenly, so that every minibatch has its part
        judged = [math.ceil((i + 1) * share) > math.ceil(i * share) for i in range(len(transitions))]
        chosen = list(itertools.compress(transitions, judged))
        if self.settings.critic_input == "backed_up":
            (new,) = self.drive(report, self.backup(stale, report))
            targets = self._with_cached(transitions, new)
            known = [(y.future,) if y.future else () for y in itertools.compress(targets, judged)]
            (refined,) = self.drive(report, self.improvement(chosen, report, known))
        else:
            new, refined = self.drive(report, self.backup(stale, report), self.improvement(chosen, report))
            targets = self._with_cached(transitions, new)
        rest = iter(refined)
        refinements = [
            next(rest) if is_judged else Refinement(t, (), None, None, None, False, "not_judged")
            for t, is_judged in zip(transitions, judged, strict=True)
        ]
        return targets, refinements, report

    def backup(self, transitions: Sequence[Transition], report: StageReport) -> Stage[list[BellmanTarget]]:
        """``backup_stage`` with these settings."""
        return backup_stage(transitions, self._prompts(transitions), self.settings, self.chat, report)

    def improvement(
        self, transitions: Sequence[Transition], report: StageReport, futures: Sequence[tuple[Future, ...]] | None = None
    ) -> Stage[list[Refinement]]:
        """``improvement_stage`` with these settings."""
        prompts = self._prompts(transitions)
        return improvement_stage(transitions, prompts, self.settings, self.chat, report, self.rng, futures)

    def forget_targets(self) -> None:
        """Drops the cached targets, as when a checkpoint is restored: its versions and ids may be those of other ones."""
        self._targets, self._targets_version = {}, -1

    def predict_ids(self, transition: Transition) -> tuple[int, ...]:
        """Prompt of M(.|s, a), under which the successor model is trained."""
        prompts = self.prompts_for(transition.env)
        return self.chat.prompt_ids(prompts.predict_messages(transition.state, transition.action))

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

    def _without_target(self, transitions: Sequence[Transition], version: int, report: StageReport) -> list[Transition]:
        if version != self._targets_version:
            self._targets, self._targets_version = {}, version
        stale = list({t.id: t for t in transitions if t.id not in self._targets}.values())
        report.counts["targets_cached"] += len(transitions) - len(stale)
        return stale

    def _with_cached(self, transitions: Sequence[Transition], new: Sequence[BellmanTarget]) -> list[BellmanTarget]:
        self._targets.update({target.transition.id: target for target in new})
        # A cached target belongs to the same transition, though perhaps to another draw of it.
        return [replace(self._targets[t.id], transition=t) for t in transitions]

    def _wave(
        self, report: StageReport, asks: Sequence[Ask], item_seeds: Sequence[int] | None = None
    ) -> list[list[Answer | None]]:
        """Answers every prompt that is not None; asks under the same weights go to the engine in one call."""
        number = len(report.seconds) + 1
        started, name = time.perf_counter(), f"wave_{number}"
        answers: list[list[Answer | None]] = [[None] * len(ask.prompts) for ask in asks]
        for weights in sorted({ask.weights for ask in asks}):
            requests: list[Request] = []
            places: list[tuple[int, int]] = []
            for part, ask in enumerate(asks):
                for place, prompt in enumerate(ask.prompts if ask.weights is weights else ()):
                    if prompt is None:
                        continue
                    sampling = ask.sampling
                    try:
                        ids = self.chat.prompt_ids(prompt, room=sampling.max_tokens)
                    except PromptTooLong:
                        report.counts["prompt_too_long"] += 1
                        continue
                    if item_seeds is None:
                        seed = int(self.rng.integers(1 << 31))
                    else:  # a stage asks equally many prompts, k futures for example, of each of its items in turn
                        item, place_of_item = divmod(place, len(ask.prompts) // len(item_seeds))
                        seed = hash_seed(item_seeds[item], number, place_of_item)
                    limits = (sampling.max_tokens, sampling.temperature, sampling.top_p)
                    requests.append(Request(ids, *limits, seed, logprobs=False))
                    places.append((part, place))
            if not requests:
                continue
            report.calls += 1
            with activity.stage(f"wave {number}", len(requests), ANSWERS):
                generations = self.engine.generate(requests, weights)
            for (part, place), generation in zip(places, generations, strict=True):
                answers[part][place] = (generation, self.chat.decode(generation.token_ids))
                report.tokens[name] += len(generation.token_ids)
        report.seconds[name] = time.perf_counter() - started
        return answers
