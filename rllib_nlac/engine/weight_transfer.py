"""How whole weights reach engine actors; between GPUs by vLLM's own ``vllm.distributed.weight_transfer``.

vLLM's trainer side runs in the first learner's process and calls the engine actors through ``EngineClient``. This path has not
run on a GPU. vLLM is imported where it is used: a learner on a CPU does without.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ray
import torch

from rllib_nlac.types import Weights

ONE_GPU = 1 + 1e-6  # shares such as .1 + .2 + .7 add up to a little more


class Way(StrEnum):
    """How whole weights reach the engines. The last two are names of vLLM's backends."""

    IN_PROCESS = "in_process"
    OBJECT_STORE = "object_store"
    IPC = "ipc"
    NCCL = "nccl"

    @property
    def backend(self) -> str:
        """The backend of vLLM's weight transfer; "" where vLLM transfers nothing."""
        return self.value if self in (Way.IPC, Way.NCCL) else ""


def way_of(config: Any, engine: type) -> Way:
    """The way that follows from where learners and engines are placed.

    Args:
        config: The algorithm's configuration.
        engine: Class of the engine; only one with ``receive_weights`` can use vLLM's transfer.
    """
    learner, each = config.num_gpus_per_learner, config.num_gpus_per_engine
    if not config.num_engines:
        return Way.OBJECT_STORE if config.num_learners else Way.IN_PROCESS
    if config.lora is not None or not learner or not each or not hasattr(engine, "receive_weights"):
        return Way.OBJECT_STORE  # adapters are small
    if learner + each > ONE_GPU:  # no engine is on the learner's GPU
        engines_share = config.num_engines > 1 and each <= 0.5  # NCCL refuses two processes on one GPU
        return Way.OBJECT_STORE if engines_share else Way.NCCL
    fits_one = learner + config.num_engines * each <= ONE_GPU and config.num_learners <= 1
    return Way.IPC if fits_one else Way.OBJECT_STORE


@dataclass(frozen=True)
class Delivery:
    """What the first learner must know to send one weight set to the engines.

    Attributes:
        actors: Handles of the engine actors.
        backend: "nccl" or "ipc".
        workers: Number of vLLM workers of each engine.
        weights: Name of the weight set.
        version: Version of the weight set.
        number: Number of the announcement, which is given only once.
        timeout_s: Seconds after which an engine that does not answer fails the transfer.
    """

    actors: tuple[Any, ...]
    backend: str
    workers: int
    weights: Weights
    version: int
    number: int
    timeout_s: float


@dataclass(frozen=True)
class Sent:
    """What came of a delivery.

    Attributes:
        state: Reference of the learner's copy in Ray's object store.
        answers: Checksum and process id of each engine; empty where nothing was sent.
        fault: Why the transfer failed; None where it did not.
    """

    state: ray.ObjectRef
    answers: list[tuple[int, int]] = field(default_factory=list)
    fault: str | None = None


class EngineClient:
    """vLLM's ``VLLMWeightSyncClient`` for engine actors.

    An engine starts, receives and finishes an update in one call, so that it answers no request in between.

    Args:
        delivery: The first delivery; later ones replace the attribute.
    """

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.answers: list[tuple[int, int]] = []
        self.break_off: Callable[[], None] = lambda: None  # ends a broadcast that waits for an engine in vain
        self._group = uuid.uuid4().hex

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects all engines. vLLM numbers the workers within an engine; here each engine's numbers follow the last one's."""

        def own(engine: int) -> tuple:
            offset = init_info.get("rank_offset")  # NCCL's alone
            return self._group, init_info | ({} if offset is None else {"rank_offset": offset + engine * self.delivery.workers})

        self._call("join_transfer", own)

    def start_weight_update(self) -> None:
        """Is part of ``update_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Has all engines receive the weight set."""
        arguments = (self.delivery.weights, self.delivery.version, self.delivery.number, update_info)
        try:
            self.answers = self._call("receive_weights", lambda engine: arguments)
        except BaseException:
            self.break_off()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Is part of ``update_weights``."""

    def all_joined(self) -> bool:
        """Whether every engine is still the process that was connected; waits for one that starts again."""
        asked = [actor.transfer_group.remote() for actor in self.delivery.actors]
        return set(ray.get(asked, timeout=self.delivery.timeout_s)) == {self._group}

    def _call(self, name: str, arguments: Callable[[int], tuple]) -> list[Any]:
        """Calls all engines at once. Ray must not repeat a call in an engine that has started again: it is not connected."""
        calls = [getattr(actor, name).options(max_task_retries=0) for actor in self.delivery.actors]
        asked = [call.remote(*arguments(engine)) for engine, call in enumerate(calls)]
        return ray.get(asked, timeout=self.delivery.timeout_s)


class StateSource:
    """As vLLM's ``WeightSource``: the tensors of a state, which are moved to the learner's GPU one at a time.

    Args:
        device: The learner's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.state: Mapping[str, torch.Tensor] = {}
        self._device = device

    def metadata(self) -> list[Any]:
        """Name, precision and shape of each tensor, in the order in which they are sent."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.state.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.state.items():
            yield name, tensor.detach().to(self._device)


class WeightSender:
    """The learner's end. It connects the engines before the first delivery, and again when one of them has started again.

    Args:
        device: The learner's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._source = device, StateSource(device)
        self._client: EngineClient | None = None
        self._trainer: Any = None

    def send(self, state: Mapping[str, torch.Tensor], delivery: Delivery) -> list[tuple[int, int]]:
        """Sends a weight set to all engines; checksum and process id of each. After an error the engines must start again."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            try:
                if self._client is None or not self._client.all_joined():
                    self._client = self._connect(delivery)
                self._source.state, self._client.delivery = state, delivery
                self._trainer.send_weights()
                return self._client.answers
            except BaseException:
                self._close()
                raise
            finally:
                self._source.state = {}

    def _connect(self, delivery: Delivery) -> EngineClient:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._close()
        info: Any = IPCTrainerInitInfo(rank=0)
        if delivery.backend == Way.NCCL:
            size = 1 + len(delivery.actors) * delivery.workers
            info = NCCLTrainerInitInfo(ray.util.get_node_ip_address(), _free_port(), size, rank=0)
        client = EngineClient(delivery)
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)
        client.break_off = self._trainer.shutdown
        return client

    def _close(self) -> None:
        trainer, self._trainer, self._client = self._trainer, None, None
        if trainer is not None:
            trainer.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
