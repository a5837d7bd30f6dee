"""How large a model is, without loading it: from a folder's config.json and its weights' headers, or from a hub's name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.model_folder import EMBEDDINGS, read_config, weight_shapes

OUTPUTS = ("lm_head.weight", "embed_out.weight")  # of which an adapter is never a part
# Families whose tensors follow from the configuration alone: whether q, k and v have a bias, and whether q and k have a norm.
FAMILIES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
# Public configurations: family, hidden, layers, heads, key-value heads, head's size, MLP's size, vocabulary, tied, context.
KNOWN: dict[str, tuple[str, int, int, int, int, int, int, int, bool, int]] = {
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 64, 4864, 151_936, True, 32_768),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151_936, True, 32_768),
    "Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 128, 11_008, 151_936, True, 32_768),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 128, 18_944, 152_064, False, 32_768),
    "Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151_936, True, 40_960),
    "Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151_936, True, 40_960),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 12_288, 151_936, False, 40_960),
    "Meta-Llama-3-8B": ("llama", 4096, 32, 32, 8, 128, 14_336, 128_256, False, 8192),
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}  # bytes of one number, by its precision


class UnknownShape(ValueError):
    """Nothing here says how large a model is."""


@dataclass(frozen=True)
class ModelShape:
    """What a model's memory follows from.

    Attributes:
        source: Where the figures come from, in words.
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Query heads of a layer.
        kv_heads: Key-value heads of a layer.
        head_dim: Width of a head.
        intermediate: Width within an MLP.
        vocab: Rows of the embedding.
        tied: Whether the output layer is the embedding.
        context: The most tokens that the model takes.
        parameters: Number of parameters of the whole model; tied ones count once.
        linears: Rows and columns of each weight that may have an adapter, by its module's name.
        bytes_in_files: Bytes of one number in the model's files.
    """

    source: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    context: int
    parameters: int
    linears: Mapping[str, tuple[int, int]]
    bytes_in_files: int

    def adapter_parameters(self, settings: LoRASettings) -> int:
        """Numbers of one adapter: A (rank, columns) and B (rows, rank) of each layer that has one."""
        return settings.rank * sum(rows + columns for rows, columns in self.targets(settings).values())

    def targets(self, settings: LoRASettings) -> dict[str, tuple[int, int]]:
        """Rows and columns of each weight that has an adapter."""
        names = settings.target_modules
        if isinstance(names, str):
            return dict(self.linears)
        return {
            layer: sizes
            for layer, sizes in self.linears.items()
            if any(layer == name or layer.endswith(f".{name}") for name in names)
        }

    @property
    def kv_numbers(self) -> int:
        """Numbers that a token takes in a KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(model: str) -> ModelShape:
    """The shape of a folder, of a hub's model that was downloaded before, or of a well-known one by its name.

    Raises:
        UnknownShape: It is neither of these.
        FileNotFoundError: A file of the folder is missing.
        ValueError: A file of the folder cannot be read.
    """
    folder = Path(model)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json") if model.count("/") == 1 else None
        if not isinstance(cached, str):
            return _known(model)
        folder = Path(cached).parent
    config = read_config(str(folder)).get_text_config()
    shapes = weight_shapes(folder)
    source = f"{len(shapes)} tensors in {folder}"
    if not shapes:  # weights of the older kind, whose headers cannot be read alone
        if config.model_type not in FAMILIES:
            raise UnknownShape(f"{model!r} has no *.safetensors, and of a {config.model_type} nothing else says its size")
        shapes, source = dict(_tensors(config)), f"config.json in {folder}"
    return _from(config, shapes, source)


def _known(model: str) -> ModelShape:
    name = model.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")
    name = {"llama-3-8b": "meta-llama-3-8b", "llama-3.1-8b": "meta-llama-3-8b", "meta-llama-3.1-8b": "meta-llama-3-8b"}.get(
        name, name
    )
    found = next((known for known in KNOWN if known.lower() == name), None)
    if found is None:
        raise UnknownShape(
            f"{model!r} is no folder, was not downloaded yet, and is none of the shapes known here ({', '.join(KNOWN)})"
        )
    family, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, context = KNOWN[found]
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        dtype="bfloat16",
    )
    return _from(
        config, dict(_tensors(config)), f"the public configuration of {found}; {model!r} itself is not on this machine"
    )


def _from(config: Any, shapes: Mapping[str, tuple[int, ...]], source: str) -> ModelShape:
    tied = bool(config.tie_word_embeddings)
    own = {name: shape for name, shape in shapes.items() if not (tied and name.endswith(OUTPUTS))}
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = (*EMBEDDINGS, *OUTPUTS)
    linears = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in own.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith(kept) and "position" not in name
    }
    return ModelShape(
        source=source,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocab=config.vocab_size,
        tied=tied,
        context=config.max_position_embeddings,
        parameters=sum(math.prod(shape) for shape in own.values()),
        linears=linears,
        bytes_in_files=BYTES.get(str(config.dtype).removeprefix("torch."), 4),
    )


def _tensors(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a family's tensors, by its configuration."""
    has_bias, has_norms = FAMILIES[config.model_type]
    hidden, wide = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{attention}.{name}.weight", (rows, hidden)
            if has_bias:
                yield f"{attention}.{name}.bias", (rows,)
        yield f"{attention}.o_proj.weight", (hidden, queries)
        if has_norms:
            yield from ((f"{attention}.{name}.weight", (head_dim,)) for name in ("q_norm", "k_norm"))
        yield f"{mlp}.gate_proj.weight", (wide, hidden)
        yield f"{mlp}.up_proj.weight", (wide, hidden)
        yield f"{mlp}.down_proj.weight", (hidden, wide)
        yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
