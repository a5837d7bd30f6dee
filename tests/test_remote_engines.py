"""Engine actors and those who ask them: requests that are refused, weights that change meanwhile, processes that end."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch

from rllib_nlac.engine import remote
from rllib_nlac.engine.actor import EngineActor
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.engine.shared import SharedState, checksum
from rllib_nlac.engine.token_usage import Tokens, TokenUsage
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.types import Generation, Request, Weights


def simple_engine() -> type:
    """An engine whose every token is the first of its weights; it refuses a prompt of 9s. Within a function it reaches an actor
    that cannot import this file."""

    class Simple:
        mixes_sets = True

        def __init__(self) -> None:
            self.token_usage, self.pending, self.served, self.next = TokenUsage(), {}, {}, 0

        def submit(self, requests):
            tickets = []
            for request in requests:
                self.pending[self.next] = request
                tickets.append(self.next)
                self.next += 1
                if request.prompt_ids[0] == 9:
                    raise ValueError("this prompt is refused")
            return tickets

        def poll(self, patience_s=None):
            if any(request.prompt_ids[0] == 8 for request in self.pending.values()):
                raise ValueError("it breaks")
            done, self.pending = self.pending, {}
            return [(ticket, self.answer(request)) for ticket, request in done.items()]

        def answer(self, request):
            version, value = self.served.get(request.weights, (0, 0))
            return Generation(request.prompt_ids, (value,), np.zeros(1, np.float32), True, version, request.weights)

        def withdraw(self):
            self.pending.clear()

        def set_weights(self, weights, version, state):
            self.served[weights] = version, int(next(iter(state.values()))[0])
            return checksum(state.values())

    return Simple


def asking(*ids: int) -> list[Request]:
    return [Request((each,), 1) for each in ids]


class TestActor:
    def test_an_engine_that_breaks_answers_the_next_call(self):
        """Fails where what the engine still holds is answered to nobody beside the next call's requests."""
        actor = EngineActor(simple_engine())
        with pytest.raises(EngineError, match="the engine failed: ValueError: it breaks"):
            actor.generate(asking(1, 8), {})
        assert [generation.prompt_ids for generation in actor.generate(asking(2, 3), {})] == [(2,), (3,)]


def test_of_requests_one_of_which_vllm_refuses_none_stays():
    """Fails where those before it are answered, whom nobody has a ticket for."""
    added, aborted = [], []

    def add(name, prompt, *_, **__):
        if prompt["prompt_token_ids"] == [9]:
            raise ValueError("this prompt is refused")
        added.append(name)

    engine = object.__new__(VLLMEngine)
    engine._next_ticket, engine._pending, engine._end_ids = 4, {}, [1]
    engine._adapter_for = lambda weights: None
    engine._llm = SimpleNamespace(add_request=add, abort_request=aborted.extend)
    with pytest.raises(ValueError, match="refused"):
        engine._enqueue(asking(1, 2, 9, 3))
    assert added == aborted == ["4", "5"] and not engine._pending
    assert engine._enqueue(asking(1)) == [7] and list(engine._pending) == ["7"]


def test_weights_that_are_announced_while_requests_run_make_no_error(monkeypatch):
    """As in an evaluation beside training. An answer by what was announced when it was asked for is right."""
    engines = RemoteEngines([SimpleNamespace()], timeout_s=1.0)

    def announce(version: int) -> None:
        engines._announced[Weights.POLICY] = SimpleNamespace(number=version, version=version, state=())

    announce(1)
    version = [1]

    def answers(asked, call):
        announce(2)
        return [(0, [Generation((1,), (2,), np.zeros(1, np.float32), True, version[0], Weights.POLICY)])]

    monkeypatch.setattr(engines, "_ask", lambda engine, requests: "a call")
    monkeypatch.setattr(engines, "_answers", answers)
    (generation,) = engines.generate(asking(1))
    assert generation.weight_version == 1
    with pytest.raises(EngineError, match="answered with version 1 of the policy weights, and version 2 of"):
        engines.generate(asking(1))  # it was asked for after that


class TestAgreement:
    """Engines that say what they hold, without processes of their own."""

    def engines(self, count: int, weights: Weights) -> RemoteEngines:
        engines = RemoteEngines([SimpleNamespace()] * count, timeout_s=1.0)
        engines._announced[weights] = SimpleNamespace(number=1, version=3, state=())
        return engines

    def test_engines_that_hold_different_weights_are_an_error(self):
        """Fails where the learner's checksum is compared with the first engine's alone."""
        engines = self.engines(2, Weights.POLICY)
        assert engines._agreed(Weights.POLICY, [7, 7]) == 7
        with pytest.raises(EngineError, match="the engines disagree about version 3"):
            engines._agreed(Weights.POLICY, [7, 8])

    def test_an_answer_of_another_set_of_weights_is_an_error(self):
        answer = Generation((1,), (2,), np.zeros(1, np.float32), True, 3, Weights.POLICY)
        with pytest.raises(EngineError, match="version 3 of the policy weights, and version 3 of the target weights"):
            self.engines(1, Weights.TARGET)._checked([answer], [Request((1,), 1, weights=Weights.TARGET)])


class TestPatience:
    """With a clock of its own, in place of Ray's."""

    def waiting(self, monkeypatch, said, answers_after: float, call: str = "generate", polls: bool = False) -> float:
        """How long the only engine is waited for, which has generated ``said(seconds)`` tokens; None: it does not say."""
        clock = [0.0]

        def wait(references, num_returns, timeout):
            done = clock[0] + timeout >= answers_after
            clock[0] = answers_after if done else clock[0] + timeout
            return (references, []) if done else ([], references)

        def get(reference, timeout=None):
            if reference == "the call":
                return [Generation((1,), (2,), np.zeros(1, np.float32), True, 0, Weights.POLICY)]
            if (tokens := said(clock[0])) is None:
                raise ray.exceptions.GetTimeoutError
            return {"future": Tokens(0, tokens)}

        monkeypatch.setattr(remote, "ray", SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions))
        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        calls = {"tokens_so_far": SimpleNamespace(remote=lambda: "the tokens")}
        calls["generate"] = SimpleNamespace(remote=lambda *_: "the call")
        engines = RemoteEngines([SimpleNamespace(**calls)], timeout_s=600.0)
        try:
            if polls:
                engines.submit(asking(1))
                assert len(engines.poll()) == 1
            else:
                engines._answers({"the call": 0}, call)
        except EngineError as error:
            assert "within 600 s (engine_config: timeout_s)" in str(error)
        return clock[0]

    def test_a_wave_may_take_longer_as_long_as_answers_come(self, monkeypatch):
        """Fails where the limit is that of the whole wave: a healthy engine with a large one would end the run."""
        assert self.waiting(monkeypatch, said=lambda seconds: int(seconds), answers_after=5000.0) == 5000.0
        assert self.waiting(monkeypatch, said=lambda seconds: min(int(seconds), 299), answers_after=700.0) == 700.0

    def test_a_turn_may_wait_for_a_wave_of_others_as_long_as_that_gets_answers(self, monkeypatch):
        """An EnvRunner's turn that the engine puts off. Fails where the limit is that of the turn's own answer."""
        assert self.waiting(monkeypatch, said=lambda seconds: int(seconds), answers_after=5000.0, polls=True) == 5000.0
        assert self.waiting(monkeypatch, said=lambda seconds: None, answers_after=5000.0, polls=True) == 600.0
        assert self.waiting(monkeypatch, said=lambda seconds: 7, answers_after=5000.0, polls=True) == 1200.0

    @pytest.mark.parametrize(
        ("said", "ends"),
        [
            (lambda seconds: None, 600.0),  # its process is stopped
            (lambda seconds: 7, 900.0),  # it says something, and does nothing
            (lambda seconds: min(int(seconds), 1000), 1800.0),  # the last sign of life is seen at 1,200 s
            (lambda seconds: 7 if seconds < 800 else None, 900.0),
        ],
    )
    def test_one_that_has_nothing_to_show_is_stalled(self, monkeypatch, said, ends):
        assert self.waiting(monkeypatch, said, answers_after=1e9) == ends

    def test_weights_are_taken_in_time_or_not_at_all(self, monkeypatch):
        assert self.waiting(monkeypatch, lambda seconds: int(seconds), 1e9, "set_weights") == 600.0


@pytest.mark.long
def test_weights_outlive_the_learner_that_put_them_into_the_store(ray_session):
    """An engine that starts again after the learner has ended is given them all the same."""

    class Learner:
        def put(self) -> list:
            return [ray.put(SharedState({"weight": torch.full((300_000,), 7.0)}))]

    learner = ray.remote(num_cpus=0)(Learner).remote()
    actor = ray.remote(num_cpus=0, max_concurrency=10, max_restarts=-1, max_task_retries=-1)(EngineActor)
    engines = RemoteEngines([actor.remote(simple_engine())], timeout_s=60)
    try:
        (state,) = ray.get(learner.put.remote())
        engines.set_shared_weights(Weights.POLICY, 3, state, lent=True)
        del state
        ray.kill(learner)
        os.kill(engines._pids[0], signal.SIGKILL)
        (generation,) = engines.generate(asking(1))
        assert (generation.token_ids, generation.weight_version) == ((7,), 3)
    finally:
        engines.stop()
