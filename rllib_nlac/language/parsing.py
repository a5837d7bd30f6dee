"""Tolerant parsers of what the model writes. ``None`` means that a text does not parse; nothing is ever guessed."""

from __future__ import annotations

import re

from rllib_nlac.types import Critique, Future

_OUTCOME = re.compile(r"\b(success|failure)\b", re.IGNORECASE)
_LABEL = r"^[\s>#*_-]*{}[*_\s]*:[*_ \t]*"
_FUTURE = re.compile(_LABEL.format("future"), re.IGNORECASE | re.MULTILINE)
_FIELDS = {name: re.compile(_LABEL.format(name), re.IGNORECASE | re.MULTILINE) for name in ("optimal", "reason", "fix")}
_VERDICT = re.compile(r"(yes|no)\b", re.IGNORECASE)
_REACT_ACTION = re.compile(_LABEL.format("action"), re.IGNORECASE | re.MULTILINE)
_THINKING = re.compile(r"^.*?</think>", re.DOTALL)


def without_thinking(text: str) -> str:
    """The text after a thinking model's reasoning block, if it has one; empty where the block is never closed."""
    text = _THINKING.sub("", text).strip()
    return "" if text.startswith("<think>") else text


def parse_future(text: str) -> Future | None:
    """Reads ``Future: ...`` that says SUCCESS or FAILURE; the last of the two words is the outcome."""
    text = without_thinking(text)
    label = _FUTURE.search(text)
    if label is None:
        return None
    body = text[label.end() :].strip()
    outcomes = _OUTCOME.findall(body)
    return Future(body, outcomes[-1].lower() == "success") if outcomes else None


def parse_critique(text: str) -> Critique | None:
    """Reads ``Optimal: Yes/No``, ``Reason:`` and ``Fix:``. A "No" without a fix does not parse."""
    text = without_thinking(text)
    starts = {name: match for name, pattern in _FIELDS.items() if (match := pattern.search(text))}
    if "optimal" not in starts:
        return None
    bounds = [*sorted(match.start() for match in starts.values()), len(text)]

    def field(name: str) -> str:
        if name not in starts:
            return ""
        end = next(bound for bound in bounds if bound > starts[name].start())
        return text[starts[name].end() : end].strip().strip("*_").strip()

    verdict = _VERDICT.match(field("optimal"))
    if verdict is None:
        return None
    optimal = verdict[1].lower() == "yes"
    if not optimal and not field("fix"):
        return None
    return Critique(text, optimal, field("reason"), "" if optimal else field("fix"))


def parse_action(text: str, action_format: str) -> str | None:
    """The part of the agent's turn that reaches the environment.

    Args:
        text: The whole turn.
        action_format: "plain", all of it, or "react", what follows the last ``Action:``.

    Returns:
        The action, or None where the turn is empty, is all reasoning, or lacks its ``Action:`` part.
    """
    text = without_thinking(text)
    if action_format == "react":
        labels = list(_REACT_ACTION.finditer(text))
        if not labels:
            return None
        text = text[labels[-1].end() :].strip()
    return text or None
