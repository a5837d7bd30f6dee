"""What an environment says an action must look like, from its info to a regular expression that an engine enforces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_nlac.types import ActionForm

CHOICES, PATTERN = "action_choices", "action_pattern"  # keys of an info
MOST_CHOICES, MOST_CHARACTERS = 1000, 20_000
THOUGHT = r"Thought: [^\n]{1,400}\nAction: "  # before the action of a turn in the format "react"


def action_form(info: Mapping[str, Any], action_format: str) -> ActionForm | None:
    """The form of the next turn; None where the environment offers nothing.

    Args:
        info: The environment's latest info.
        action_format: "plain" or "react".

    Raises:
        ValueError: It offers something that is no list of texts or no regular expression, or too much.
    """
    choices, pattern = info.get(CHOICES), info.get(PATTERN)
    if choices is None and pattern is None:
        return None
    if choices is not None:
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not all(isinstance(c, str) and c for c in choices):
            raise ValueError(f"info[{CHOICES!r}] must be a list of texts that are not empty, and it is {choices!r:.100}")
        if not 1 <= len(choices) <= MOST_CHOICES:
            raise ValueError(f"info[{CHOICES!r}] must hold 1 to {MOST_CHOICES} actions, and it holds {len(choices)}")
        # Sorted, so that one set of actions is one pattern, compiled once, in whatever order it comes.
        pattern = "|".join(re.escape(choice) for choice in sorted(set(choices)))
    if not isinstance(pattern, str) or len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"info[{PATTERN!r}] must be a text of up to {MOST_CHARACTERS} characters, and it is {pattern!r:.100}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"info[{PATTERN!r}] is no regular expression ({error}): {pattern!r:.100}") from None
    return ActionForm(f"{THOUGHT if action_format == 'react' else ''}(?:{pattern})")
