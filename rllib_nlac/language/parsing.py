"""Tolerant parsers of what the model writes. ``None`` means that a text does not parse; nothing is ever guessed."""

from __future__ import annotations

import re

from rllib_nlac.types import Critique, Future

# The last word of a text; in small letters also a sentence of its own, since "without success" states no outcome.
_OUTCOME = re.compile(
    r"(?:(?<![^\W_])(SUCCESS|FAILURE)|(?:\A|[^\w\s]|_)\s*((?i:success|failure)))[\W_]*\Z",
)
_PLACEHOLDER = re.compile(r"[^\w<]*<[^<>\n]+>[\W_]*\Z")  # of the form that a prompt shows
_OFFERED = re.compile(r"(?<![^\W_])(?:success|failure)[\s*_]*(?:or|/|\|)[\s*_]*\Z", re.IGNORECASE)  # beside another outcome
LABEL = r"^(?:[^\S\n]|[>#*_-])*{}[*_\s]*:"
_LABEL = LABEL + r"[*_ \t]*"
_FUTURE = re.compile(_LABEL.format("future"), re.IGNORECASE | re.MULTILINE)
_FIELDS = {name: re.compile(_LABEL.format(name), re.IGNORECASE | re.MULTILINE) for name in ("optimal", "reason", "fix")}
_VERDICT = re.compile(r"(yes|no)\b(?![\s*_]*(?:or|/|\|)[\s*_]*(?:yes|no)\b)", re.IGNORECASE)
_REACT_ACTION = re.compile(_LABEL.format("action"), re.IGNORECASE | re.MULTILINE)
_THINKING = re.compile(r"^.*?</think>", re.DOTALL)


def without_thinking(text: str) -> str:
    """The text after a thinking model's reasoning block, if it has one; empty where the block is never closed."""
    text = _THINKING.sub("", text).strip()
    return "" if text.startswith("<think>") else text


def parse_future(text: str) -> Future | None:
    """Reads one ``Future: ...`` that ends in SUCCESS or FAILURE. Several, or a prompt's form repeated, state none."""
    text = without_thinking(text)
    labels = list(_FUTURE.finditer(text))
    if len(labels) != 1:
        return None
    body = text[labels[0].end() :].strip()
    outcome = _OUTCOME.search(body)
    if outcome is None:
        return None
    before = body[: outcome.start(outcome.lastindex or 0)]
    if _PLACEHOLDER.match(before) or _OFFERED.search(before):
        return None
    return Future(body, (outcome[1] or outcome[2]).lower() == "success")


def parse_critique(text: str) -> Critique | None:
    """Reads ``Optimal: Yes`` or ``No``, ``Reason:`` and ``Fix:``. A "No" without a fix does not parse."""
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
    if verdict is None or _PLACEHOLDER.match(field("reason")):
        return None
    optimal = verdict[1].lower() == "yes"
    if not optimal and (not field("fix") or _PLACEHOLDER.match(field("fix"))):
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
