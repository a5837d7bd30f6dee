"""Stages 4 to 6 for a batch of transitions, in dependent waves of generation, each one full engine call:

    1  a' ~ π_θ(.|s')          d_1..d_k ~ M_θ(.|s, a)
    2  d' ~ M_θ̄(.|s', a')      critique ~ E(s, a, d_1..d_k)
    3  y ~ B_θ̄(s', r, d')      a_r ~ π_r(.|s, a, critique)

The two columns are two generators, ``backup_stage`` and ``improvement_stage``, in files of their own: each is read from top to
bottom and yields what it asks of the model, and ``LanguageStages.drive`` answers what several of them ask at the same time in
one call.
More rounds of refinement (m > 1), longer backups (n > 1), several a', fresh actions and judged refined actions add waves.
Where the stored action is judged by its target ("backed_up"), the second generator starts when the first has ended.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllib_nlac.activity import ANSWERS, activity
from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.language.backup_stage import backup_stage
from rllib_nlac.language.improvement_stage import improvement_stage
from rllib_nlac.language.parsing import without_thinking
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Answer, Ask, Stage, Variant, answered_by
from rllib_nlac.types import BellmanTarget, Future, Refinement, Request, Transition, Weights, hash_seed

# By whom, prompt, limit and pattern: all that a greedy answer depends on.
Greedy = tuple[Weights, tuple[int, ...], int, str | None]
Known = dict[Greedy, Answer | None]


class LanguageStages:
    """Runs the waves on an engine.

    Args:
        engine: Holds the policy's and the target's weights.
        chat: Turns messages into tokens and back.
        prompts_for: The prompt set of an environment, by its registered name: that which a transition was really played in.
        settings: Sampling and decisions.
        seed: Seeds every request, so that equal weights and transitions give equal texts.
        variant: What an ablation does otherwise.

    Attributes:
        purpose: What the tokens of all answers count as; None: each as its role's.
    """

    purpose: str | None = None

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
        if not self.variant.predicts:
            targets = [BellmanTarget(t, None, None, None, None) for t in transitions]
            report.backs_up = False
            (refined,) = self.drive(report, self.improvement(chosen, report))
        elif self.settings.critic_input == "backed_up":
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
        return answered_by(self.settings, self.variant)

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
        known: Known = {}

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
            for place, answers in zip(places, self._wave(report, [asked[p] for p in places], known, seeds), strict=True):
                advance(place, answers)
        return results

    def _prompts(self, transitions: Sequence[Transition]) -> list[PromptSet]:
        return [self.prompts_for(transition.env) for transition in transitions]

    def _wave(
        self, report: StageReport, asks: Sequence[Ask], known: Known, item_seeds: Sequence[int] | None = None
    ) -> list[list[Answer | None]]:
        """Answers every prompt that is not None, in one call of the engine; each request names its weights.

        What was answered greedily is not asked again of the same weights: it would be answered alike. No weights change between
        waves.
        """
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
        asked: list[tuple[int, int, Greedy | None]] = []
        again: list[tuple[int, int, Greedy]] = []
        for (part, place), prompt in zip(places, made, strict=True):
            report.prompts[asks[part].role] += 1
            if isinstance(prompt, PromptTooLong):
                report.counts["prompt_too_long"] += 1
                report.too_long[asks[part].role] += 1
                continue
            seen = asks[part].seen
            report.counts["retokenised"] += prompt.retokenised or (bool(seen) and seen[place] is None)
            if item_seeds is None:
                seed = int(self.rng.integers(1 << 31))
            else:  # a stage asks equally many prompts, k futures for example, of each of its items in turn
                item, place_of_item = divmod(place, len(asks[part].prompts) // len(item_seeds))
                seed = hash_seed(item_seeds[item], number, place_of_item)
            sampling, weights = asks[part].sampling, asks[part].weights
            limits = (sampling.max_tokens, sampling.temperature, sampling.top_p)
            role = self.purpose or asks[part].role
            pattern = asks[part].patterns[place] if asks[part].patterns else None
            greedy = None if sampling.temperature else (weights, prompt.ids, sampling.max_tokens, pattern)
            if greedy is not None:
                if greedy in known:
                    again.append((part, place, greedy))
                    continue
                known[greedy] = None  # until the engine has answered
            requests.append(Request(prompt.ids, *limits, seed, logprobs=False, weights=weights, role=role, pattern=pattern))
            asked.append((part, place, greedy))
        if requests:
            report.calls += 1
            with activity.stage(f"wave {number}", len(requests), ANSWERS):
                generations = self.engine.generate(requests)
            for (part, place, greedy), request, generation in zip(asked, requests, generations, strict=True):
                # The ids of an answer that goes on as somebody else would be trained on as they are: it says nothing.
                said = "" if self.chat.invents_a_turn(generation) else self.chat.said(generation)
                report.counts["unstructured"] += generation.finished and not _keeps(request.pattern, said)
                answer = answers[part][place] = (generation, said)
                if greedy is not None:
                    known[greedy] = answer
                report.tokens[name] += len(generation.token_ids)
                report.prompt_tokens += len(generation.prompt_ids)
                report.cached_tokens += generation.cached_tokens
        for part, place, greedy in again:
            kept = answers[part][place] = known[greedy]
            assert kept is not None
            report.kept_answers += 1
            report.kept_tokens += len(kept[0].token_ids)
        report.seconds[name] = time.perf_counter() - started
        return answers


def _keeps(pattern: str | None, said: str) -> bool:
    """Whether an answer has the form that was asked for."""
    return pattern is None or re.fullmatch(pattern, without_thinking(said)) is not None


def _wanted(ask: Ask, place: int) -> Wanted:
    return Wanted(ask.prompts[place] or (), ask.sampling.max_tokens, ask.seen[place] if ask.seen else None)


def _of_each(transitions: Sequence[Transition], targets: Sequence[BellmanTarget]) -> list[BellmanTarget]:
    """The target of each transition of a batch. Copies of a transition share it, and each keeps its own record."""
    by_id = {target.transition.id: target for target in targets}
    return [replace(by_id[t.id], transition=t) for t in transitions]
