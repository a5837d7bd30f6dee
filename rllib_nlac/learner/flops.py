"""The arithmetic of a model's passes, and what devices could do at most: together the share of a peak that was reached, MFU.

Only what the losses need counts: no padding, no layer that is computed again for gradient checkpointing, no logits of prompts,
and what sequences of a pack share once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Arithmetic:
    """What a decoder computes for a sequence of T tokens, A of them the answer's, in FLOPs; a product and a sum are two.

    A matrix product costs 2 for each weight and token forward, as many for the gradient of its input, and as many for that of
    its weights, which frozen ones have none of: 6 N, and 4 N of what lies under an adapter. A token looks at (T + 1) / 2 in the
    mean, itself by half: T² / 2 pairs, each of which costs 4 for each number of a head's width forward, in scores and in sums,
    and twice that backward. Embeddings that are looked up, norms, biases and softmax count for nothing. The first layer's input
    has no gradient under an adapter, and counts as if it had one.

    Attributes:
        trained: Weights of the matrix products within the layers that have a gradient.
        frozen: Those that have none.
        output: Weights of the output layer, whether it is the embedding or not.
        output_is_trained: Whether they have a gradient.
        attention: Layers times heads times a head's width.

    Source: arXiv 2204.02311, appendix B (6 N + 12 L H Q T a token); that a causal model needs half of the attention:
    arXiv 2307.08691, section 4.1.
    """

    trained: int
    frozen: int
    output: int
    output_is_trained: bool
    attention: int

    def of_step(self, lengths: Any, answers: Any, starts: Any = 0) -> float:
        """Forward and backward.

        Args:
            lengths: T of each sequence, shape (N,).
            answers: A of each, shape (N,), or of all.
            starts: How many of its first tokens were computed with another sequence, shape (N,).
        """
        output = (6 if self.output_is_trained else 4) * self.output
        return self._sum(6 * self.trained + 4 * self.frozen, output, 6 * self.attention, lengths, answers, starts)

    def of_forward(self, lengths: Any, answers: Any, starts: Any = 0) -> float:
        """Forward alone, as where nothing is learned; the arguments are those of ``of_step``."""
        return self._sum(2 * (self.trained + self.frozen), 2 * self.output, 2 * self.attention, lengths, answers, starts)

    @property
    def of_base(self) -> Arithmetic:
        """Figures of the model without its adapter; if it has none, of a copy of it."""
        return replace(self, trained=0) if self.frozen else self

    @staticmethod
    def _sum(layers: int, output: int, attention: int, lengths: Any, answers: Any, starts: Any) -> float:
        lengths, answers, starts = (np.asarray(each, float) for each in (lengths, answers, starts))
        own = layers * (lengths - starts) + attention * (lengths**2 - starts**2)
        return float(own.sum() + output * answers.sum())


def arithmetic_of(lm: Any) -> Arithmetic | None:
    """Read from a Hugging Face model's own weights; None where some are no matrices, as those of a mixture of experts."""
    output = lm.get_output_embeddings().weight
    looked_up = {id(module.weight) for module in lm.modules() if isinstance(module, torch.nn.Embedding)}
    weights = [p for p in lm.parameters() if p.dim() > 1 and p is not output and id(p) not in looked_up]
    if any(p.dim() > 2 for p in weights):
        return None
    trained, frozen = (sum(p.numel() for p in weights if p.requires_grad is has) for has in (True, False))
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.num_hidden_layers * heads * width
    return Arithmetic(trained, frozen, output.numel(), bool(output.requires_grad), attention)


@dataclass(frozen=True)
class Peak:
    """What the maker of a device says of it.

    Attributes:
        bytes_per_s: Bandwidth of its memory.
        flops: Dense matrix products in bfloat16, a second.
    """

    bytes_per_s: float
    flops: float


# By the name that the driver gives, the first that is found. Source: NVIDIA's data sheets; those that state FLOP/s with
# sparsity are halved.
PEAKS = (
    (r"H100.*PCIe", Peak(2.0e12, 756e12)),
    (r"H100 NVL", Peak(3.9e12, 835e12)),
    (r"H100", Peak(3.35e12, 989e12)),
    (r"H200 NVL", Peak(4.8e12, 835e12)),
    (r"H200", Peak(4.8e12, 989e12)),
    (r"A100.*40GB", Peak(1.555e12, 312e12)),
    (r"A100 80GB PCIe", Peak(1.935e12, 312e12)),
    (r"A100", Peak(2.039e12, 312e12)),
    (r"L4", Peak(0.3e12, 121e12)),
    (r"RTX 4090", Peak(1.008e12, 165e12)),
)


def peak_of(name: str) -> Peak | None:
    """The peak of a device by its name; None where it is not known, or where it is a slice of a GPU (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((peak for pattern, peak in PEAKS if re.search(rf"\b{pattern}\b", name)), None)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of a known GPU in the learner's precision; None of any other device, and in float32, where it has many peaks."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    peak = peak_of(torch.cuda.get_device_name(device))
    return None if peak is None else peak.flops
