"""Which way new weights take from the learner to the engines: where the processes are says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rllib_nlac.engine.channel import GLOO, NCCL
from rllib_nlac.engine.make import ENGINES
from rllib_nlac.engine.protocol import Receives

AUTO, IN_PROCESS, COLLECTIVE, OBJECT_STORE = WAYS = ("auto", "in_process", "collective", "object_store")
BROADCAST_S = 60.0  # for one bucket, 256 MiB at most


@dataclass(frozen=True)
class Transfer:
    """A way of weights.

    Attributes:
        way: A value of ``engine_config: {weight_transfer: ...}``, "auto" excepted.
        reason: Why this one.
        backend: Of the group that broadcasts; "" where none does.
    """

    way: str
    reason: str
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.way}{f' ({self.backend})' if self.backend else ''}: {self.reason}"


def transfer_of(config: Any) -> Transfer:
    """The way that a configuration asks for, or that its placement says.

    Raises:
        ValueError: It asks for one that its placement does not allow.
    """
    wanted = config.engine_config.get("weight_transfer", AUTO)
    if not config.num_engines and not config.num_learners:
        possible = Transfer(IN_PROCESS, "learner and engine are in one process")
    elif not config.num_engines:
        possible = Transfer(OBJECT_STORE, "the engine is in the trial's own process, the learners in others")
    elif wanted == OBJECT_STORE:
        possible = Transfer(OBJECT_STORE, "weight_transfer says so")
    elif obstacle := _obstacle(config):
        possible = Transfer(OBJECT_STORE, obstacle)
    elif config.num_gpus_per_engine:
        possible = Transfer(COLLECTIVE, "learner and engines have GPUs of their own", NCCL)
    elif wanted == COLLECTIVE:
        possible = Transfer(COLLECTIVE, "weight_transfer says so", GLOO)
    else:
        possible = Transfer(OBJECT_STORE, "on CPUs it is faster than a broadcast")
    if wanted not in (AUTO, possible.way):
        raise ValueError(
            f"config.engine_config['weight_transfer'] is {wanted!r}, and weights can only go by {possible.way} here: "
            f"{possible.reason}. Leave it at 'auto', or place learner and engines otherwise (num_engines, num_learners, "
            "num_gpus_per_engine, num_gpus_per_learner)"
        )
    return possible


def _obstacle(config: Any) -> str:
    """Why weights cannot be broadcast to engine actors; an empty text where they can."""
    kind = config.engine_config.get("engine", "vllm")
    learners, engines = config.num_gpus_per_learner, config.num_gpus_per_engine
    if config.lora is not None:
        return "an adapter is small"
    if not issubclass(ENGINES[kind], Receives):
        return f"the engine {kind!r} takes no broadcasts"
    if bool(learners) != bool(engines):
        return "of learner and engines only one side has GPUs"
    if 0 < learners < 1 or 0 < engines < 1:
        return "learner and engines share a GPU, on which NCCL does not work"
    return ""
