"""How vLLM is started: the keys of ``engine_config``, and the arguments of vLLM that are no keys of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BATCHED_TOKENS = 8192  # prompt tokens that vLLM reads together, at least

# vLLM's own block on a CPU holds 128 tokens, more than most dialogues here, so that its prefix cache would never hit.
CPU_BLOCK = 32
# vLLM's arguments that this package sets, and the key that sets each; empty where none does.
ARGUMENTS_OF_OURS = {
    "model": "language_model",
    "max_model_len": "max_context",
    "dtype": "engine_config: {dtype: ...}",
    "max_num_seqs": "engine_config: {max_num_seqs: ...}",
    "tensor_parallel_size": "engine_config: {tensor_parallel_size: ...}",
    "gpu_memory_utilization": "engine_config: {gpu_memory_utilization: ...}",
    "enforce_eager": "engine_config: {enforce_eager: ...}",
    "enable_prefix_caching": "engine_config: {enable_prefix_caching: ...}",
    "reasoning_parser": "engine_config: {reasoning_parser: ...}",
    "enable_lora": "lora",
    "max_lora_rank": "lora: {rank: ...}",
    "max_loras": "lora",
    "max_cpu_loras": "lora",
    "seed": "seed",
    "logprobs_mode": "",
    "generation_config": "",
    "disable_log_stats": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "",
}


@dataclass(frozen=True)
class VLLMSettings:
    """How vLLM is started; each field is a key of ``engine_config``.

    Attributes:
        dtype: "float32", "bfloat16", "float16"; "auto" takes bfloat16 on a GPU, and on a CPU that computes in it for models
            that are saved in it.
        max_num_seqs: Sequences that are decoded together.
        tensor_parallel_size: GPUs that one engine spans.
        gpu_memory_utilization: Share of a GPU's memory for weights and KV cache.
        cpu_kv_cache_gib: Size of the KV cache on a CPU, in GiB.
        enforce_eager: No CUDA graphs; always so on a CPU, where compiling takes longer than small runs do.
        enable_prefix_caching: Share the KV cache of common prefixes, such as a dialogue judged by several roles.
        reasoning_parser: Where the reasoning of a thinking model ends, behind which the form of an answer is enforced: a name
            that vLLM knows; "auto" looks for ``</think>`` if the chat template lets the model think.
        extra: Passed on to ``vllm.EngineArgs`` as it stands.

    Raises:
        ValueError: ``extra`` is no mapping, or has an argument that this package sets.
    """

    dtype: str = "auto"
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.4
    cpu_kv_cache_gib: float = 1.0
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    reasoning_parser: str = "auto"
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.extra, dict | None):
            raise ValueError(f"config.engine_config: extra must be a mapping of vLLM's arguments, and it is {self.extra!r:.80}")
        for key in ARGUMENTS_OF_OURS.keys() & (self.extra or {}).keys():
            instead = f"set {own} instead" if (own := ARGUMENTS_OF_OURS[key]) else "this package relies on its own value"
            raise ValueError(f"config.engine_config: extra has {key!r}: leave it out, {instead}")
