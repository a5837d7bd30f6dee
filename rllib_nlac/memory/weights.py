"""Copies of a model's weights: how many numbers are trained, which sets an engine is given, what lies between processes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rllib_nlac.algorithm.critic_config import CriticConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.shapes import BYTES, ModelShape
from rllib_nlac.language.variant import NLAC_AS_IT_IS, answered_by
from rllib_nlac.types import Weights

GIB = 2**30
# What vLLM puts into one tensor.
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Part:
    """Something that takes memory.

    Attributes:
        what: A word for it; the same word in all processes.
        num_bytes: Its size.
        note: What it is made of.
        on_host: Whether it lies in the host's memory, also where the process has a GPU.
        first_only: Whether of several processes of a kind only the first holds it.
    """

    what: str
    num_bytes: float
    note: str = ""
    on_host: bool = False
    first_only: bool = False


def trained_parameters(shape: ModelShape, lora: LoRASettings | None) -> int:
    """Numbers that are trained: an adapter's, or all."""
    return shape.parameters if lora is None else shape.adapter_parameters(lora)


def served_sets(config: LanguageConfig) -> tuple[str, ...]:
    """Names of the weight sets that an engine is given."""
    if not config.trains:
        return ()
    sets = [which.value for which in getattr(config, "learned_sets", (Weights.POLICY,))]
    if isinstance(config, CriticConfig):
        variant = getattr(config.algo_class, "variant", NLAC_AS_IT_IS)
        if Weights.INITIAL in answered_by(config.stage_settings, variant).values():
            sets.append(Weights.INITIAL.value)
    return tuple(sets)


def between_processes(config: LanguageConfig, sync_bytes: int, numbers: int) -> list[Part]:
    """What lies in Ray's object store.

    Args:
        config: The trial's.
        sync_bytes: What a sync of weights carries.
        numbers: How many are trained.
    """
    parts = []
    apart = config.num_learners or config.num_engines
    if sync_bytes and apart and (config.lora is None or config.num_engines):
        parts.append(Part("weight sets", sync_bytes, "of a sync, until the next one"))
        if config.num_learners and config.num_engines:  # see ``RemoteEngines._keep``
            parts.append(Part("weight sets", sync_bytes, "the learner's own, until the engines have read them"))
    if config.num_learners and getattr(config, "learner_snapshot_interval", 0):
        size = BYTES[config.held_model.dtype]
        num_bytes = numbers * (size + 8 + (4 if size == 2 else 0) + (4 if getattr(config, "tau", None) is not None else 0))
        parts.append(Part("snapshot", num_bytes, "of the learners, after each update"))
    return parts


def pinned_bytes(shape: ModelShape, size: int, workers: int) -> float:
    """What all tensors of a model take in pinned memory, of which torch gives powers of two.

    Args:
        shape: The model's.
        size: Bytes of a number.
        workers: Among which each tensor is divided.
    """
    numbers = Counter[str]()
    for name, (rows, columns) in shape.linears.items():
        layer, _, last = name.rpartition(".")
        numbers[f"{layer}.{FUSED.get(last, last)}"] += rows * columns
    embeddings = [shape.vocab * shape.hidden] * (1 if shape.tied else 2)
    return workers * sum(2.0 ** math.ceil(math.log2(each * size / workers)) for each in [*numbers.values(), *embeddings])
