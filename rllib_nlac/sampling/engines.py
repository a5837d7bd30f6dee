"""From configuration to an engine: one in this process, or a group of Ray actors behind the same protocol."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import ray
import torch

from rllib_nlac.sampling.chat import Chat
from rllib_nlac.sampling.endpoint import EndpointEngine
from rllib_nlac.sampling.engine import Engine, EngineError
from rllib_nlac.sampling.vllm_engine import VLLMEngine, VLLMSettings
from rllib_nlac.sync.shared import SharedState
from rllib_nlac.types import Generation, Request, Weights

if TYPE_CHECKING:
    from rllib_nlac.language_config import LanguageConfig


_shared: WeakValueDictionary[str, VLLMEngine] = WeakValueDictionary()


def local_engine(config: LanguageConfig, chat: Chat) -> VLLMEngine:
    """An engine in this process, shared by all that ask for the same one, such as the runners of training and evaluation.

    Whoever is about to generate asks ``holds`` first: another may have put its own weights in.
    """
    arguments = _arguments(config, chat)
    name = repr(arguments[:-1])
    engine = _shared.get(name)
    if engine is None:
        _shared[name] = engine = VLLMEngine(*arguments)
    return engine


def make_engine(config: LanguageConfig, chat: Chat) -> Engine:
    """An algorithm's own engine: in its process with ``num_engines=0``, otherwise Ray actors; or an endpoint."""
    if endpoint := getattr(config, "endpoint", None):
        return EndpointEngine(chat, **endpoint)
    arguments = _arguments(config, chat)
    if config.num_engines == 0:
        return VLLMEngine(*arguments)
    weights = ray.remote(num_cpus=0, max_restarts=-1)(CurrentWeights).remote()
    # Ray starts a lost actor again and repeats the calls that it had not answered, to all callers' knowledge just late.
    options = {"num_cpus": 1, "num_gpus": config.num_gpus_per_engine, "max_restarts": -1, "max_task_retries": -1}
    actor = ray.remote(max_concurrency=1000, **options)(EngineActor)
    actors = [actor.remote(*arguments, weights) for _ in range(config.num_engines)]
    return RemoteEngines(actors, weights, config.engine_timeout_s)


def _arguments(config: LanguageConfig, chat: Chat) -> tuple[str, int, list[int], VLLMSettings, int]:
    """What ``VLLMEngine`` is built with; the seed comes last."""
    return config.model_path, chat.max_context, [chat.end_id], config.vllm_settings, config.seed or 0


class CurrentWeights:
    """An actor that knows where the current weights are, so that an engine that comes back has them before it answers."""

    def __init__(self) -> None:
        self._current: dict[Weights, tuple[int, list[ray.ObjectRef]]] = {}
        self._starts = 0

    def announce(self, weights: Weights, version: int, state: list[ray.ObjectRef]) -> None:
        """Says what every engine has to serve from now on; the reference comes in a list, or Ray would fetch it."""
        self._current[weights] = (version, state)

    def start(self) -> dict[Weights, tuple[int, list[ray.ObjectRef]]]:
        """What an engine that has just started has to serve."""
        self._starts += 1
        return dict(self._current)

    def num_starts(self) -> int:
        """How many engines have started so far, the same one again included."""
        return self._starts


class EngineActor:
    """One vLLM engine in a process of its own, answering many callers with continuous batching.

    One thread owns the engine; calls wait for it. Requests for the other set of weights wait until the running ones are
    answered, in the order of their arrival.
    """

    def __init__(
        self, model: str, max_context: int, end_ids: list[int], settings: VLLMSettings, seed: int, current: Any
    ) -> None:  # fmt: skip
        self._engine = VLLMEngine(model, max_context, end_ids, settings, seed)
        serving = ray.get(current.start.remote())
        for weights in sorted(serving, key=lambda weights: weights is Weights.POLICY):
            version, (state,) = serving[weights]
            self._engine.set_weights(weights, version, ray.get(state))
        self._inbox: deque[tuple[str, tuple, Future]] = deque()
        self._arrived = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def generate(self, requests: Sequence[Request], weights: Weights = Weights.POLICY) -> list[Generation]:
        return self._hand_over("generate", (list(requests), weights))

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        return self._hand_over("set_weights", (weights, version, state))

    def _hand_over(self, call: str, arguments: tuple) -> Any:
        future: Future = Future()
        with self._arrived:
            self._inbox.append((call, arguments, future))
            self._arrived.notify()
        return future.result()

    def _work(self) -> None:
        running: dict[int, tuple[list, dict[int, int], Future]] = {}
        while True:
            with self._arrived:
                while not self._inbox and not running:
                    self._arrived.wait()
                batch = list(self._take(bool(running)))
            for call, arguments, future in batch:
                try:
                    if call == "set_weights":
                        future.set_result(self._engine.set_weights(*arguments))
                        continue
                    requests, weights = arguments
                    if weights is not Weights.POLICY or not requests:
                        future.set_result(self._engine.generate(requests, weights))
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
                continue
            for ticket, generation in finished:
                answers, places, future = running.pop(ticket)
                answers[places[ticket]] = generation
                if all(answer is not None for answer in answers):
                    future.set_result(answers)

    def _take(self, busy: bool) -> Any:
        """What may start now: while requests run, only further ones for the policy's weights."""
        while self._inbox:
            call, arguments, _ = self._inbox[0]
            exclusive = call == "set_weights" or arguments[1] is not Weights.POLICY
            if exclusive and busy:
                return
            yield self._inbox.popleft()
            if exclusive:
                return
            busy = True


class RemoteEngines:
    """Several engine actors as one engine. It pickles, so EnvRunner actors share the same engines.

    Args:
        actors: Handles of ``EngineActor``.
        current: Handle of ``CurrentWeights``.
        timeout_s: After so long without an answer a call raises. A lost engine starts again within it.
    """

    def __init__(self, actors: Sequence[Any], current: Any, timeout_s: float) -> None:
        self._actors = list(actors)
        self._current = current
        self._timeout_s = timeout_s
        self._waiting: dict[Any, int] = {}
        self._next_ticket = 0

    def generate(self, requests: Sequence[Request], weights: Weights = Weights.POLICY) -> list[Generation]:
        shares = [list(requests[i :: len(self._actors)]) for i in range(len(self._actors))]
        asked = [actor.generate.remote(share, weights) for actor, share in zip(self._actors, shares, strict=True) if share]
        answers: list[Generation | None] = [None] * len(requests)
        for start, share in enumerate(self._get(asked, "generate")):
            answers[start :: len(self._actors)] = share
        return answers  # type: ignore[return-value]

    def submit(self, requests: Sequence[Request]) -> list[int]:
        tickets = []
        for request in requests:
            actor = self._actors[self._next_ticket % len(self._actors)]
            self._waiting[actor.generate.remote([request], Weights.POLICY)] = self._next_ticket
            tickets.append(self._next_ticket)
            self._next_ticket += 1
        return tickets

    def poll(self) -> list[tuple[int, Generation]]:
        if not self._waiting:
            return []
        references = list(self._waiting)
        first, _ = ray.wait(references, num_returns=1, timeout=self._timeout_s)
        if not first:
            raise EngineError(
                f"no engine answered one of {len(references)} requests within {self._timeout_s:g} s (engine_timeout_s): an "
                "engine hangs, is slower than that, or could not be started again"
            )
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [(self._waiting.pop(r), answer[0]) for r, answer in zip(ready, self._get(ready, "generate"), strict=True)]

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        shared = ray.put(SharedState(state))  # once into the object store, however many engines read it
        self._get([self._current.announce.remote(weights, version, [shared])], "announce")
        checksums = self._get([actor.set_weights.remote(weights, version, shared) for actor in self._actors], "set_weights")
        if len(set(checksums)) > 1:
            raise EngineError(f"the engines disagree about version {version} of the {weights} weights: {checksums}")
        return checksums[0]

    @property
    def num_restarts(self) -> int:
        """How often a lost engine has been started again."""
        return self._get([self._current.num_starts.remote()], "num_starts")[0] - len(self._actors)

    def stop(self) -> None:
        for actor in (*self._actors, self._current):
            ray.kill(actor)

    def _get(self, references: Sequence[Any], call: str) -> list:
        started = time.monotonic()
        try:
            return ray.get(list(references), timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            waited = time.monotonic() - started
            raise EngineError(f"an engine did not answer {call}() within {waited:.0f} s (engine_timeout_s)") from error
        except ray.exceptions.RayError as error:
            raise EngineError(f"an engine failed in {call}(): {error}") from error
