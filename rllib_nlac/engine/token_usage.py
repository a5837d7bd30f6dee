"""What an engine was given and has generated, in tokens, by what each request says that it is for."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rllib_nlac.types import Generation, Request

TOKENS, PROMPT_TOKENS = "tokens", "prompt_tokens"  # in the results, by role


class Tokens(NamedTuple):
    """Tokens of the answered requests of one role.

    Attributes:
        prompt: Of their prompts, those that a prefix cache held included.
        generated: Of their answers.
    """

    prompt: int = 0
    generated: int = 0


class Tally:
    """Counts from the engine's start on. Requests that were withdrawn count for nothing."""

    num_unstructured = 0  # answers whose form was asked for and not enforced

    def __init__(self) -> None:
        self._by_role: dict[str, Tokens] = {}
        self._lock = threading.Lock()  # an endpoint answers in many threads

    def book(self, request: Request, generation: Generation) -> None:
        """Counts one answer; an engine calls it as soon as it has one."""
        with self._lock:
            prompt, generated = self._by_role.get(request.role, Tokens())
            self._by_role[request.role] = Tokens(prompt + len(request.prompt_ids), generated + len(generation.token_ids))

    def so_far(self) -> dict[str, Tokens]:
        """The tokens of each role, in a copy."""
        with self._lock:
            return dict(self._by_role)
