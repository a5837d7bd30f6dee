"""What a learner holds in memory, by part, before it is started: sums over a model's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.shapes import BYTES, ModelShape
from rllib_nlac.learner.deepspeed import LARGEST_BUCKET
from rllib_nlac.memory.weights import Part, served_sets, trained_parameters
from rllib_nlac.types import Weights

LOGIT_COPIES = 4  # in float32, at the backward pass's start: the logits themselves, and what their gradient is made of
SUB_GROUP = 1_000_000_000  # numbers that ZeRO's stage 3 steps on together, DeepSpeed's default
KL_COPIES = 6  # more, with the base's logits and both distributions


@dataclass(frozen=True)
class LearnerPlan:
    """What decides a learner's memory beside the model.

    Attributes:
        dtype: Precision of the weights.
        tokens: The most that go through the model at once, padding included where there is any.
        logit_tokens: The most of them that have logits.
        lora: What the adapter is; None trains all weights.
        has_target: Whether target weights are kept.
        with_kl: Whether KL to the base is part of the loss.
        keeps_base: Whether a copy of all weights is kept.
        gradient_checkpointing: Whether a layer's inside is computed again.
        deepspeed: DeepSpeed's configuration; empty without DeepSpeed, and then what is trained is in float32.
        num_learners: Learners that share what ZeRO divides.
        on_gpu: Whether it has a GPU.
        exported_sets: Weight sets that are copied into the host's memory to be handed over.
        lends: Whether they are not copied: the engine on the same GPU is lent the learner's own.
    """

    dtype: str
    tokens: int
    logit_tokens: int
    lora: LoRASettings | None = None
    has_target: bool = True
    with_kl: bool = False
    keeps_base: bool = False
    gradient_checkpointing: bool = False
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    num_learners: int = 1
    on_gpu: bool = False
    exported_sets: int = 0
    lends: bool = False


def learner_plan(config: LanguageConfig, context: int) -> LearnerPlan:
    """The plan that a configuration amounts to; ``context`` is the most tokens of a sequence."""
    model, coefficient = config.held_model, getattr(config, "kl_to_base_coeff", None)
    in_one_process = not (config.num_learners or config.num_engines)
    return LearnerPlan(
        dtype=model.dtype,
        tokens=max(config.max_tokens_per_micro_batch, context),  # a sequence that is longer goes through alone
        logit_tokens=config.max_tokens_per_micro_batch,  # and of that one the answer alone has logits
        lora=config.lora_settings,
        has_target=getattr(config, "tau", None) is not None,
        with_kl=bool(coefficient),
        keeps_base=coefficient is not None and config.lora is None,
        gradient_checkpointing=model.gradient_checkpointing,
        deepspeed=config.deepspeed_settings if isinstance(config, LanguageAlgorithmConfig) else {},
        num_learners=max(config.num_learners, 1),
        on_gpu=bool(config.num_gpus_per_learner),
        lends=isinstance(config, LanguageAlgorithmConfig)
        and bool(config.num_gpus_per_learner and in_one_process and config.lora is None),
        exported_sets=sum(name != Weights.INITIAL.value for name in served_sets(config)),
    )


def learner_parts(shape: ModelShape, plan: LearnerPlan) -> list[Part]:
    """What one learner holds at the worst moment of a gradient step."""
    zero = dict(plan.deepspeed.get("zero_optimization", {}))
    stage, size = int(zero.get("stage", 0)), BYTES[plan.dtype]
    has_master = bool(plan.deepspeed) and (stage > 0 or size == 2)
    share = plan.num_learners if stage > 0 else 1  # without ZeRO each learner has all of the optimizer
    numbers = trained_parameters(shape, plan.lora)
    trained = size if plan.deepspeed else BYTES["float32"]  # of a number that is trained
    off_weights, off_optimizer = (
        (zero.get(key) or {}).get("device", "none") != "none" for key in ("offload_param", "offload_optimizer")
    )
    parts = [_weights(shape, plan, stage, zero, off_weights)]
    if plan.lora is not None:
        dtype = plan.dtype if plan.deepspeed else "float32"
        parts.append(Part("adapters", numbers * trained, f"{numbers:,} numbers of rank {plan.lora.rank} in {dtype}"))
    if plan.keeps_base:
        parts.append(Part("initial weights", shape.parameters * size, "for kl_to_base_coeff"))
    if plan.has_target:
        parts.append(Part("target weights", 4 * numbers / share, f"in float32{_over(share)}"))
    optimizer = (12 if has_master else 8) * numbers / share
    what = "AdamW's two moments" + (" and the master weights" if has_master else "")
    parts.append(Part("optimizer", optimizer, f"{what}, in float32{_over(share)}", on_host=off_optimizer))
    parts.append(Part("gradients", *_gradients(numbers, trained, stage, share, has_master)))
    if stage > 0:
        bucket = min(int(zero.get("reduce_bucket_size", LARGEST_BUCKET)), numbers)
        parts.append(Part("buckets", bucket * size * (2 if zero.get("overlap_comm") else 1), "reduce_bucket_size"))
    parts += working_parts(shape, plan)
    stepping = 0.0
    if plan.on_gpu and not off_optimizer:
        at_once = min(numbers / share, float(zero.get("sub_group_size", SUB_GROUP)) if stage == 3 else math.inf)
        stepping = max(4 * at_once - sum(part.num_bytes for part in parts if part.what in ("activations", "logits")), 0)
        if stepping:  # by when those are gone
            parts.append(Part("optimizer", stepping, "more while AdamW lists all its steps, in float32"))
    # θ̄ alone is made in the model's precision where the learner's own tensors are lent.
    copies: float = (plan.has_target if plan.lends else plan.exported_sets) * numbers * trained
    if plan.lends or not plan.on_gpu:  # they stand in the place of what a gradient step takes
        copies -= stepping + sum(part.num_bytes for part in parts if part.what in ("gradients", "activations", "logits"))
    if copies > 0:
        who = ", by the first learner" if plan.num_learners > 1 else ""
        what = f"weight sets while they are handed over{who}"
        parts.append(Part("sync", copies, what, on_host=not plan.lends, first_only=True))
    return parts


def working_parts(shape: ModelShape, plan: LearnerPlan) -> list[Part]:
    """What a micro-batch takes: what the layers keep for the backward pass, and the logits; or what adds up gradients."""
    layers = layer_bytes(shape, plan) * shape.layers
    how = "all layers"
    if plan.gradient_checkpointing:
        layers, how = shape.layers * shape.hidden * BYTES[plan.dtype] + layer_bytes(shape, plan), "layers' inputs, one layer"
    copies = LOGIT_COPIES + (KL_COPIES if plan.with_kl else 0)
    logits = copies * 4 * shape.vocab
    parts = [
        Part("activations", layers * plan.tokens, f"{how}, {plan.tokens:,} tokens"),
        Part("logits", logits * plan.logit_tokens, f"{copies} float32 copies, {plan.logit_tokens:,} tokens of {shape.vocab:,}"),
    ]
    # The gradient of a tied embedding comes from two sides, and they and their sum stand beside what is there already.
    adding = 0 if plan.lora is not None else (3 if shape.tied else 1) * shape.vocab * shape.hidden * BYTES[plan.dtype]
    more = adding - sum(part.num_bytes for part in parts)
    return [*parts, Part("gradients", more, "more while the embedding's are added up")] if more > 0 else parts


def layer_bytes(shape: ModelShape, plan: LearnerPlan) -> float:
    """Bytes of a token that one layer keeps for the backward pass.

    Two norms keep their input in float32, and what they hand on; attention its queries, keys, values and output; the MLP four
    tensors of its own width. A frozen norm keeps one tensor less.
    """
    size = BYTES[plan.dtype]
    norms = 2 * (4 + size * (1 if plan.lora is not None else 2)) * shape.hidden
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return norms + size * (attention + 4 * shape.intermediate)


def _weights(shape: ModelShape, plan: LearnerPlan, stage: int, zero: Mapping[str, Any], on_host: bool) -> Part:
    size = BYTES[plan.dtype]
    if stage < 3 or plan.num_learners == 1:
        return Part("weights", shape.parameters * size, f"{shape.parameters:,} numbers in {plan.dtype}", on_host)
    whole = min(int(zero.get("stage3_max_live_parameters", 1_000_000_000)), shape.parameters)
    numbers = shape.parameters / plan.num_learners + whole
    return Part("weights", numbers * size, f"1/{plan.num_learners}, and {whole:,} whole at a time (stage3_max_live_parameters)")


def _gradients(numbers: int, size: int, stage: int, share: int, has_master: bool) -> tuple[float, str]:
    if not has_master:
        return size * numbers, ""
    own = size * numbers / (share if stage >= 2 else 1)
    return own + 4 * numbers / share, f"as they come and in float32{_over(share)}"


def _over(share: int) -> str:
    return f", 1/{share} of it here" if share > 1 else ""
