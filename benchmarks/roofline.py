"""What a device could do at most, and which share of it was reached.

Decoding is bound by memory: each step reads all weights once for all sequences, and each sequence's own keys and values.
Training is bound by arithmetic, see ``rllib_nlac/learner/flops.py``, where the devices are, too.
"""

from __future__ import annotations

from rllib_nlac.engine.shapes import ModelShape


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


def share(done: float, seconds: float, peak: float | None) -> float | None:
    """Which share of a peak was reached; None where the peak is not known."""
    return None if peak is None else done / seconds / peak
