"""Stage 4, the language Bellman backup: a transition and a description d' of what follows a' become one target text y.

a' comes from the *current* policy, never from the stored episode, so the target is off-policy. Nothing follows an end: no
a' and no d' are asked for there, and y rests on the last observation and the reward.

The model writes y, as in the paper, or the package composes it: for a weak model, which forgets the reply or the outcome.
"""

from __future__ import annotations

from rllib_nlac.language.forms import FutureForm
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.variant import Answer
from rllib_nlac.types import BellmanTarget, Future, Message, Transition


def next_action_prompt(transition: Transition) -> tuple[Message, ...] | None:
    """Prompt of a' ~ π(.|s'); None where the episode ended."""
    return None if transition.ended else transition.next_state


def next_future_prompt(prompts: PromptSet, transition: Transition, next_action: str | None) -> tuple[Message, ...] | None:
    """Prompt of d' ~ M(.|s', a'); None where a' was not asked for, as where the episode ended."""
    if next_action is None:
        return None
    return prompts.predict_messages(transition.next_state, next_action)


def target_prompt(prompts: PromptSet, transition: Transition, next_future: Future | None) -> tuple[Message, ...] | None:
    """Prompt of y ~ B(s', r, d'); None where d' is needed and did not parse."""
    if transition.ended:
        return prompts.backup_messages(transition, None)
    return None if next_future is None else prompts.backup_messages(transition, next_future.text)


def composed_target(transition: Transition, next_future: Future | None, form: FutureForm) -> str | None:
    """The target that needs no model: the reply, the first clause of d' and its outcome; None where d' did not parse."""
    if transition.ended:
        return form.composed(transition.observation, None, transition.episode_success)
    return None if next_future is None else form.composed(transition.observation, next_future, next_future.success)


def observed_target(transition: Transition, form: FutureForm) -> str:
    """The target without a bootstrap: the reply, and success only where the episode ended with it."""
    return form.composed(transition.observation, None, transition.ended and transition.episode_success)


def read_target(
    transition: Transition,
    answer: Answer | None,
    next_action: str | None,
    next_future: Future | None,
    form: FutureForm,
) -> BellmanTarget:
    """The target, without a generation to train on where it does not parse or was cut off."""
    generation, text = answer if answer else (None, "")
    future = form.parse(text) if generation is not None and generation.finished else None
    return BellmanTarget(
        transition=transition,
        generation=generation if future else None,
        future=future,
        next_action=next_action,
        next_future=next_future.text if next_future else None,
    )
