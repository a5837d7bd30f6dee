"""An OpenAI-compatible endpoint behind the engine protocol: messages out, text back. It samples and cannot be trained."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from rllib_nlac.sampling.chat import Chat
from rllib_nlac.sampling.engine import EngineError
from rllib_nlac.types import Generation, Request, Weights

ENDPOINT_KEYS = ("base_url", "model", "api_key_env", "max_concurrency", "max_retries", "timeout_s")


class EndpointEngine:
    """Asks the endpoint with the official client, which retries with backoff what may be retried.

    Args:
        chat: Only keeps the books: token ids of an answer are its own tokenizer's, log-probabilities are NaN.
        base_url: As in ``http://localhost:8000/v1``.
        model: The model's name there.
        api_key_env: Name of the environment variable that holds the key.
        max_concurrency: Requests under way at the same time.
        max_retries: Retries of a request before it fails.
        timeout_s: Of one attempt.

    Raises:
        EngineError: The key's variable is not set.
    """

    def __init__(
        self, chat: Chat, base_url: str, model: str, api_key_env: str = "OPENAI_API_KEY", max_concurrency: int = 32,
        max_retries: int = 5, timeout_s: float = 120.0,
    ) -> None:  # fmt: skip
        import openai

        key = os.environ.get(api_key_env)
        if not key and "api.openai.com" in base_url:
            raise EngineError(f"{base_url} needs a key: set the environment variable {api_key_env}")
        self._client = openai.OpenAI(base_url=base_url, api_key=key or "none", max_retries=max_retries, timeout=timeout_s)
        self._chat, self._model, self._url = chat, model, base_url
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="endpoint")
        self._waiting: dict[Future[Generation], int] = {}
        self._next_ticket = 0

    def generate(self, requests: Sequence[Request], weights: Weights = Weights.POLICY) -> list[Generation]:
        return list(self._threads.map(self._ask, requests))

    def submit(self, requests: Sequence[Request]) -> list[int]:
        tickets = list(range(self._next_ticket, self._next_ticket + len(requests)))
        self._next_ticket += len(requests)
        self._waiting.update({self._threads.submit(self._ask, r): t for r, t in zip(requests, tickets, strict=True)})
        return tickets

    def poll(self) -> list[tuple[int, Generation]]:
        if not self._waiting:
            return []
        done, _ = wait(self._waiting, return_when=FIRST_COMPLETED)
        return [(self._waiting.pop(future), future.result()) for future in done]

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> float:
        raise EngineError(f"the model behind {self._url} cannot be trained from here: give a language_model instead")

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, request: Request) -> Generation:
        import openai

        messages: Any = [message._asdict() for message in request.messages]
        try:
            answer = self._client.chat.completions.create(
                model=self._model, messages=messages, max_tokens=request.max_tokens, temperature=request.temperature,
                top_p=request.top_p, seed=request.seed,
            )  # fmt: skip
        except openai.OpenAIError as error:
            # Not "from error": the client's exceptions do not survive Ray's pickling, and with one as its cause ours would not.
            raise EngineError(f"the endpoint {self._url} failed: {type(error).__name__}: {error}") from None
        if not answer.choices:
            raise EngineError(f"the endpoint {self._url} answered without choices: {answer}")
        choice = answer.choices[0]
        ids = self._chat.encode(choice.message.content or "")
        logprobs = np.full(len(ids), np.nan, np.float32)
        return Generation(request.prompt_ids, ids, logprobs, choice.finish_reason != "length", weight_version=0)
