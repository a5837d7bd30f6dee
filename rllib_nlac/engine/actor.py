"""One engine in a process of its own: a Ray actor that many callers ask at the same time."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rllib_nlac.engine.protocol import EngineError, LocalEngine, WeightsMissing
from rllib_nlac.engine.token_usage import Tokens
from rllib_nlac.types import Generation, Request, Weights


class EngineActor:
    """One engine in a process of its own, answering many callers with continuous batching.

    One thread owns the engine; calls wait for it. Where the engine does not mix weight sets, requests for another set than the
    policy's wait until the running ones are answered, in the order of their arrival. Each call says which announcements it
    rests on: an engine that has started again and knows an older one, or none, refuses until it is given the weights.
    """

    def __init__(self, make: Callable[[], LocalEngine]) -> None:
        self._engine = make()
        self._given: dict[Weights, tuple[int, int]] = {}  # of each set the announcement's number and the checksum
        self._group = ""  # the transfer that its workers are connected with
        self._inbox: deque[tuple[str, tuple, Future]] = deque()
        self._arrived = threading.Condition()
        self._rested = 0.0  # seconds
        self._resting_since: float | None = None  # while there is nothing to do
        threading.Thread(target=self._work, daemon=True).start()

    def generate(self, requests: Sequence[Request], numbers: Mapping[Weights, int]) -> list[Generation]:
        """Answers each request under the announcement of its weights' number, or a newer one.

        Raises:
            WeightsMissing: This engine was never given those.
        """
        return self._hand_over("generate", (list(requests), numbers))

    def set_weights(self, weights: Weights, version: int, number: int, state: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Takes weights, unless it has these or newer ones; returns their checksum and the process id."""
        return self._hand_over("set_weights", (weights, version, number, state)), os.getpid()

    def join_transfer(self, group: str, init_info: dict[str, Any]) -> None:
        """Connects the engine's workers with a trainer's end of vLLM's weight transfer."""
        self._hand_over("join_transfer", (group, init_info))

    def transfer_group(self) -> str:
        """The group of the last ``join_transfer`` of this process; "" where there was none."""
        return self._group

    def receive_weights(self, weights: Weights, version: int, number: int, update_info: dict[str, Any]) -> tuple[int, int]:
        """As ``set_weights``, of weights that a trainer sends by vLLM's weight transfer."""
        return self._hand_over("receive_weights", (weights, version, number, update_info)), os.getpid()

    def seconds_rested(self) -> float:
        """How long it has had nothing to do since it started."""
        with self._arrived:
            return self._rested + (0.0 if self._resting_since is None else time.monotonic() - self._resting_since)

    def tokens_so_far(self) -> dict[str, Tokens]:
        """What it has answered since it started, by role."""
        return self._engine.token_usage.so_far()

    def _hand_over(self, call: str, arguments: tuple) -> Any:
        future: Future = Future()
        with self._arrived:
            self._inbox.append((call, arguments, future))
            self._arrived.notify()
        return future.result()

    def _join(self, group: str, init_info: dict[str, Any]) -> None:
        self._group = ""
        self._engine.join_transfer(init_info)  # type: ignore[attr-defined]  # only asked of engines that have it
        self._group = group

    def _take_weights(self, call: str, weights: Weights, version: int, number: int, what: Any) -> int:
        if self._given.get(weights, (0, 0))[0] < number:
            self._given.pop(weights, None)  # should it fail, neither the former nor the new ones are served
            self._given[weights] = (number, getattr(self._engine, call)(weights, version, what))
        return self._given[weights][1]

    def _require(self, numbers: Mapping[Weights, int]) -> None:
        for weights, number in numbers.items():
            given = self._given.get(weights, (0, 0))[0]
            if given < number:
                raise WeightsMissing(f"this engine has started again without the {weights} weights ({given} of {number})")

    def _work(self) -> None:
        running: dict[int, tuple[list, dict[int, int], Future]] = {}
        while True:
            with self._arrived:
                if not self._inbox and not running:
                    self._resting_since = time.monotonic()
                    while not self._inbox:
                        self._arrived.wait()
                    self._rested += time.monotonic() - self._resting_since
                self._resting_since = None
                batch = list(self._take(bool(running)))
            for call, arguments, future in batch:
                try:
                    if call == "join_transfer":
                        self._join(*arguments)
                        future.set_result(None)
                        continue
                    if call != "generate":
                        future.set_result(self._take_weights(call, *arguments))
                        continue
                    requests, numbers = arguments
                    self._require(numbers)
                    if not requests or self._stands_alone(call, arguments):
                        future.set_result(self._engine.generate(requests))
                        continue
                    tickets = self._engine.submit(requests)
                    job = ([None] * len(requests), {ticket: i for i, ticket in enumerate(tickets)}, future)
                    running.update(dict.fromkeys(tickets, job))
                except Exception as error:
                    future.set_exception(error)
            try:
                finished = self._engine.poll() if running else []
            except Exception as error:
                for future in {id(job[2]): job[2] for job in running.values()}.values():
                    future.set_exception(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
                running.clear()
                self._engine.withdraw()
                continue
            for ticket, generation in finished:
                answers, places, future = running.pop(ticket)
                answers[places[ticket]] = generation
                if all(answer is not None for answer in answers):
                    future.set_result(answers)

    def _take(self, busy: bool) -> Any:
        """The calls that may start now: beside running requests only those that can share their batch."""
        while self._inbox:
            call, arguments, _ = self._inbox[0]
            stands_alone = self._stands_alone(call, arguments)
            if stands_alone and busy:
                return
            yield self._inbox.popleft()
            if stands_alone:
                return
            busy = True

    def _stands_alone(self, call: str, arguments: tuple) -> bool:
        """Whether a call must run alone."""
        if call != "generate" or self._engine.mixes_sets:
            return call != "generate"
        return any(request.weights is not Weights.POLICY for request in arguments[0])
