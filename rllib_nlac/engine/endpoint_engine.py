"""An OpenAI-compatible endpoint behind the engine protocol: messages out, text back. It samples and cannot be trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from ray.rllib.utils.annotations import override

from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.protocol import Engine, EngineError
from rllib_nlac.engine.token_usage import Tokens, TokenUsage
from rllib_nlac.inputs.endpoint import Answer, Endpoint, EndpointError, RequestRefusedError
from rllib_nlac.inputs.texts import readable
from rllib_nlac.inputs.tool_calls import for_endpoint
from rllib_nlac.types import Generation, Request, Weights

ENDPOINT_KEYS = ("base_url", "model", "api_key_env", "max_concurrency", "max_retries", "timeout_s")
ENDPOINT_CONTEXT = 1_000_000
MOST_REFUSED = 8  # requests more than were answered: then it is no single dialogue's fault

logger = logging.getLogger(__name__)


class EndpointChat(Chat):
    """Keeps the books of a dialogue with an endpoint, whose own template nobody here knows.

    Args:
        own: The chat of the local model, whose tokenizer counts.
        max_context: The most tokens of prompt and answer together; where None, the endpoint minds its own limit.
    """

    def __init__(self, own: Chat, max_context: int | None = None) -> None:
        super().__init__(own.tokenizer, max_context or ENDPOINT_CONTEXT)

    @override(Chat)
    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Never: what the local template opens was not sent, and says nothing of the answer."""
        return False


class EndpointEngine(Engine):
    """Asks an endpoint, many requests side by side.

    Args:
        chat: Only keeps the books: token ids of an answer are its own tokenizer's, log-probabilities are NaN.
        base_url: As in ``http://localhost:8000/v1``.
        model: The model's name there.
        max_concurrency: Requests under way at the same time.
        timeout_s: Time limit of one attempt, in seconds.
        endpoint: ``Endpoint``'s other arguments.

    Raises:
        EngineError: The key's variable is not set.
    """

    def __init__(
        self, chat: Chat, base_url: str, model: str, max_concurrency: int = 32, timeout_s: float = 120.0, **endpoint: Any
    ) -> None:
        try:
            self._endpoint = Endpoint(base_url, model, timeout_s=timeout_s, **endpoint)
        except EndpointError as error:
            raise EngineError(str(error)) from None
        self._chat = chat
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="endpoint")
        self._waiting: dict[Future[Generation], int] = {}
        self._next_ticket = self._num_answered = self._num_refused = 0
        self.token_usage = TokenUsage()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return list(self._threads.map(self._ask, requests))

    def submit(self, requests: Sequence[Request]) -> list[int]:
        tickets = list(range(self._next_ticket, self._next_ticket + len(requests)))
        self._next_ticket += len(requests)
        self._waiting.update({self._threads.submit(self._ask, r): t for r, t in zip(requests, tickets, strict=True)})
        return tickets

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        if not self._waiting:
            return []
        done, _ = wait(self._waiting, patience_s, return_when=FIRST_COMPLETED)
        return [(self._waiting.pop(future), future.result()) for future in done]

    def withdraw(self) -> None:
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        raise EngineError(
            f"the model behind {self._endpoint.base_url} cannot be trained from here: give a language_model instead"
        )

    def tokens_so_far(self) -> list[dict[str, Tokens]]:
        return [self.token_usage.so_far()]

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _without_an_answer(self, error: RequestRefusedError) -> Answer:
        """A turn that is empty and cut off, for one dialogue that is refused must not end all others.

        Raises:
            EngineError: So many are refused that something else is wrong.
        """
        self._num_refused += 1
        advice = "If it is about the length, set max_context to what that model reads"
        if self._num_refused > self._num_answered + MOST_REFUSED:
            raise EngineError(
                f"{error}. {self._num_refused} requests were refused, {self._num_answered} answered. {advice}"
            ) from None
        logger.warning("%s. Its turn is empty, and the run goes on (%d so far). %s", error, self._num_refused, advice)
        return Answer("", finished=False)

    def _ask(self, request: Request) -> Generation:
        try:
            answer = self._endpoint.ask(
                **for_endpoint(request.messages),
                may_be_empty=True,
                pattern=request.pattern,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
            )
            self._num_answered += 1
        except RequestRefusedError as error:
            answer = self._without_an_answer(error)
        except EndpointError as error:
            raise EngineError(str(error)) from None
        ids = self._chat.encode(readable(answer.text)[0])
        logprobs = np.full(len(ids) if request.logprobs else 0, np.nan, np.float32)
        generation = Generation(request.prompt_ids, ids, logprobs, answer.finished, weight_version=0)
        self.token_usage.book(request, generation)
        self.token_usage.num_unstructured = self._endpoint.num_unstructured
        return generation
