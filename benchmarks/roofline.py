"""What a device could do at most, and which share of it was reached.

Decoding is bound by memory: each step reads all weights once for all sequences, and each sequence's own keys and values.
Training is bound by arithmetic. Only what the model itself needs counts: no padding, no layer that is computed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rllib_nlac.engine.shapes import ModelShape


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


def decode_bytes(shape: ModelShape, size: int, sequences: float, context: float) -> float:
    """Bytes that decoding reads for one token.

    Args:
        shape: The model's.
        size: Bytes of a number, of the weights and of the KV cache.
        sequences: So many are decoded together and share the weights.
        context: Mean number of tokens before the one that is decoded.
    """
    # Of an embedding that is not the output layer too, a token reads one row.
    read = shape.parameters - (0 if shape.tied else shape.vocab * shape.hidden)
    return size * (read / sequences + context * shape.kv_numbers)


def training_flops(shape: ModelShape, sequences: Iterable[tuple[int, int]]) -> float:
    """Arithmetic of a gradient step on all weights: 6 for each weight and token; attention; logits of answers alone.

    Args:
        shape: The model's.
        sequences: Of each the tokens of its prompt and of its answer.
    """
    linear = sum(rows * columns for rows, columns in shape.linears.values())
    total = 0
    for prompt, answer in sequences:
        length = prompt + answer
        # A token looks at half of the tokens in the mean: 2 T² numbers forward, twice as much backward.
        attention = 6 * shape.layers * shape.heads * shape.head_dim * length**2
        total += 6 * linear * length + 6 * shape.vocab * shape.hidden * answer + attention
    return float(total)


def share(done: float, seconds: float, peak: float | None) -> float | None:
    """Which share of a peak was reached; None where the peak is not known."""
    return None if peak is None else done / seconds / peak
