"""What the waves of generation cost and lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllib_nlac.language.variant import Answer


@dataclass
class StageReport:
    """What the waves cost and lost.

    Attributes:
        counts: How often each of these happened: ``prompt_too_long``, ``retokenised`` and the like.
        tokens: Generated tokens by wave.
        prompt_tokens: Tokens of all prompts that an engine was asked.
        cached_tokens: Tokens of these that the engine's prefix cache held.
        kept_answers: Greedy answers that were there already, and not asked of an engine again.
        kept_tokens: Tokens of those.
        seconds: Wall-clock by wave.
        calls: Engine calls.
        backs_up: Whether targets were asked for.
        prompts: How many were to be asked for each role, as ``Ask`` names it.
        too_long: How many of these exceeded the context, so that nobody was asked.
        answered: How often each role answered: "future", "target", "critique", "refinement".
        unparsed: How many of these answers did not parse, by role.
        cut_off: How many of those that did not parse the token limit cut off, by role.
        examples: The first answer of each role that did not parse, as it came.
        raw: All answers that did not parse, with their roles, by the id of the transition that they are about.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept_answers: int = 0
    kept_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    backs_up: bool = True
    prompts: Counter[str] = field(default_factory=Counter)
    too_long: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    unparsed: Counter[str] = field(default_factory=Counter)
    cut_off: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    raw: dict[int, list[tuple[str, str]]] = field(default_factory=dict)

    def note(self, role: str, answers: Sequence[Answer | None], parsed: Sequence[Any], about: Sequence[int | None]) -> None:
        """Books what a role answered and what became of each answer, None where it did not parse.

        Args:
            role: Who answered.
            answers: What.
            parsed: What became of each.
            about: Id of the transition that each answer is about; None keeps no raw text.
        """
        for answer, result, transition in zip(answers, parsed, about, strict=True):
            if answer is None:
                continue
            self.answered[role] += 1
            if result is None:
                self.unparsed[role] += 1
                self.cut_off[role] += not answer[0].finished
                self.examples.setdefault(role, answer[1])
                if transition is not None:
                    self.raw.setdefault(transition, []).append((role, answer[1]))
