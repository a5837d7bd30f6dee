"""A group of engines, each a Ray actor, behind the protocol of one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from rllib_nlac.engine.protocol import Engine, EngineError, Handed, HandOver, WeightsMissing
from rllib_nlac.engine.shared import SharedState
from rllib_nlac.engine.token_usage import Tokens
from rllib_nlac.engine.weight_transfer import Delivery, Sent
from rllib_nlac.types import Generation, Request, Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Announced:
    """One set of weights that the engines have to serve.

    Attributes:
        number: Counts all sets that were ever announced, so that of two the newer is known, even after a restore, which gives
            old versions again.
        version: Version of the weights.
        state: Where they are in Ray's object store, in a tuple, or Ray would fetch them wherever this record goes.
    """

    number: int
    version: int
    state: tuple[ray.ObjectRef]


class RemoteEngines(Engine):
    """Several engine actors as one engine. It pickles with all that an engine must know: whoever gets a copy can make use of
    engines that have just started again.

    Args:
        actors: Handles of ``EngineActor``.
        timeout_s: After so long without an answer a call raises. A lost engine starts again within it.
        announced: What the engines have to serve.
        pids: The engines' processes, as far as they are known.
        transfer: Backend of vLLM's weight transfer; "" where Ray's object store carries the weights. A copy of this object has
            none: it gives engines that have started again what was announced, and nothing new.
        workers: Number of vLLM workers of each engine.
    """

    MAX_REFUSALS = 10  # in a row; an engine that is lost again and again is not lost by accident
    AT_ONCE_S = 5.0  # for what is only reported

    def __init__(
        self,
        actors: Sequence[Any],
        timeout_s: float,
        announced: Mapping[Weights, Announced] | None = None,
        pids: Mapping[int, int] | None = None,
        transfer: str = "",
        workers: int = 1,
    ) -> None:
        self._actors = list(actors)
        self._timeout_s = timeout_s
        self._announced = dict(announced or {})
        self._pids = dict(pids or {})
        self._waiting: dict[Any, tuple[int, int, Request]] = {}  # by the call: ticket, engine, request
        self._silent_since = time.monotonic()  # since an engine has answered, or was asked after a pause
        self._tokens_then: dict[int, int] = {}  # what each engine had generated when it was last asked
        self._next_ticket = self._refusals = 0
        self._last_number = max((known.number for known in self._announced.values()), default=0)
        self.transfer, self._workers = transfer, workers
        self.num_restarts = 0

    def __reduce__(self) -> tuple:
        return RemoteEngines, (self._actors, self._timeout_s, self._announced, self._pids)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        shares = {i: list(requests[i :: len(self._actors)]) for i in range(len(self._actors)) if len(requests) > i}
        answers: list[Generation | None] = [None] * len(requests)
        todo = dict(shares)
        while todo:
            announced = dict(self._announced)  # another thread may announce more before they answer
            asked = {self._ask(engine, share): engine for engine, share in todo.items()}
            for engine, answer in self._answers(asked, "generate"):
                if answer is not None:
                    answers[engine :: len(self._actors)] = self._checked(answer, todo[engine], announced)
                    del todo[engine]
        return answers  # type: ignore[return-value]

    def submit(self, requests: Sequence[Request]) -> list[int]:
        tickets = []
        if not self._waiting:
            self._silent_since = time.monotonic()
        for request in requests:
            engine = self._next_ticket % len(self._actors)
            self._waiting[self._ask(engine, [request])] = (self._next_ticket, engine, request)
            tickets.append(self._next_ticket)
            self._next_ticket += 1
        return tickets

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        finished: list[tuple[int, Generation]] = []
        while self._waiting and not finished:
            references = list(self._waiting)
            silence = self._silent_since + self._timeout_s - time.monotonic()
            limit = max(0.0, silence if patience_s is None else min(patience_s, silence))
            first, _ = ray.wait(references, num_returns=1, timeout=limit)
            if not first and limit < silence:
                return []
            self._silent_since = time.monotonic()
            if not first and all(self._has_worked(engine) for engine in {engine for _, engine, _ in self._waiting.values()}):
                continue  # for others, whose requests came first
            if not first:
                names = self._names(engine for _, engine, _ in self._waiting.values())
                raise EngineError(
                    f"{names} answered none of {len(references)} requests within {self._timeout_s:g} s "
                    "(engine_config: timeout_s): an engine hangs, is slower than that, or could not be started again"
                )
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
            asked = [self._waiting.pop(reference) for reference in ready]
            answers = self._answers({r: engine for r, (_, engine, _) in zip(ready, asked, strict=True)}, "generate")
            for (ticket, engine, request), (_, answer) in zip(asked, answers, strict=True):
                if answer is None:
                    self._waiting[self._ask(engine, [request])] = (ticket, engine, request)
                else:
                    finished.append((ticket, self._checked(answer, [request])[0]))
        return finished

    def withdraw(self) -> None:
        self._waiting.clear()  # the engines answer them to nobody, before anything that must stand alone

    @property
    def takes(self) -> HandOver:
        return HandOver.KEEPS if self.transfer else HandOver.PUTS

    def take(self, weights: Weights, version: int, handed: Handed) -> int:
        if handed.state is None:
            assert handed.send is not None
            return self.receive_weights(weights, version, handed.send, handed.lent)
        return self.set_shared_weights(weights, version, handed.state, handed.lent)

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        return self.set_shared_weights(weights, version, ray.put(SharedState(state)))

    def set_shared_weights(self, weights: Weights, version: int, state: ray.ObjectRef, lent: bool = False) -> int:
        """As ``set_weights``, of a ``SharedState`` that is in Ray's object store already.

        It is there once, however many engines read it, and its reference is kept, for those that start again.

        Args:
            weights: Name of the set.
            version: Its version.
            state: The reference.
            lent: Whether another process has put it there, with whose end it is lost. Engines read that, and meanwhile this
                process puts its own copy beside it.
        """
        self._last_number += 1
        self._announced[weights] = Announced(self._last_number, version, (state,))
        asked = self._send(range(len(self._actors)), weights)
        if lent:
            self._keep(weights)
        return self._agreed(weights, self._received(asked))

    def receive_weights(
        self, weights: Weights, version: int, send: Callable[[Delivery | None], Sent], lent: bool = False
    ) -> int:
        """As ``set_shared_weights``, of weights that the learner sends by vLLM's weight transfer.

        If the transfer fails, all engines start again and take the learner's copy from the object store. The store carries all
        later weights, too.

        Args:
            weights: Name of the set.
            version: Version of the set.
            send: Has the learner send the set and put a copy into the store; without a delivery it only does the latter.
            lent: As for ``set_shared_weights``.
        """
        # A number that was given once is never given again, or an engine that has what was then sent would keep that.
        self._last_number += 1
        number, delivery = self._last_number, None
        if self.transfer:
            delivery = Delivery(tuple(self._actors), self.transfer, self._workers, weights, version, number, self._timeout_s)
        try:
            sent = send(delivery)
        except BaseException:
            self._start_again()  # they may wait for a learner that is lost
            raise
        self._announced[weights] = Announced(number, version, (sent.state,))
        if lent:
            self._keep(weights)
        if sent.fault is not None:
            logger.warning(
                "vLLM's transfer of weights (%s) failed. The engines start again, and from now on Ray's object store carries "
                "the weights: %s",
                *(self.transfer, sent.fault),
            )
            self.transfer = ""
            self._start_again()
        if not sent.answers:
            return self._agreed(weights, self._give(range(len(self._actors)), weights))
        return self._agreed(weights, [self._note(engine, answer) for engine, answer in enumerate(sent.answers)])

    def _start_again(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=False)

    def seconds_rested(self) -> list[float] | None:
        return self._at_once("seconds_rested")

    def tokens_so_far(self) -> list[dict[str, Tokens]]:
        return self._at_once("tokens_so_far")

    def _at_once(self, question: str) -> list[Any]:
        try:
            return ray.get([getattr(actor, question).remote() for actor in self._actors], timeout=self.AT_ONCE_S)
        except ray.exceptions.RayError:  # a timeout is one
            return []

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _ask(self, engine: int, requests: list[Request]) -> Any:
        asked = {request.weights for request in requests}
        numbers = {weights: known.number for weights, known in self._announced.items() if weights in asked}
        return self._actors[engine].generate.remote(requests, numbers)

    def _checked(
        self, answers: list[Generation], requests: list[Request], known: Mapping[Weights, Announced] | None = None
    ) -> list[Generation]:
        """Refuses answers of other or older weights than those that were announced, by default those that are now."""
        for answer, request in zip(answers, requests, strict=True):
            weights = request.weights
            announced = (self._announced if known is None else known).get(weights)
            if answer.weights is not weights or (announced and answer.weight_version < announced.version):
                raise EngineError(
                    f"an engine answered with version {answer.weight_version} of the {answer.weights} weights, and "
                    f"{f'version {announced.version} of ' if announced else ''}the {weights} weights were asked for"
                )
        return answers

    def _give(self, engines: Iterable[int], weights: Weights) -> list[int]:
        """Sends one announced set to engines; their checksums."""
        return self._received(self._send(engines, weights))

    def _send(self, engines: Iterable[int], weights: Weights) -> dict[Any, int]:
        """The calls, and of which engine each is."""
        announced = self._announced[weights]
        arguments = (weights, announced.version, announced.number, *announced.state)
        return {self._actors[engine].set_weights.remote(*arguments): engine for engine in engines}

    def _received(self, asked: Mapping[Any, int]) -> list[int]:
        return [self._note(engine, answer) for engine, answer in self._answers(asked, "set_weights")]

    def _keep(self, weights: Weights) -> None:
        """Puts this process's own copy of an announced set in the place of another's, which is lost when that one ends."""
        announced = self._announced[weights]
        with contextlib.suppress(ray.exceptions.RayError):  # it ended just now, and the run will know by its own call
            kept = tuple(ray.put(ray.get(state, timeout=self._timeout_s)) for state in announced.state)
            self._announced[weights] = replace(announced, state=kept)

    def _note(self, engine: int, answer: tuple[int, int]) -> int:
        """Checksum in an engine's answer to new weights; the engine's process id is noted."""
        checksum, pid = answer
        self.num_restarts += self._pids.get(engine, pid) != pid
        self._pids[engine] = pid
        return checksum

    def _agreed(self, weights: Weights, checksums: Sequence[int]) -> int:
        if len(set(checksums)) > 1:
            version = self._announced[weights].version
            raise EngineError(f"the engines disagree about version {version} of the {weights} weights: {checksums}")
        return checksums[0]

    def _answers(self, asked: Mapping[Any, int], call: str) -> list[tuple[int, Any]]:
        """What each engine answered, by its index; None of one that refused and has been given its weights now."""
        if late := self._stalled(asked, call):
            raise EngineError(
                f"{self._names(late)} did not answer {call}() within {self._timeout_s:g} s (engine_config: timeout_s): it "
                "hangs, is slower than that, or could not be started again"
            )
        answers: list[tuple[int, Any]] = []
        refused = set()
        for reference, engine in asked.items():
            try:
                answers.append((engine, ray.get(reference)))
            except WeightsMissing:
                refused.add(engine)
                answers.append((engine, None))
            except ray.exceptions.RayError as error:
                raise EngineError(f"{self._names([engine])} failed in {call}(): {error}") from error
        self._refusals = self._refusals + 1 if refused else 0
        if self._refusals > self.MAX_REFUSALS:
            raise EngineError(f"{self._names(refused)} started again {self._refusals} times in a row without an answer")
        if refused:
            # The policy's come last, so that they are what serves next without another swap.
            for weights in sorted(self._announced, key=lambda weights: weights is Weights.POLICY):
                self._give(refused, weights)
        return answers

    def _stalled(self, asked: Mapping[Any, int], call: str) -> set[int]:
        """Engines that owe an answer and have been silent for ``timeout_s``, or half as long again; none once all have.

        One that answers other requests meanwhile, or some of a wave, is slow and not stalled.
        """
        references = list(asked)
        if call != "generate":
            _, late = ray.wait(references, num_returns=len(references), timeout=self._timeout_s)
            return {asked[reference] for reference in late}
        silent: Counter[int] = Counter()  # for how many halves of the time
        while True:
            _, late = ray.wait(references, num_returns=len(references), timeout=self._timeout_s / 2)
            owing = {asked[reference] for reference in late}
            for engine in owing:
                silent[engine] = 0 if self._has_worked(engine) else silent[engine] + 1
            stalled = {engine for engine in owing if silent[engine] > 1}
            if stalled or not owing:
                return stalled

    def _has_worked(self, engine: int) -> bool:
        """Whether it has generated answers since this was last asked, the first time whether it says how many."""
        try:
            told = ray.get(self._actors[engine].tokens_so_far.remote(), timeout=self.AT_ONCE_S)
        except ray.exceptions.RayError:
            return False
        now = sum(each.generated for each in told.values())
        before, self._tokens_then[engine] = self._tokens_then.get(engine), now
        return now != before

    def _names(self, engines: Iterable[int]) -> str:
        known = [(engine, self._pids.get(engine)) for engine in sorted(set(engines))]
        return " and ".join(f"engine {engine} ({f'pid {pid}' if pid else 'not yet started'})" for engine, pid in known)
