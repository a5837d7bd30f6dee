"""Stage 6, refinement: the action again, corrected by the critique, and whether the policy is trained on it."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_nlac.language.critique import predicts_success
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.variant import Answer
from rllib_nlac.types import Critique, Future, Generation, Message, Refinement, Transition


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


def decide(
    transition: Transition,
    futures: tuple[Future, ...],
    critique: Critique | None,
    refined: Answer | None,
    train_on_yes: str,
    asked: bool = True,
    rejected: bool = False,
    rejected_weight: float = 0.0,
    well_formed: bool = True,
    action_format: str = "plain",
) -> Refinement:
    """What the policy learns from one transition, if anything.

    Args:
        transition: The transition whose action was judged.
        futures: What the evaluator saw in the first round.
        critique: The first round's critique.
        refined: The last round's action, where there is one.
        train_on_yes: "success", "always" or "never"; see ``StageSettings``.
        asked: Whether a refinement was asked for at all.
        rejected: Whether the evaluator judged the refined action and did not say yes.
        rejected_weight: How much it counts then.
        well_formed: Whether the stored action is written as it must be to be learned.
        action_format: As for ``parse_action``.
    """

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
    if refined is None:
        return outcome("unparsed_action" if asked else "not_refined", None, None)
    generation, action = refined
    if rejected:
        return outcome("rejected", generation if rejected_weight else None, action, rejected_weight)
    return outcome("kept" if is_same_action(action, transition.action, action_format) else "refined", generation, action)


def is_same_action(turn: str, other: str, action_format: str) -> bool:
    """Whether the same reaches the environment of two turns, whatever was thought before."""
    own, others = (parse_action(text, action_format) or text.strip() for text in (turn, other))
    return own == others
