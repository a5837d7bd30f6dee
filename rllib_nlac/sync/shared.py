"""How tensors cross processes: as arrays, which are written into Ray's object store once and read where they lie."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SharedState(dict[str, Any]):
    """A state, nested as one likes, whose tensors another process may read and must not write to.

    Ray pickles a tensor of its own accord, too, but copies it several times on either side.
    """

    def __reduce__(self) -> tuple:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(dict(self))
        return _read, (file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as integers of their size, shape (N,)."""
    return tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor, (value.dtype, value.shape, bits(value).cpu().numpy())
        return NotImplemented


def _read(pickled: bytes, buffers: list[np.ndarray]) -> SharedState:
    return SharedState(pickle.loads(pickled, buffers=buffers))


def _tensor(dtype: torch.dtype, shape: torch.Size, numbers: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(numbers).view(dtype).view(shape)
