"""What an engine holds in memory, by part, before it is started: sums over a model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.model_folder import precision
from rllib_nlac.engine.shapes import BYTES, ModelShape
from rllib_nlac.engine.vllm_engine import BATCHED_TOKENS
from rllib_nlac.memory.weights import GIB, Part, pinned_bytes, served_sets

ADAPTER_SETS = 2  # policy and target; the initial weights are the base
SAMPLER_COPIES = 4  # of the logits, in float32, while vLLM samples
UNMEASURED = "an estimate, vLLM measures it"


@dataclass(frozen=True)
class EnginePlan:
    """What decides an engine's memory beside the model.

    Attributes:
        dtype: Of its weights and its cache.
        max_context: The most tokens of a sequence.
        max_num_seqs: Sequences that are decoded together.
        whole_sets: Names of the weight sets that are kept as whole models.
        lora: What the adapters are; None without.
        merges: Whether each set's adapter is put into the model.
        in_learners_process: Whether the policy's weights, as they were last handed over, stay in this process, too.
        tensor_parallel: GPUs that share the model.
        gpu_share: Share of a GPU that is the engine's.
        cache_bytes: Size of the cache on a CPU.
    """

    dtype: str
    max_context: int
    max_num_seqs: int
    whole_sets: tuple[str, ...]
    lora: LoRASettings | None = None
    merges: bool = False
    in_learners_process: bool = False
    tensor_parallel: int = 1
    gpu_share: float = 0.4
    cache_bytes: float = 0.0


@dataclass(frozen=True)
class Cache:
    """A KV cache.

    Attributes:
        num_bytes: Its size; negative where weights leave less than none.
        sequence_bytes: What one sequence of the longest context takes.
    """

    num_bytes: float
    sequence_bytes: float

    @property
    def sequences(self) -> int:
        """Sequences of the longest context that it holds at the same time."""
        return max(int(self.num_bytes // self.sequence_bytes), 0)


def engine_plan(config: LanguageConfig, context: int, on_gpu: bool, in_learners_process: bool) -> EnginePlan:
    """The plan that a configuration amounts to.

    Args:
        config: Validated.
        context: The most tokens of a sequence.
        on_gpu: Whether the engine has a GPU.
        in_learners_process: Whether the learner is in the same process.
    """
    spec = config.engine_spec
    settings: Any = spec.settings
    merges = spec.merges_lora if spec.merges_lora is not None else not on_gpu
    return EnginePlan(
        dtype=precision(spec.model, settings.dtype, on_gpu),
        max_context=context,
        max_num_seqs=settings.max_num_seqs,
        whole_sets=served_sets(config) if spec.lora is None or merges else (),
        lora=spec.lora,
        merges=spec.lora is not None and merges,
        in_learners_process=in_learners_process,
        tensor_parallel=settings.tensor_parallel_size,
        gpu_share=settings.gpu_memory_utilization,
        cache_bytes=settings.cpu_kv_cache_gib * GIB,
    )


def engine_parts(shape: ModelShape, plan: EnginePlan, gpu_bytes: float | None) -> tuple[list[Part], Cache | None]:
    """What one engine holds, on each of its GPUs and in the host's memory, and its cache.

    Args:
        shape: The model's.
        plan: See there.
        gpu_bytes: Memory of a GPU; 0 without one, None where it is not known, and neither is the cache then.
    """
    size, split = BYTES.get(plan.dtype, 2), plan.tensor_parallel
    weights = shape.parameters * size
    parts = [Part("weights", weights / split, f"{shape.parameters:,} numbers in {plan.dtype}{_over(split)}")]
    if plan.lora is not None and not plan.merges:
        slots = ADAPTER_SETS + (not gpu_bytes and gpu_bytes is not None)
        numbers = slots * shape.adapter_parameters(plan.lora) * plan.lora.served_rank // plan.lora.rank
        parts.append(Part("adapters", numbers * size / split, f"room for {slots} of rank {plan.lora.served_rank}"))
    for name in plan.whole_sets:  # whole, however many workers share it: each keeps its own part
        if gpu_bytes == 0:
            parts.append(Part("weight sets", weights, f"the {name} weights, kept", on_host=True))
        else:
            note = f"the {name} weights, kept in pinned memory, each tensor in a power of two"
            parts.append(Part("weight sets", pinned_bytes(shape, size, split), note, on_host=True))
    if plan.merges:
        in_files = shape.parameters * shape.bytes_in_files
        parts.append(Part("weight sets", in_files, "the base that adapters are merged with", on_host=True))
    keeps_parts = gpu_bytes != 0 or split > 1  # of its own beside what it is given; else it keeps that
    if plan.in_learners_process and plan.lora is None and keeps_parts:
        parts.append(Part("weight sets", weights, "the policy's as they were handed over", on_host=True))
    parts.append(Part("generation", working_bytes(shape, plan) / split, UNMEASURED))
    sequence = plan.max_context * shape.kv_numbers * size / split
    if gpu_bytes is None:
        return parts, None
    taken = sum(part.num_bytes for part in parts if not part.on_host)
    cache = Cache(plan.gpu_share * gpu_bytes - taken if gpu_bytes else plan.cache_bytes, sequence)
    note = f"{cache.sequences} sequences of {plan.max_context:,} tokens"
    return [*parts, Part("KV cache", max(cache.num_bytes, 0), note)], cache


def working_bytes(shape: ModelShape, plan: EnginePlan) -> float:
    """What a step of generation takes beside weights and cache: prompts are read, or a token of each sequence is sampled."""
    size = BYTES.get(plan.dtype, 2)
    tokens = min(max(BATCHED_TOKENS, plan.max_context), plan.max_num_seqs * plan.max_context)
    reading = tokens * (3 * shape.intermediate + 4 * shape.hidden) * size
    sampling = plan.max_num_seqs * shape.vocab * 4 * SAMPLER_COPIES
    return max(reading, sampling)


def _over(split: int) -> str:
    return f" over {split} GPUs" if split > 1 else ""
