"""A fake engine for unit tests: answers from a function of the prompt's text, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.protocol import LocalEngine
from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.token_usage import TokenUsage
from rllib_nlac.types import Generation, Request, Weights


class CutOff(str):
    """An answer that parses and that its limit cut off all the same."""


class Raw(str):
    """An answer whose control tokens are sampled as such, where others are text."""


class ScriptedEngine(LocalEngine):
    """``answer(prompt_text, weights)`` says what is generated; None stands for noise cut off by its limit."""

    def __init__(self, chat: Chat, answer: Callable[[str, Weights], str | None], version: int = 0) -> None:
        self.chat, self.answer, self.version = chat, answer, version
        self.calls: list[tuple[Weights, list[str]]] = []
        self.requests: list[tuple[Weights, Request]] = []
        self._queue: list[tuple[int, Request]] = []
        self._next = 0
        self.token_usage = TokenUsage()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        for weights in sorted({request.weights for request in requests}):
            self.calls.append((weights, [self.text(request) for request in requests if request.weights is weights]))
        return [self._generation(request, request.weights) for request in requests]

    def submit(self, requests: Sequence[Request]) -> list[int]:
        tickets = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        self._queue += zip(tickets, requests, strict=True)
        return tickets

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        if not self._queue:
            return []
        ticket, request = self._queue.pop()  # the last first: nobody may rely on an order
        return [(ticket, self._generation(request, Weights.POLICY))]

    def withdraw(self) -> None:
        self._queue.clear()

    def set_weights(self, weights: Weights, version: int, state) -> int:
        self.version = version
        return checksum(state.values())

    def stop(self) -> None:
        self._queue.clear()

    def text(self, request: Request) -> str:
        return self.chat.tokenizer.decode(list(request.prompt_ids))

    def _generation(self, request: Request, weights: Weights) -> Generation:
        self.requests.append((weights, request))
        answer = self.answer(self.text(request), weights)
        ids = self.chat.encode(answer) if answer is not None else (5, 6, 7)
        if isinstance(answer, Raw):
            ids = (*self.chat.tokenizer.encode(answer, add_special_tokens=False), self.chat.end_id)
        finished = answer is not None and not isinstance(answer, CutOff)
        ids = ids[:-1] if isinstance(answer, CutOff) else ids
        return Generation(
            request.prompt_ids, ids, np.zeros(len(ids) if request.logprobs else 0, np.float32), finished, self.version, weights
        )


def last_message(prompt: str) -> str:
    """Content of a prompt's last user message, in the tiny model's chat template."""
    return prompt.rsplit("<|user|>", 1)[1].split("<|end|>")[0]


def dialogue_of(prompt: str) -> list[tuple[str, str]]:
    """The turns in a prompt, with their replies, in the tiny model's chat template."""
    turns = prompt.split("<|assistant|>")[1:-1]
    return [(turn.split("<|end|>")[0], turn.split("<|user|>")[1].split("<|end|>")[0]) for turn in turns]
