"""Stage 5, the language critic: k futures of (s, a) and the evaluator's judgement of them."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_nlac.language.parsing import parse_critique, parse_future
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import Critique, Future, Generation, Message


def future_prompt(prompts: PromptSet, state: Sequence[Message], action: str) -> tuple[Message, ...]:
    """Prompt of d ~ M(.|s, a)."""
    return prompts.predict_messages(state, action)


def read_futures(answers: Sequence[tuple[Generation, str] | None]) -> tuple[Future, ...]:
    """The futures that parse and were not cut off."""
    futures = (parse_future(text) for generation, text in filter(None, answers) if generation.finished)
    return tuple(future for future in futures if future is not None)


def evaluate_prompt(
    prompts: PromptSet, state: Sequence[Message], action: str, futures: Sequence[Future]
) -> tuple[Message, ...] | None:
    """Prompt of E(s, a, d_1..d_k); None where no future parsed."""
    return prompts.evaluate_messages(state, action, futures) if futures else None


def read_critique(answer: tuple[Generation, str] | None) -> Critique | None:
    """The critique, None where it does not parse or was cut off."""
    if answer is None or not answer[0].finished:
        return None
    return parse_critique(answer[1])


def predicts_success(futures: Sequence[Future]) -> bool:
    """Whether at least half of the futures end well."""
    return 2 * sum(future.success for future in futures) >= len(futures) > 0
