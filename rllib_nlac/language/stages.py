"""Stages 4 to 6 for a batch of transitions, in three dependent waves of generation, each one full engine call:

    1  a' ~ π_θ(.|s')          d_1..d_k ~ M_θ(.|s, a)
    2  d' ~ M_θ̄(.|s', a')      critique ~ E(s, a, d_1..d_k)
    3  y ~ B_θ̄(s', r, d')      a_r ~ π_r(.|s, a, critique)

A further round of refinement (m > 1) adds three calls that judge the refined action again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rllib_nlac.language import backup, critique, refine
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.sampling.chat import Chat, PromptTooLong
from rllib_nlac.sampling.engine import Engine
from rllib_nlac.types import BellmanTarget, Generation, Message, Refinement, Request, Transition, Weights

Answer = tuple[Generation, str]
Prompt = tuple[Message, ...] | None


@dataclass
class StageReport:
    """What the waves cost and lost.

    Attributes:
        counts: How often each of these happened: ``prompt_too_long``, ``unparsed_target`` and the like.
        tokens: Generated tokens by wave.
        seconds: Wall-clock by wave.
        calls: Engine calls.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0


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
        self._targets: dict[int, BellmanTarget] = {}
        self._targets_version = -1

    def run(
        self, transitions: Sequence[Transition], target_version: int = 0
    ) -> tuple[list[BellmanTarget], list[Refinement], StageReport]:
        """Bellman targets and refinements of a batch, in its order.

        Args:
            transitions: The batch; a transition may occur more than once.
            target_version: Version of θ̄. Targets are cached by transition until it changes.
        """
        report, settings = StageReport(), self.settings
        prompts = [self.prompts_for(transition.env) for transition in transitions]
        if target_version != self._targets_version:
            self._targets, self._targets_version = {}, target_version
        stale = list({t.id: i for i, t in enumerate(transitions) if t.id not in self._targets}.values())
        backed = [transitions[i] for i in stale]
        report.counts["targets_cached"] += len(transitions) - len(stale)

        # Wave 1, all under θ.
        k = settings.num_futures
        next_actions, futures = self._wave(
            "actions_and_futures", report,
            ([backup.next_action_prompt(t) for t in backed], settings.action, Weights.POLICY),
            ([critique.future_prompt(p, t.state, t.action) for p, t in zip(prompts, transitions) for _ in range(k)],
             settings.future, Weights.POLICY),
        )  # fmt: skip
        parsed = [critique.read_futures(futures[i * k : (i + 1) * k]) for i in range(len(transitions))]
        report.counts["unparsed_future"] += k * len(transitions) - sum(map(len, parsed))
        seen = critique.evaluator_input(parsed, settings.critic_input, self.rng)

        # Wave 2.
        a_next = [answer[1] if answer else None for answer in next_actions]
        next_futures, judged = self._wave(
            "next_futures_and_critiques", report,
            ([backup.next_future_prompt(prompts[i], t, a) for i, t, a in zip(stale, backed, a_next)],
             settings.future, Weights.TARGET),
            ([critique.evaluate_prompt(p, t.state, t.action, d) for p, t, d in zip(prompts, transitions, seen)],
             settings.critique, settings.judge),
        )  # fmt: skip
        d_next = [next(iter(critique.read_futures([answer])), None) for answer in next_futures]
        critiques = [critique.read_critique(answer) for answer in judged]

        # Wave 3.
        targets, rewritten = self._wave(
            "targets_and_refinements", report,
            ([backup.target_prompt(prompts[i], t, d) for i, t, d in zip(stale, backed, d_next)],
             settings.backup, Weights.TARGET),
            ([refine.refine_prompt(p, t.state, t.action, c) for p, t, c in zip(prompts, transitions, critiques)],
             settings.refine, settings.judge),
        )  # fmt: skip
        for t, answer, a, d in zip(backed, targets, a_next, d_next, strict=True):
            self._targets[t.id] = backup.read_target(t, answer, a, d)
            report.counts["unparsed_target"] += self._targets[t.id].generation is None
        refined = [refine.read_action(answer, settings.action_format) for answer in rewritten]
        for round_number in range(1, settings.num_refinements):
            refined = self._refine_again(round_number, report, prompts, transitions, refined)
        refinements = [
            refine.decide(t, d, c, a, settings.train_on_yes)
            for t, d, c, a in zip(transitions, seen, critiques, refined, strict=True)
        ]
        report.counts.update(f"refinement_{refinement.reason}" for refinement in refinements)
        # A cached target belongs to the same transition, though perhaps to another draw of it.
        return [replace(self._targets[t.id], transition=t) for t in transitions], refinements, report

    def _refine_again(
        self, number: int, report: StageReport, prompts: Sequence[PromptSet],
        transitions: Sequence[Transition], refined: Sequence[Answer | None],
    ) -> list[Answer | None]:  # fmt: skip
        """One more round: the refined action is judged, and corrected where the verdict is no."""
        settings, k = self.settings, self.settings.num_futures
        open_items = [(p, t.state, a[1]) if a else None for p, t, a in zip(prompts, transitions, refined, strict=True)]
        (answers,) = self._wave(
            f"round_{number}_futures", report,
            ([critique.future_prompt(*item) if item else None for item in open_items for _ in range(k)],
             settings.future, Weights.POLICY),
        )  # fmt: skip
        parsed = [critique.read_futures(answers[i * k : (i + 1) * k]) for i in range(len(open_items))]
        seen = critique.evaluator_input(parsed, settings.critic_input, self.rng)
        (judged,) = self._wave(
            f"round_{number}_critiques", report,
            ([critique.evaluate_prompt(*item, d) if item else None for item, d in zip(open_items, seen)],
             settings.critique, settings.judge),
        )  # fmt: skip
        (rewritten,) = self._wave(
            f"round_{number}_refinements", report,
            ([refine.refine_prompt(*item, critique.read_critique(a)) if item else None for item, a in zip(open_items, judged)],
             settings.refine, settings.judge),
        )  # fmt: skip
        # Where this round has nothing better to offer, the former round's action stands.
        return [refine.read_action(new, settings.action_format) or old for new, old in zip(rewritten, refined, strict=True)]

    def _wave(
        self, name: str, report: StageReport, *parts: tuple[Sequence[Prompt], Sampling, Weights]
    ) -> list[list[Answer | None]]:
        """Answers every prompt that is not None; parts under the same weights go to the engine in one call."""
        started = time.perf_counter()
        answers: list[list[Answer | None]] = [[None] * len(prompts) for prompts, _, _ in parts]
        for weights in sorted({weights for _, _, weights in parts}):
            requests: list[Request] = []
            places: list[tuple[int, int]] = []
            for part, (prompts, sampling, needed) in enumerate(parts):
                for place, prompt in enumerate(prompts if needed is weights else ()):
                    if prompt is None:
                        continue
                    try:
                        ids = self.chat.prompt_ids(prompt, room=sampling.max_tokens)
                    except PromptTooLong:
                        report.counts["prompt_too_long"] += 1
                        continue
                    seed = int(self.rng.integers(1 << 31))
                    requests.append(Request(ids, sampling.max_tokens, sampling.temperature, sampling.top_p, seed))
                    places.append((part, place))
            if not requests:
                continue
            report.calls += 1
            for (part, place), generation in zip(places, self.engine.generate(requests, weights), strict=True):
                answers[part][place] = (generation, self.chat.decode(generation.token_ids))
                report.tokens[name] += len(generation.token_ids)
        report.seconds[name] = time.perf_counter() - started
        return answers
