"""How the language stages sample and decide; the configuration fills in the fields of the same names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rllib_nlac.types import Weights


@dataclass(frozen=True)
class Sampling:
    """Sampling of one role.

    Attributes:
        max_tokens: Largest number of tokens of an answer.
        temperature: 0 is greedy.
        top_p: Nucleus mass.
        structured: Whether the engine enforces the form of the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    structured: bool = False

    def patterns(self, forms: Iterable[Form | None]) -> list[str | None]:
        """Regular expression of each answer; None where the answer is free."""
        return [form.pattern(self.max_tokens) if self.structured and form is not None else None for form in forms]


class Form(Protocol):
    """The form of an answer; see ``forms``."""

    def pattern(self, max_tokens: int) -> str:
        """Regular expression of an answer that ends before a token limit."""


@dataclass(frozen=True)
class JudgeTemperatures:
    """Temperatures of the roles that judge and advise; each field is a key of ``judge_temperatures``. 0 is greedy.

    Attributes:
        critique: Temperature of the evaluator.
        refine: Temperature of the refinement.
    """

    critique: float = 0.0
    refine: float = 0.0


@dataclass(frozen=True)
class StageSettings:
    """Everything the stages need beside prompts, engine and transitions. Fields of the configuration's names mean the same.

    Attributes:
        action: Sampling of a' (and of the EnvRunner's actions).
        future: Sampling of d and d'.
        backup: Sampling of y.
        critique: Sampling of the critique.
        refine: Sampling of a_r.
        reasoning: Sampling of a rewritten reasoning; None trains on reasoning as it was sampled.
        num_futures: k.
        num_next_actions: a' that the backup draws in s'.
        num_refinements: m, rounds of critique and refinement; 0 asks for a critique and never for a refinement.
        action_format: "plain" or "react".
        judge_weights: Which weights criticise and refine; INITIAL ones write y, too, and else the target's do.
        critic_input: "predicted" or "backed_up".
        rejected_weight: Weight of a refined action without the evaluator's yes; at 1 the evaluator is not asked.
        judged_fraction: Share of a batch whose actions are judged and refined.
        train_on_yes: "success", "always" or "never".
        backup_by: "written" or "composed".
    """

    action: Sampling
    future: Sampling
    backup: Sampling
    critique: Sampling
    refine: Sampling
    reasoning: Sampling | None = None
    num_futures: int = 1
    num_next_actions: int = 1
    num_refinements: int = 1
    action_format: str = "plain"
    judge_weights: Weights = Weights.TARGET
    critic_input: str = "predicted"
    rejected_weight: float = 1.0
    judged_fraction: float = 1.0
    train_on_yes: str = "success"
    backup_by: str = "written"

    @property
    def backup_weights(self) -> Weights:
        """Which weights write y: θ̄, as in the paper, or the initial ones where those judge."""
        return Weights.INITIAL if self.judge_weights is Weights.INITIAL else Weights.TARGET
