"""Stage 6, refinement: the action again, corrected by the critique, and whether the policy is trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_nlac.language.critique import predicts_success
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.variant import Answer
from rllib_nlac.types import Critique, Future, Generation, Message, Refinement, Seen, Transition


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


def refine_prompt(
    prompts: PromptSet, state: Sequence[Message], action: str, critique: Critique | None
) -> tuple[Message, ...] | None:
    """Prompt of a_r ~ π_r(.|s, a, Q_L); None where nothing needs refining: the verdict is yes, or there is none."""
    if critique is None or critique.optimal:
        return None
    return prompts.refine_messages(state, action, critique.text)


def read_action(answer: Answer | None, action_format: str) -> Answer | None:
    """The refined turn, None where it does not parse or was cut off."""
    if answer is None or not answer[0].finished or parse_action(answer[1], action_format) is None:
        return None
    return answer


def decide(attempt: Attempt, settings: StageSettings, well_formed: bool = True) -> Refinement:
    """What the policy learns from one transition, if anything.

    Args:
        attempt: What came of the rounds.
        settings: Which actions are trained on.
        well_formed: Whether the stored action is written as it must be to be learned.
    """
    transition, futures, critique = attempt.transition, attempt.futures, attempt.critique
    action_format, train_on_yes = settings.action_format, settings.train_on_yes

    def outcome(reason: str, generation: Generation | None, action: str | None, weight: float = 1.0) -> Refinement:
        kept = action is not None and is_same_action(action, transition.action, action_format)
        return Refinement(transition, futures, critique, action, generation, kept, reason, weight)

    if not futures:
        return outcome("unparsed_future", None, None)
    if critique is None:
        return outcome("unparsed_critique", None, None)
    if critique.optimal:
        train = train_on_yes == "always" or (train_on_yes == "success" and predicts_success(futures))
        if train and not well_formed:
            return outcome("unparsed_action", None, None)
        return outcome("yes_success" if train else "yes_skipped", transition.generation if train else None, transition.action)
    if attempt.refined is None:
        return outcome("unparsed_action" if settings.num_refinements else "not_refined", None, None)
    generation, action = attempt.refined
    if attempt.rejected:
        return outcome("rejected", generation if settings.rejected_weight else None, action, settings.rejected_weight)
    if is_same_action(action, transition.action, action_format):  # in spite of the verdict: as good as a yes
        return outcome("kept", None if train_on_yes == "never" else generation, action)
    return outcome("refined", generation, action)


def is_same_action(turn: str, other: str, action_format: str) -> bool:
    """Whether the same reaches the environment of two turns, whatever was thought before."""
    own, others = (parse_action(text, action_format) or text.strip() for text in (turn, other))
    return own == others
