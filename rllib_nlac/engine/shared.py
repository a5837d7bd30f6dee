"""How tensors cross processes, as arrays in Ray's object store that nobody copies, and how both sides compare them."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 1 << 16  # numbers that are summed at a time: what NumPy sets aside for them stays in the processor's cache


class NotFiniteError(RuntimeError):
    """Losses, gradients or weights that are not finite, which training cannot mend."""


class SharedState(dict[str, Any]):
    """A nested state whose tensors another process may read but not write to.

    Ray pickles a tensor of its own accord, too, but copies it several times on either side.
    """

    def __reduce__(self) -> tuple:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(dict(self))
        return _read, (file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Sum of all numbers' bits, read as integers: the same however parameters are split, fused or padded with zeros."""
    return sum(map(_sum_of_bits, tensors))


def broken_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Names of the tensors that hold numbers that are not finite, and how many they hold."""
    # The extremes are NaN where any number is. On a CPU they are found at the speed of a checksum, 50 times as fast as by
    # isfinite().
    broken = [name for name, tensor in state.items() if tensor.numel() and not all(x.isfinite() for x in tensor.aminmax())]
    return {name: int((~torch.isfinite(state[name])).sum()) for name in broken}


def require_finite(state: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuses weights that no engine shall serve.

    Args:
        state: The weights by their names.
        what: What to call them in the error.

    Raises:
        NotFiniteError: Some of the numbers are not finite.
    """
    if broken := broken_tensors(state):
        name, count = next(iter(broken.items()))
        raise NotFiniteError(
            f"{what} are not finite in {len(broken)} of {len(state)} tensors, first in {name}: {count} of "
            f"{state[name].numel()} numbers. They are not served; engines keep what they have"
        )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and precision are equal to the bit, NaN and signed zeros included."""
    return torch.equal(_bits(one), _bits(other))


def _sum_of_bits(tensor: torch.Tensor) -> int:
    bits = _bits(tensor)
    if bits.device.type != "cpu":
        return int(bits.sum(dtype=torch.int64))
    numbers = bits.numpy()  # which sums integers ten times as fast as torch does on a CPU
    return sum(int(numbers[i : i + PIECE].sum(dtype=np.int64)) for i in range(0, len(numbers), PIECE))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as integers of their size, shape (N,)."""
    return tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor, (value.dtype, value.shape, _bits(value).cpu().numpy())
        return NotImplemented


def _read(pickled: bytes, buffers: list[np.ndarray]) -> SharedState:
    return SharedState(pickle.loads(pickled, buffers=buffers))


def _tensor(dtype: torch.dtype, shape: torch.Size, numbers: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(numbers).view(dtype).view(shape)
