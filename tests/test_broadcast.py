"""Weights by broadcast into real engines: both sets serve, and the object store makes good what was lost in the middle."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from fault_runs import processes, small_config
from ray import cloudpickle
from transformers import AutoModelForCausalLM

from rllib_nlac.engine import broadcasts
from rllib_nlac.engine.buckets import Bucket, Plan
from rllib_nlac.engine.channel import ChannelError, Gathering, Sender
from rllib_nlac.engine.make import make_engine
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.shared import NotFiniteError, checksum
from rllib_nlac.engine.vllm_worker import WorkerExtension
from rllib_nlac.learner.group import LearnerLost, on_every_learner
from rllib_nlac.sync.sync import push_initial_weights, push_weights
from rllib_nlac.types import Message, Request, Weights

CPU = torch.device("cpu")
SMALL = 200_000  # bytes of a bucket, so that the shipped model has several
LIMIT_S = 10.0


def noisy(base: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * t.std() * torch.randn(t.shape, generator=generator) for name, t in base.items()}


def asks(chat, **changes) -> list[Request]:
    prompt = chat.prompt_ids((Message("user", "Guess my object."),))
    return [Request(**{"prompt_ids": prompt, "max_tokens": 8, "seed": seed, **changes}) for seed in range(3)]


def assert_serves(engine, chat, which: Weights, state, model_path: str) -> None:
    """The log-probabilities of what an engine answers are the trainer's under these weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    for generation in engine.generate(asks(chat, weights=which)):
        ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)


@pytest.fixture()
def several_buckets(monkeypatch):
    of = Plan.of
    monkeypatch.setattr(Plan, "of", staticmethod(lambda state: of(state, SMALL)))


class TestOneEngine:
    """In this process, with the learner's end in another thread."""

    def receive(self, engine, which: Weights, version: int, state, gathering: Gathering, sender: Sender) -> int:
        plan, invitation = Plan.of(state), gathering.invite(60)
        assert len(plan.buckets) > 5

        def send() -> None:
            while not gathering.all_there():
                time.sleep(0.01)
            gathering.begin()
            sender.send(state, plan, invitation, CPU)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            return engine.receive_weights(which, version, plan, invitation, 1)
        finally:
            thread.join(60)

    def test_both_sets_serve_as_if_they_had_been_given(self, engine, chat, model_path, base_weights, several_buckets):
        gathering, sender = Gathering("127.0.0.1", 2, "gloo", LIMIT_S), Sender()
        for version in (5, 6):
            states = {which: noisy(base_weights, version + 10 * (which is Weights.TARGET)) for which in Weights}
            for which in (Weights.INITIAL, Weights.TARGET, Weights.POLICY):
                received = self.receive(engine, which, version, states[which], gathering, sender)
                assert received == checksum(states[which].values())
            for which in (Weights.TARGET, Weights.POLICY, Weights.INITIAL, Weights.TARGET):
                assert_serves(engine, chat, which, states[which], model_path)
                assert engine.generate(asks(chat, weights=which))[0].weight_version == version

    def test_what_did_not_come_serves_nobody_and_is_made_good(self, engine, chat, model_path, base_weights, several_buckets):
        gathering = Gathering("127.0.0.1", 2, "gloo", LIMIT_S)
        invitation = gathering.invite(60)
        gathering.call_off()
        with pytest.raises(ChannelError, match=r"did not take the policy weights: .*called off"):
            engine.receive_weights(Weights.POLICY, 7, Plan.of(base_weights), invitation, 1)
        with pytest.raises(EngineError, match="was never given the policy weights"):
            engine.generate(asks(chat))
        state = noisy(base_weights, 7)
        engine.set_weights(Weights.POLICY, 7, state)
        assert_serves(engine, chat, Weights.POLICY, state, model_path)

    def test_weights_of_another_model_are_refused_by_name(self, engine, base_weights, several_buckets):
        gathering = Gathering("127.0.0.1", 2, "gloo", LIMIT_S)
        other = {**base_weights, "more": torch.ones(3)}
        with pytest.raises(ChannelError, match="the model has no more"):
            self.receive(engine, Weights.POLICY, 8, other, gathering, Sender())


class Learners:
    """One learner in this process."""

    is_local = True

    def __init__(self, base) -> None:
        self.base, self.states = base, {}
        self._learner = SimpleNamespace(_learner_index=0, export_weights=self.export, sender=Sender(), device=CPU, outgoing={})

    def export(self, copies=True, on_device=False, of=(Weights.POLICY, Weights.TARGET)):
        return {which: dict(state) for which, state in self.states.items()}

    def learn(self, seed: int) -> None:
        self.states = {which: noisy(self.base, seed + 100 * i) for i, which in enumerate((Weights.POLICY, Weights.TARGET))}


@pytest.fixture(scope="module")
def engines(ray_session, chat, make_config):
    config = make_config().engines(
        num_engines=2, engine_config={"weight_transfer": "collective", "cpu_kv_cache_gib": 0.25, "timeout_s": 300}
    )
    engines = make_engine(replace(config.engine_spec, broadcast_timeout_s=LIMIT_S), chat)
    yield engines
    engines.stop()


@pytest.mark.usefixtures("several_buckets")
class TestActors:
    @pytest.fixture(scope="class")
    def learners(self, base_weights):
        return Learners(base_weights)

    def push(self, learners, engines, version: int) -> None:
        learners.learn(version)
        started = time.monotonic()
        report = push_weights(learners, engines, version)
        assert report.version == version and report.num_bytes == 2 * sum(t.numel() * 4 for t in learners.base.values())
        assert time.monotonic() - started < 120 and report.num_broken == engines.broadcasts.num_broken

    def assert_serve(self, engines, learners, chat, model_path, version: int) -> None:
        for which, state in learners.states.items():
            assert_serves(engines, chat, which, state, model_path)  # which divides the questions among both
            assert {answer.weight_version for answer in engines.generate(asks(chat, weights=which))} == {version}

    def pids(self, engines) -> list[int]:
        return ray.get([actor.__ray_call__.remote(lambda engine: os.getpid()) for actor in engines._actors], timeout=300)

    def test_both_engines_serve_what_was_broadcast_once(self, engines, learners, chat, model_path):
        learners.learn(50)
        push_initial_weights(learners, engines)
        initial = learners.states[Weights.POLICY]
        groups = set()
        for version in (1, 2):
            self.push(learners, engines, version)
            self.assert_serve(engines, learners, chat, model_path, version)
            groups.add(engines.broadcasts._group._name)
        assert_serves(engines, chat, Weights.INITIAL, initial, model_path)
        assert len(groups) == 1 and engines.broadcasts.num_broken == 0

    @pytest.mark.long
    def test_an_engine_that_has_started_again_gets_them_from_the_store_and_the_next_group_has_it(
        self, engines, learners, chat, model_path, caplog
    ):
        self.push(learners, engines, 3)
        restarts, broken, group = engines.num_restarts, engines.broadcasts.num_broken, engines.broadcasts._group._name
        os.kill(self.pids(engines)[1], signal.SIGKILL)
        self.push(learners, engines, 4)
        self.assert_serve(engines, learners, chat, model_path, 4)
        assert engines.num_restarts == restarts + 1 and engines.broadcasts.num_broken > broken
        assert "a broadcast of weights broke; Ray's object store carries them" in caplog.text
        broken = engines.broadcasts.num_broken
        self.push(learners, engines, 5)
        self.assert_serve(engines, learners, chat, model_path, 5)
        assert engines.broadcasts.num_broken == broken and engines.broadcasts._group._name != group

    def test_an_engine_killed_in_the_middle_of_a_broadcast(self, engines, learners, chat, model_path, monkeypatch):
        self.push(learners, engines, 6)
        victim, broken, pack, packed = self.pids(engines)[0], engines.broadcasts.num_broken, Bucket.pack, []

        def kill_before(bucket, state, memory):
            packed.append(bucket)
            if len(packed) == 4:
                os.kill(victim, signal.SIGKILL)
            pack(bucket, state, memory)

        monkeypatch.setattr(Bucket, "pack", kill_before)
        self.push(learners, engines, 7)
        self.assert_serve(engines, learners, chat, model_path, 7)
        assert engines.broadcasts.num_broken > broken and victim not in self.pids(engines)
        broken = engines.broadcasts.num_broken
        self.push(learners, engines, 8)
        self.assert_serve(engines, learners, chat, model_path, 8)
        assert engines.broadcasts.num_broken == broken

    def test_a_learner_lost_in_the_middle_leaves_nothing_behind(self, engines, learners, chat, model_path, monkeypatch):
        """What its engines took before counts for nothing: the learner that comes after it may have other weights."""
        send = Sender.send

        def lose(sender, *arguments) -> None:
            send(sender, *arguments)
            raise LearnerLost("killed")

        with monkeypatch.context() as patch:
            patch.setattr(Sender, "send", lose)
            with pytest.raises(LearnerLost):
                self.push(learners, engines, 9)
        learners._learner.sender = Sender()  # of a new process
        learners.learn(99)
        push_weights(learners, engines, 9)
        self.assert_serve(engines, learners, chat, model_path, 9)

    def test_damage_on_the_way_is_an_error(self, engines, learners, monkeypatch):
        pack = Bucket.pack

        def damage(bucket, state, memory):
            pack(bucket, state, memory)
            memory[5] ^= 1

        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "pack", damage)
            with pytest.raises(EngineError, match=r"sync of version 10: the engine's target weights have the checksum"):
                self.push(learners, engines, 10)
        self.push(learners, engines, 11)

    def test_weights_that_are_not_finite_are_not_sent(self, engines, learners, chat, model_path):
        self.push(learners, engines, 12)
        served = dict(learners.states)
        broken = {name: tensor.clone() for name, tensor in served[Weights.POLICY].items()}
        next(iter(broken.values())).view(-1)[0] = float("nan")
        learners.states = {**served, Weights.POLICY: broken}
        with pytest.raises(NotFiniteError, match="the policy weights that version 13 would have"):
            push_weights(learners, engines, 13)
        learners.states = served
        self.assert_serve(engines, learners, chat, model_path, 12)

    def test_where_no_store_can_be_opened_the_object_store_carries_all_and_is_named(
        self, engines, learners, chat, model_path, monkeypatch, caplog
    ):
        def refuse(*arguments):
            raise RuntimeError("no route to 10.9.9.9")

        before = engines.broadcasts.num_broken
        engines.broadcasts.give_up("so that a new group is needed")
        with monkeypatch.context() as patch:
            patch.setattr(broadcasts, "Gathering", refuse)
            self.push(learners, engines, 20)
            self.assert_serve(engines, learners, chat, model_path, 20)
            self.push(learners, engines, 21)
            assert engines.broadcasts.num_broken == before + broadcasts.MAX_BROKEN_IN_A_ROW
            assert "no route to 10.9.9.9" in caplog.text and "weight_transfer: object_store" in caplog.text
        self.push(learners, engines, 22)  # nothing is tried any more
        assert engines.broadcasts.num_broken == before + broadcasts.MAX_BROKEN_IN_A_ROW
        self.assert_serve(engines, learners, chat, model_path, 22)
        engines.broadcasts.went_well()
        self.push(learners, engines, 23)
        assert engines.broadcasts._group is not None


def spoil(learner, victim: int) -> None:
    """Makes a learner's process kill another one in the middle of its next broadcast; and each has several buckets."""
    of, pack, packed = Plan.of, Bucket.pack, []

    def kill_before(bucket, state, memory):
        packed.append(bucket)
        if len(packed) == 4:
            os.kill(victim, signal.SIGKILL)
        pack(bucket, state, memory)

    Plan.of = staticmethod(lambda state: of(state, SMALL))
    Bucket.pack = kill_before


@pytest.mark.long
def test_a_run_goes_on_when_an_engine_is_killed_in_the_middle_of_a_broadcast(ray_session):
    """Learner, engines and EnvRunners in processes of their own, as in a real run."""
    config = small_config().learners(num_learners=1).evaluation(evaluation_num_env_runners=1, evaluation_interval=100)
    config.env_runners(num_env_runners=1)
    config.engines(engine_config={"weight_transfer": "collective", "cpu_kv_cache_gib": 0.25, "timeout_s": 300})
    algorithm = config.build_algo()
    try:
        first = algorithm.train()
        group = algorithm.engine.broadcasts._group._name
        assert first["faults"]["num_broken_broadcasts"] == 0
        victim = processes(algorithm)["engine"][0]
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the learner cannot import this file
        on_every_learner(algorithm.learner_group, partial(spoil, victim=victim))
        results = [algorithm.train() for _ in range(2)]
        assert victim not in processes(algorithm)["engine"]
        assert algorithm.engine.broadcasts._group._name != group
    finally:
        algorithm.stop()
    broken = [result["faults"]["num_broken_broadcasts"] for result in results]
    assert broken[0] >= 1 and broken[1] == broken[0]  # of the next sync's group all are members
    assert results[-1]["faults"]["num_engine_restarts"] == 1 and results[-1]["sync"]["weight_version"] == 4
    assert all(result["logprob_gap"] < 1e-3 for result in results)


class TwoMatrices(torch.nn.Module):
    """A model as a worker of vLLM knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def load_weights(self, given):
        own = dict(self.named_parameters())
        for name, tensor in given:
            own[name].data.copy_(tensor)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_keeps_its_part_keeps_no_whole_set_beside_it(workers, monkeypatch):
    """Of a 7B model that would be 15 GB in each worker. A lone one on a CPU keeps what it received, and nothing else."""
    worker, model = WorkerExtension(), TwoMatrices()
    worker.rank = 0
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model, parallel_config=SimpleNamespace(tensor_parallel_size=workers)
    )
    sent: dict[Weights, dict[str, torch.Tensor]] = {}

    class Sent:
        """Brings one set, bucket by bucket."""

        def __init__(self, state, plan) -> None:
            self.state, self.buckets = state, iter(plan.buckets)

        def enter(self, invitation):
            pass

        def broadcast(self, piece):
            bucket = next(self.buckets)
            memory = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            bucket.pack(self.state, memory)
            piece.copy_(memory)

    invitation = SimpleNamespace(device=lambda own: torch.device("cpu"))
    for _ in range(2):
        for which, serve in ((Weights.TARGET, False), (Weights.POLICY, True)):
            sent[which] = {name: torch.randn(8, 8) for name in ("a.weight", "b.weight")}
            plan = Plan.of(sent[which])
            channel = Sent(sent[which], plan)
            monkeypatch.setattr(worker, "_channel", lambda *_, own=channel: own, raising=False)
            assert worker.receive_weights(which, plan, invitation, 1, serve)[2] is None
        assert set(worker.__dict__.get("memory", {})) == (set(sent) if workers == 1 else set())
        for which in (Weights.TARGET, Weights.POLICY):
            worker.serve_weights(which)
            assert all(torch.equal(own, sent[which][name]) for name, own in model.named_parameters())
