"""Will it fit? What ``--dry-run`` says of memory, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.shapes import UnknownShape
from rllib_nlac.memory.trial import GIB, Process, advice, estimate

CGROUP = Path("/sys/fs/cgroup/memory.max")


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
