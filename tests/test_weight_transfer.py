"""Weights between GPUs by vLLM's weight transfer, with its own classes on both sides and a CPU's memory in the place of NCCL.

Neither NCCL nor CUDA's memory handles run here: the fixtures replace them, and nothing else of vLLM.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from plain_engine import PlainEngine
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, ipc_engine, nccl_engine
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.worker import gpu_worker

from rllib_nlac.engine import remote, weight_transfer
from rllib_nlac.engine.actor import EngineActor
from rllib_nlac.engine.make import ENGINES
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.engine.vllm_worker import WorkerExtension
from rllib_nlac.engine.weight_transfer import WeightSender
from rllib_nlac.learner.group import LearnerLost
from rllib_nlac.memory.fit import memory_lines
from rllib_nlac.sync import sync
from rllib_nlac.sync.sync import push_initial_weights, push_weights
from rllib_nlac.types import Weights

CPU = torch.device("cpu")
NAMES = ("a.weight", "b.weight")
GPUS = {"num_learners": 1, "num_engines": 2, "num_gpus_per_learner": 1, "num_gpus_per_engine": 2}
SHARED = {**GPUS, "num_gpus_per_learner": 0.5, "num_engines": 1, "num_gpus_per_engine": 0.5}


def placed(config, **keys):
    for key, value in keys.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("keys", "way"),
    [
        ({}, "in_process"),
        ({"num_learners": 1}, "object_store"),
        ({"num_engines": 1}, "object_store"),
        ({"num_engines": 2, "num_learners": 2}, "object_store"),
        (GPUS, "nccl"),
        ({**GPUS, "num_learners": 0}, "nccl"),
        ({**GPUS, "num_learners": 4}, "nccl"),
        ({**GPUS, "num_gpus_per_engine": 0.6}, "nccl"),
        ({**GPUS, "num_gpus_per_engine": 0.5}, "object_store"),  # Ray may put both engines on one GPU
        ({**GPUS, "num_gpus_per_engine": 0.5, "num_engines": 1}, "nccl"),
        (SHARED, "ipc"),
        ({**SHARED, "num_learners": 0}, "ipc"),
        ({**SHARED, "num_gpus_per_engine": 0.25, "num_engines": 2}, "ipc"),
        ({**SHARED, "num_gpus_per_learner": 0.7, "num_gpus_per_engine": 0.1, "num_engines": 3}, "ipc"),
        ({**SHARED, "num_engines": 2}, "object_store"),  # one of them has no place on the learner's GPU
        ({**SHARED, "num_learners": 2}, "object_store"),
        ({**GPUS, "num_gpus_per_learner": 0}, "object_store"),
        ({**GPUS, "lora": {"rank": 8}}, "object_store"),
    ],
)
def test_the_way_follows_from_the_placement(config, keys, way):
    placed(config, **keys)
    assert config.transfer == way
    assert config.engine_spec.transfer == (way if way in ("nccl", "ipc") else "")


def test_an_engine_other_than_vllm_is_given_weights_by_the_store(config, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", PlainEngine)
    config.engines(engine_config={"engine": "plain"})
    assert placed(config, **GPUS).transfer == "object_store"


def test_the_engine_is_built_for_the_backend(config):
    chat = SimpleNamespace(thinks=False, max_context=64, end_ids=(1,))
    assert placed(config, **GPUS).engine_spec.maker(chat).keywords == {"transfer": "nccl"}
    assert placed(config, **SHARED).engine_spec.maker(chat).keywords == {"transfer": "ipc"}
    assert not placed(config, num_gpus_per_learner=0).engine_spec.maker(chat).keywords


def test_a_dry_run_names_the_way(config):
    lines = list(memory_lines(placed(config, num_engines=1)))
    (line,) = [line for line in lines if line.startswith("a sync of weights carries")]
    assert line.endswith(" GiB (object_store)")


class Model(torch.nn.Module):
    """A model as vLLM's worker knows it, after it was loaded."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(8, 8, bias=False, dtype=dtype).requires_grad_(False) for _ in range(2))
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        for name, tensor in weights:
            parameter = getattr(self, name[0]).weight
            getattr(parameter, "weight_loader", lambda own, given: own.data.copy_(given))(parameter, tensor)


class Worker(WorkerExtension):
    """vLLM's worker, as far as it takes part."""

    init_weight_transfer_engine = gpu_worker.Worker.init_weight_transfer_engine
    shutdown_weight_transfer_engine = gpu_worker.Worker.shutdown_weight_transfer_engine
    start_weight_update = gpu_worker.Worker.start_weight_update
    update_weights = gpu_worker.Worker.update_weights
    finish_weight_update = gpu_worker.Worker.finish_weight_update
    _start_weight_update = gpu_worker.Worker._start_weight_update
    _check_weight_transfer_engine = gpu_worker.Worker._check_weight_transfer_engine
    _weight_update_active = False

    def __init__(self, backend: str, dtype: torch.dtype, rank: int, workers: int) -> None:
        parallel = SimpleNamespace(rank=rank, world_size=workers, tensor_parallel_size=2, data_parallel_index=0)
        self.model, self.rank = Model(dtype), rank
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=dtype))
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, parallel_config=parallel, reset_lora_state=lambda: None
        )
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), self.vllm_config, CPU, self.model
        )


def engine_of(workers: list[Worker]) -> VLLMEngine:
    """An engine around workers that all hold the whole model."""
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    engine.workers = workers
    engine._llm = SimpleNamespace(
        collective_rpc=lambda call, args=(): [getattr(worker, call)(*args) for worker in workers],
        reset_prefix_cache=lambda: True,
    )
    engine._lora, engine._verifiable, engine.mixes_sets, engine._serving = None, True, False, None
    engine._pending, engine._policy_state, engine._checksums = {}, None, {}
    engine._versions, engine._given, engine._base = dict.fromkeys(Weights, 0), dict.fromkeys(Weights, 0), {}
    return engine


class Handle:
    """An engine actor as Ray would show it; ``kill`` starts it again."""

    def __init__(self, make) -> None:
        self.make, self.starts, self.pool, self.calls = make, 0, ThreadPoolExecutor(), []
        self.kill()

    def kill(self) -> None:
        self.starts += 1
        self.engine = self.make()
        self.actor = EngineActor(lambda: self.engine)

    def __getattr__(self, name: str):
        def remote(*arguments):
            return self.pool.submit(getattr(self.actor, name), *arguments)

        def options(max_task_retries: int):
            self.calls.append((name, max_task_retries))
            return SimpleNamespace(remote=remote)

        return SimpleNamespace(remote=remote, options=options)


class Wire:
    """What NCCL would be: each worker's end is a queue, by its number in the group."""

    def __init__(self) -> None:
        self.ends: dict[int, queue.Queue] = {}
        self.sizes, self.addresses = set(), set()
        self.damage = self.breaks = False
        self.aborted = threading.Event()

    def join(self, info, parallel):
        end = self.ends[info.rank_offset + parallel.rank] = queue.Queue()
        self.sizes.add(info.world_size)
        self.addresses.add((info.master_address, info.master_port))
        return SimpleNamespace(get=lambda: end.get(timeout=30), destroy=lambda: None)

    def open(self, info):
        self.aborted.clear()
        return SimpleNamespace(destroy=self.aborted.set)

    def broadcast(self, iterator, group, src, post_iter_func, **sizes) -> None:
        for item in iterator:
            tensor = post_iter_func(item).clone()
            if self.damage:
                tensor.view(-1)[3] += 1
            for end in self.ends.values():
                end.put(tensor)
        if self.breaks and not self.aborted.wait(30):
            raise AssertionError("the broadcast would wait for ever")

    @staticmethod
    def receive(iterator, group, src, post_unpack_func, **sizes) -> None:
        for name, (shape, dtype) in iterator:
            tensor = group.get()
            assert (list(tensor.shape), tensor.dtype) == (shape, dtype)
            post_unpack_func([(name, tensor)])


@pytest.fixture()
def wire(monkeypatch):
    """Replaces what needs a GPU."""
    wire = Wire()
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", wire.join)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", wire.open)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", wire.broadcast)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", wire.receive)

    def lend(tensor):
        sent = tensor.clone()
        if wire.damage:
            sent.view(-1)[3] += 1
        return None, (sent, 0, 0, 0, 0, 0, "the learner's number of the GPU")

    monkeypatch.setattr(ipc_engine, "reduce_tensor", lend)
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", lambda tensor, *rest: tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    def get(calls, timeout=None):
        return [call.result(timeout) for call in calls] if isinstance(calls, list) else calls.result(timeout)

    def wait(calls, num_returns=1, timeout=None):
        return calls, [] if all(call.exception(timeout) or True for call in calls) else calls

    stand_in = SimpleNamespace(
        get=get, wait=wait, kill=lambda actor, no_restart: actor.kill(), put=dict, exceptions=ray.exceptions, util=ray.util
    )
    for module in (remote, weight_transfer, sync):
        monkeypatch.setattr(module, "ray", stand_in)
    monkeypatch.setattr(sync.ray, "ObjectRef", ray.ObjectRef, raising=False)
    return wire


class Learners:
    """One learner in this process."""

    is_local = True

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.states = dtype, {}
        self.start()

    def start(self) -> None:
        sender = WeightSender(CPU)
        self._learner = SimpleNamespace(_learner_index=0, export_weights=self.export, weight_sender=sender, outgoing={})

    def learn(self, seed: int) -> dict:
        generator = torch.Generator().manual_seed(seed)
        for which in (Weights.POLICY, Weights.TARGET):
            self.states[which] = {name: torch.randn(8, 8, generator=generator).to(self.dtype) for name in NAMES}
        return copy.deepcopy(self.states)

    def export(self, copies, on_device, of):
        assert (copies, on_device) == (False, True)  # the learner's own tensors, where they are
        return {which: dict(self.states[which]) for which in of}


class House:
    """Two engines of so many workers each."""

    def __init__(self, backend: str, workers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        def make() -> VLLMEngine:
            return engine_of([Worker(backend, dtype, rank, workers) for rank in range(workers)])

        self.handles = [Handle(make) for _ in range(2)]
        self.engines = RemoteEngines(self.handles, timeout_s=30, transfer=backend, workers=workers)

    def assert_serve(self, states, version: int, dtype: torch.dtype = torch.float32) -> None:
        """Both engines serve both sets, the policy's without a swap."""
        for handle in self.handles:
            engine = handle.engine
            assert engine._serving is Weights.POLICY
            for which in (Weights.POLICY, Weights.TARGET, Weights.POLICY):
                engine._serve(which)
                assert engine._versions[which] == version
                for worker in engine.workers:
                    for name, parameter in worker.model.named_parameters():
                        assert torch.equal(parameter, states[which][name].to(dtype)), (which, name)


both = pytest.mark.parametrize("backend", ["nccl", "ipc"])


@both
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=["same", "rounded"])
def test_all_workers_serve_what_the_learner_has(wire, backend, dtypes):
    """Both sets, sync after sync, and each is compared with the learner's: as it came, and as the engine rounds it."""
    of_learner, of_engine = dtypes
    house, learners = House(backend, 2 if backend == "nccl" else 1, of_engine), Learners(of_learner)
    initial = learners.learn(1)[Weights.POLICY]
    push_initial_weights(learners, house.engines)
    groups = {handle.actor.transfer_group() for handle in house.handles}
    for version in (2, 3):
        states = learners.learn(version)
        report = push_weights(learners, house.engines, version)
        assert report.version == version and report.num_bytes == 4 * 64 * 4
        house.assert_serve(states, version, of_engine)
    assert {handle.actor.transfer_group() for handle in house.handles} == groups and len(groups) == 1
    if backend == "nccl":
        assert sorted(wire.ends) == [1, 2, 3, 4] and wire.sizes == {5} and len(wire.addresses) == 1
    for handle in house.handles:
        assert set(handle.calls) == {("join_transfer", 0), ("receive_weights", 0)} and handle.starts == 1
        handle.engine._serve(Weights.INITIAL)
        expected = checksum(tensor.to(of_engine) for tensor in initial.values())
        assert handle.engine._served("weight_checksums")[0] == expected


@both
def test_an_engine_that_has_started_again_is_connected_again(wire, backend, caplog):
    """And so is the whole group: nobody's broadcast waits for a process that is gone."""
    house, learners = House(backend), Learners()
    learners.learn(1)
    push_weights(learners, house.engines, 1)
    (group,) = {handle.actor.transfer_group() for handle in house.handles}
    house.handles[1].kill()
    states = learners.learn(2)
    push_weights(learners, house.engines, 2)
    house.assert_serve(states, 2)
    (other,) = {handle.actor.transfer_group() for handle in house.handles}
    assert other != group and house.engines.transfer == backend and not caplog.text


@both
def test_a_transfer_that_fails_is_made_good_by_the_store_which_carries_all_others(wire, backend, caplog, monkeypatch):
    house, learners = House(backend), Learners()
    learners.learn(1)
    push_weights(learners, house.engines, 1)
    wire.breaks = True  # after the last tensor, until the group is broken off
    worker = house.handles[1].engine.workers[0]
    monkeypatch.setattr(type(worker.weight_transfer_engine), "receive_weights", fails_for(worker))
    states = learners.learn(2)
    push_weights(learners, house.engines, 2)
    house.assert_serve(states, 2)
    assert [handle.starts for handle in house.handles] == [2, 2] and house.engines.transfer == ""
    assert f"vLLM's transfer of weights ({backend}) failed" in caplog.text and "RuntimeError: no route to host" in caplog.text
    assert "Traceback" not in caplog.text
    states = learners.learn(3)
    push_weights(learners, house.engines, 3)
    house.assert_serve(states, 3)
    assert [handle.starts for handle in house.handles] == [2, 2]


def fails_for(victim: Worker):
    real = type(victim.weight_transfer_engine).receive_weights

    def receive(engine, update_info):
        if engine is victim.weight_transfer_engine:
            raise RuntimeError("no route to host")
        real(engine, update_info)

    return receive


@both
def test_damage_on_the_way_is_an_error(wire, backend):
    house, learners = House(backend), Learners()
    learners.learn(1)
    wire.damage = True
    with pytest.raises(EngineError, match=r"sync of version 1: the engine's target weights have the checksum"):
        push_weights(learners, house.engines, 1)


def test_what_a_worker_lost_of_the_weights_is_found(wire, monkeypatch):
    """The learner's are compared with what serves, and not only with what came."""
    house, learners = House("ipc"), Learners()
    monkeypatch.setattr(Model, "load_weights", lambda model, weights: None)
    learners.learn(1)
    engine = house.handles[0].engine
    engine.join_transfer({"packed": False})
    with pytest.raises(EngineError, match="does not serve the policy weights that it was given"):
        engine.receive_weights(Weights.POLICY, 1, ipc_info(learners.states[Weights.POLICY]))


def ipc_info(state) -> dict:
    return {
        "names": list(state),
        "dtype_names": ["float32"] * len(state),
        "shapes": [[8, 8]] * len(state),
        "ipc_handles": [{"GPU-1": (tensor, 0, 0, 0, 0, 0, 0)} for tensor in state.values()],
    }


def test_on_another_gpu_than_the_learners_an_engine_says_so(wire, monkeypatch):
    house, learners = House("ipc"), Learners()
    learners.learn(1)
    engine = house.handles[0].engine
    engine.join_transfer({"packed": False})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-2"))
    with pytest.raises(EngineError, match=r"did not receive the policy weights: ValueError: IPC handle not found for GPU UUID"):
        engine.receive_weights(Weights.POLICY, 1, ipc_info(learners.states[Weights.POLICY]))
    with pytest.raises(EngineError, match="was never given the policy weights"):
        engine._serve(Weights.POLICY)


def test_engines_start_again_when_the_learner_is_lost_in_a_transfer(wire, monkeypatch):
    """They may wait for it for ever. What they took before counts for nothing: the next learner may have other weights."""
    house, learners = House("nccl"), Learners()
    learners.learn(1)
    push_weights(learners, house.engines, 1)

    def lose(*arguments, **more):
        raise LearnerLost("killed")

    with monkeypatch.context() as patch:
        patch.setattr(sync, "_send_from_first", lose)
        with pytest.raises(LearnerLost):
            push_weights(learners, house.engines, 2)
    assert [handle.starts for handle in house.handles] == [2, 2] and house.engines.transfer == "nccl"
    learners.start()
    states = learners.learn(3)
    push_weights(learners, house.engines, 2)
    house.assert_serve(states, 2)


def test_a_new_learner_connects_engines_that_know_the_former_one(wire):
    house, learners = House("nccl"), Learners()
    learners.learn(1)
    push_weights(learners, house.engines, 1)
    learners.start()
    states = learners.learn(2)
    push_weights(learners, house.engines, 2)
    house.assert_serve(states, 2)
    assert [handle.starts for handle in house.handles] == [1, 1]


def test_a_copy_for_others_sends_nothing_by_itself(wire):
    """EnvRunners give engines that have started again what was announced, and nothing new."""
    engines = House("nccl").engines
    kind, arguments = engines.__reduce__()
    assert kind(*arguments).transfer == ""


def test_the_answer_names_the_process(wire):
    house, learners = House("nccl"), Learners()
    learners.learn(1)
    push_weights(learners, house.engines, 1)
    assert set(house.engines._pids.values()) == {os.getpid()}
