"""What fits: the lines that ``--dry-run`` prints of memory, and which key to change where a trial does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.shapes import UnknownShape
from rllib_nlac.memory.trial import Estimate, Process, estimate
from rllib_nlac.memory.weights import GIB, served_sets
from rllib_nlac.types import Weights

CGROUP = Path("/sys/fs/cgroup/memory.max")
CHECKPOINTING = "learner_model: {gradient_checkpointing: true}"
HEADROOM = 0.9  # share of a memory that may be planned with: an iteration on an H100 took 1.08 times what was said


def memory_lines(config: AlgorithmConfig, gpu_gib: float | None = None) -> Iterator[str]:
    """What a trial needs where, and whether that is there, in lines of text.

    Args:
        config: Validated. Of algorithms without a language model of their own nothing is said.
        gpu_gib: Memory of one GPU; None takes that of the GPU here, if there is one.

    Raises:
        FileNotFoundError: A file of the model is missing.
        ValueError: A file of the model cannot be read.
    """
    if not isinstance(config, LanguageConfig) or config.engine_spec.endpoint:  # behind one are weights of others
        return
    gpu_bytes = gpu_gib * GIB if gpu_gib is not None else _gpu_bytes()
    try:
        found = estimate(config, gpu_bytes)
    except UnknownShape as error:
        yield _one_line(f"memory: not known: {error}")
        return
    shape = found.shape
    trained = f", of which an adapter's {found.trained:,} are trained beside them" if config.lora is not None else ""
    yield _one_line(f"memory, GiB, by {shape.source}")
    yield f"{shape.parameters:,} parameters{trained}"
    for process in found.processes:
        yield from _of(process)
    if found.sync_bytes:
        way = f" ({config.transfer})" if isinstance(config, LanguageAlgorithmConfig) else ""
        yield f"a sync of weights carries {found.sync_bytes / GIB:.3f} GiB{way}"
    host = host_bytes()
    yield f"in the host's memory {found.host_bytes / GIB:.2f} of all processes; this machine has {host / GIB:.1f}"
    if gpu_gib is not None and not found.uses_gpus:
        key = "num_gpus_per_learner, and num_gpus_per_engine with num_engines"
        yield f"no process asks for a GPU ({key}), so --gpu-memory-gib changes nothing"
    if found.uses_gpus and gpu_bytes is None:
        yield "whether it fits on the GPUs is not known without one here: --gpu-memory-gib says how large they are"
        return
    # GPUs that are only planned stand in another machine, whose host is not known.
    problems = advice(found, config, gpu_bytes, None if found.uses_gpus and gpu_gib is not None else host)
    for problem in problems:
        yield _one_line(f"does not fit: {problem}")
    if not problems:
        where = f"GPUs of {gpu_bytes / GIB:g} GiB" if found.uses_gpus and gpu_bytes is not None else "this machine"
        yield f"fits: {where}"


def host_bytes() -> float:
    """Memory that this machine, or the container in which this runs, has."""
    physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else ""
    return min(physical, float(limit)) if limit.isdigit() else physical


def _gpu_bytes() -> float | None:
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _of(process: Process) -> Iterator[str]:
    gpus = f", {process.gpus:g} GPU each" if process.gpus else ""
    yield f"{process.name}{f' x {process.count}' if process.count > 1 else ''}{gpus}"
    places = [(False, "GPU"), (True, "host")] if process.gpus else [(None, "host")]
    for on_host, place in places:
        parts = [part for part in process.parts if on_host is None or part.on_host == on_host]
        for part in parts:
            yield f"  {part.what:15} {part.num_bytes / GIB:8.2f}  {part.note}".rstrip()
        yield f"  {'= ' + place:15} {sum(part.num_bytes for part in parts) / GIB:8.2f}"


def _one_line(text: str) -> str:
    """Paths and names may hold anything; what is printed must stay one comment."""
    return " ".join(text.split())


def advice(found: Estimate, config: LanguageConfig, gpu_bytes: float | None, host_bytes: float | None) -> list[str]:
    """Where a trial does not fit, and the keys that change it; empty where it fits as far as that is known.

    Args:
        found: Estimates of the configuration.
        config: The same one.
        gpu_bytes: Memory of one GPU; None where it is not known.
        host_bytes: Memory of the machine; None where it is not to be looked at.
    """
    lines = []
    for process in found.processes:
        if process.gpus and gpu_bytes:
            room = HEADROOM * gpu_bytes * min(process.gpus, 1)
            if process.on_gpu > room:
                keys = _keys(process, config, room, on_host=False)
                lines.append(f"{process.name}: {_gib(process.on_gpu)} of {_gib(room)} GiB on each GPU; {keys}")
        if process.cache is not None and process.cache.sequences < 1:
            split = ", or more GPUs (num_gpus_per_engine and tensor_parallel_size)" if process.gpus else ""
            lines.append(
                f"{process.name}: the KV cache does not hold one sequence of {process.cache.max_context:,} tokens, "
                f"{_gib(process.cache.sequence_bytes)} GiB; raise {_cache_key(process)}, lower max_context{split}"
            )
    if host_bytes and found.host_bytes > HEADROOM * host_bytes:
        largest = max(found.processes, key=lambda process: process.on_host_of_all)
        room = HEADROOM * host_bytes - (found.host_bytes - largest.on_host)
        keys = _keys(largest, config, room, on_host=True)
        lines.append(f"this machine: {_gib(found.host_bytes)} of {_gib(HEADROOM * host_bytes)} GiB; {keys}")
    return lines


def _keys(process: Process, config: LanguageConfig, room: float, on_host: bool) -> str:
    """What to change, the largest part first."""
    sizes: dict[str, float] = {}
    for part in process.parts:
        if (not process.gpus or part.on_host) == on_host:
            sizes[part.what] = sizes.get(part.what, 0) + part.num_bytes
    named: list[str] = []
    for what in sorted(sizes, key=lambda what: -sizes[what]):
        for key in _keys_for(what, process, config, sizes, room):
            if key not in named:
                named.append(key)
    return "change " + ", or ".join(named[:3]) if named else "take a larger machine"


def _keys_for(what: str, process: Process, config: LanguageConfig, sizes: dict[str, float], room: float) -> list[str]:
    deepspeed = isinstance(config, LanguageAlgorithmConfig)
    if what in ("activations", "logits"):
        keys = [CHECKPOINTING] if what == "activations" and not config.held_model.gradient_checkpointing else []
        working = sizes.get("activations", 0) + sizes.get("logits", 0)
        left = room - (sum(sizes.values()) - working)
        tokens = int(config.max_tokens_per_micro_batch * left / working) // 64 * 64
        return [*keys, f"max_tokens_per_micro_batch: {tokens}" if tokens > 0 else "max_tokens_per_micro_batch"]
    if what in ("optimizer", "gradients", "target weights") and config.lora is None:
        several = ["deepspeed_config: {zero_optimization: {stage: 2}}"] if config.num_learners > 1 and deepspeed else []
        return ["lora: {rank: 16}", *several]
    if what == "weights":
        keys = ["learner_model: {dtype: bfloat16}"] if config.held_model.dtype == "float32" and process.name != "engine" else []
        return keys or _for_weights(process, config)
    if what == "weight sets":
        serving = ["engine_config: {lora_serving: adapter}"] if config.lora is not None else ["lora: {rank: 16}"]
        return [*serving, *(["judge_weights: target"] if Weights.INITIAL.value in served_sets(config) else [])]
    if what == "initial weights":
        return ["kl_to_base_coeff: null"]
    if what == "generation":
        return ["engine_config: {max_num_seqs: ...}"]
    if what == "KV cache":
        return [_cache_key(process)]
    if what == "snapshot":
        return ["learner_snapshot_interval: 0"]
    return []


def _for_weights(process: Process, config: LanguageConfig) -> list[str]:
    """What makes room where weights take most, in processes that have half of the precision already."""
    keys = []
    if process.gpus and process.name == "engine":
        keys.append("tensor_parallel_size with num_gpus_per_engine")
    elif process.gpus and process.name == "driver" and not config.num_engines and isinstance(config, LanguageAlgorithmConfig):
        keys.append("num_engines: 1 with num_gpus_per_engine: 1")
    elif process.gpus and isinstance(config, LanguageAlgorithmConfig) and config.lora is None:
        keys.append("num_learners with deepspeed_config: {zero_optimization: {stage: 3}}")
    return [*keys, "a smaller language_model"]


def _cache_key(process: Process) -> str:
    return "engine_config: {gpu_memory_utilization: ...}" if process.gpus else "engine_config: {cpu_kv_cache_gib: ...}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
