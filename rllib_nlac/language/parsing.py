"""Reads an agent's turn. ``None`` means that a text does not parse; nothing is ever guessed. See ``forms`` for the critic's."""

from __future__ import annotations

import re

LABEL = r"^(?:[^\S\n]|[>#*_-])*{}[*_\s]*:"
_LABEL = LABEL + r"[*_ \t]*"
_REACT_ACTION = re.compile(_LABEL.format("action"), re.IGNORECASE | re.MULTILINE)
_THINKING = re.compile(r"^.*?</think>", re.DOTALL)


def without_thinking(text: str) -> str:
    """The text after a thinking model's reasoning block, if it has one; empty where the block is never closed."""
    text = _THINKING.sub("", text).strip()
    return "" if text.startswith("<think>") else text


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
