"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import sys

import torch

M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_MODEL = 50_000_000  # numbers; below, tensors are small and made so often that pages of their own cost time
LARGE_TENSOR = 1 << 20  # bytes


def give_back_large_tensors(device: torch.device, numbers: int) -> bool:
    """Sees that a large model's tensors go back to the system when they are freed; returns whether anything was changed.

    glibc raises by itself the size from which memory has pages of its own, up to 32 MiB. Tensors that come and go in a gradient
    step then lie in one heap with those that stay until the backward pass, and the holes between them are never given back.

    Args:
        device: Where the model is; only a CPU's memory is the C library's.
        numbers: Number of parameters of the model.
    """
    if device.type != "cpu" or numbers < LARGE_MODEL or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries than glibc have none
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR))
