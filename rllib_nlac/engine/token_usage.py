"""Counts the tokens of an engine, prompts and answers, by the role that each request names."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rllib_nlac.types import Generation, Request

TOKENS, PROMPT_TOKENS, CACHED_TOKENS = "tokens", "prompt_tokens", "cached_tokens"  # in the results, by role


class Tokens(NamedTuple):
    """Tokens of the answered requests of one role.

    Attributes:
        prompt: Tokens of the prompts, including those that a prefix cache held.
        generated: Tokens of the answers.
        cached: Tokens of the prompts that a prefix cache held.
    """

    prompt: int = 0
    generated: int = 0
    cached: int = 0


class TokenUsage:
    """Tokens since the start of the engine. Withdrawn requests are not counted."""

    num_unstructured = 0  # answers whose form was asked for and not enforced

    def __init__(self) -> None:
        self._by_role: dict[str, Tokens] = {}
        self._lock = threading.Lock()  # an endpoint answers in many threads

    def book(self, request: Request, generation: Generation) -> None:
        """Counts one answer; an engine calls it as soon as it has one."""
        with self._lock:
            prompt, generated, cached = self._by_role.get(request.role, Tokens())
            self._by_role[request.role] = Tokens(
                prompt + len(request.prompt_ids), generated + len(generation.token_ids), cached + generation.cached_tokens
            )

    def so_far(self) -> dict[str, Tokens]:
        """The tokens of each role, in a copy."""
        with self._lock:
            return dict(self._by_role)
