"""What an engine holds in memory, by part, before it is started: sums over a model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_nlac.engine.make import EngineSpec
from rllib_nlac.engine.model_folder import precision
from rllib_nlac.engine.shapes import BYTES, ModelShape
from rllib_nlac.engine.vllm_settings import BATCHED_TOKENS
from rllib_nlac.memory.weights import GIB, Part, pinned_bytes

ADAPTER_SETS = 2  # policy and target; the initial weights are the base
SAMPLER_COPIES = 4  # of the logits, in float32, while vLLM samples
UNMEASURED = "an estimate, vLLM measures it"


@dataclass(frozen=True)
class Cache:
    """A KV cache.

    Attributes:
        num_bytes: Its size; negative where weights leave less than none.
        max_context: The most tokens of a sequence.
        sequence_bytes: What a sequence of so many tokens takes.
    """

    num_bytes: float
    max_context: int
    sequence_bytes: float

    @property
    def sequences(self) -> int:
        """Sequences of the longest context that it holds at the same time."""
        return max(int(self.num_bytes // self.sequence_bytes), 0)


def engine_parts(
    shape: ModelShape,
    spec: EngineSpec,
    sets: Sequence[str],
    max_context: int,
    gpu_bytes: float | None,
    beside_learner: bool = False,
) -> tuple[list[Part], Cache | None]:
    """What one engine holds, on each of its GPUs and in the host's memory, and its cache.

    Args:
        shape: The model's.
        spec: What the engine is made from.
        sets: Names of the weight sets that it is given.
        max_context: The most tokens of a sequence.
        gpu_bytes: Memory of a GPU; 0 without one, None where it is not known, and neither is the cache then.
        beside_learner: Whether the learner is in the same process, where the policy's weights stay as they were handed over.
    """
    settings, on_gpu = spec.settings, gpu_bytes != 0
    dtype, split = precision(spec.model, settings.dtype, on_gpu), settings.tensor_parallel_size
    merges = spec.lora is not None and (spec.merges_lora if spec.merges_lora is not None else not on_gpu)
    size = BYTES.get(dtype, 2)
    weights = shape.parameters * size
    over = f" over {split} GPUs" if split > 1 else ""
    parts = [Part("weights", weights / split, f"{shape.parameters:,} numbers in {dtype}{over}")]
    if spec.lora is not None and not merges:
        slots = ADAPTER_SETS + (not on_gpu)
        numbers = slots * shape.adapter_parameters(spec.lora) * spec.lora.served_rank // spec.lora.rank
        parts.append(Part("adapters", numbers * size / split, f"room for {slots} of rank {spec.lora.served_rank}"))
    else:
        for name in sets:  # whole, however many workers share it: each keeps its own part
            if on_gpu:
                note = f"the {name} weights, kept in pinned memory, each tensor in a power of two"
                parts.append(Part("weight sets", pinned_bytes(shape, size, split), note, on_host=True))
            else:
                parts.append(Part("weight sets", weights, f"the {name} weights, kept", on_host=True))
    if merges:
        in_files = shape.parameters * shape.bytes_in_files
        parts.append(Part("weight sets", in_files, "the base that adapters are merged with", on_host=True))
    keeps_parts = on_gpu or split > 1  # of its own beside what it is given; else it keeps that
    if beside_learner and spec.lora is None and keeps_parts:
        parts.append(Part("weight sets", weights, "the policy's as they were handed over", on_host=True))
    working = working_bytes(shape, size, max_context, settings.max_num_seqs)
    parts.append(Part("generation", working / split, UNMEASURED))
    if gpu_bytes is None:
        return parts, None
    taken = sum(part.num_bytes for part in parts if not part.on_host)
    room = settings.gpu_memory_utilization * gpu_bytes - taken if on_gpu else settings.cpu_kv_cache_gib * GIB
    cache = Cache(room, max_context, max_context * shape.kv_numbers * size / split)
    note = f"{cache.sequences} sequences of {max_context:,} tokens"
    return [*parts, Part("KV cache", max(cache.num_bytes, 0), note)], cache


def working_bytes(shape: ModelShape, size: int, max_context: int, max_num_seqs: int) -> float:
    """What a step of generation takes beside weights and cache: prompts are read, or a token of each sequence is sampled.

    Args:
        shape: The model's.
        size: Bytes of a number.
        max_context: The most tokens of a sequence.
        max_num_seqs: Sequences that are decoded together.
    """
    tokens = min(max(BATCHED_TOKENS, max_context), max_num_seqs * max_context)
    reading = tokens * (3 * shape.intermediate + 4 * shape.hidden) * size
    sampling = max_num_seqs * shape.vocab * 4 * SAMPLER_COPIES
    return max(reading, sampling)
