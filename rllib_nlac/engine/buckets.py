"""A weight set in a few large pieces of memory: a broadcast of each costs as much as one of a single small tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

BUCKET_BYTES = 256 * 2**20
ALIGNMENT = 16  # bytes; any number's address is a multiple of its size


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its precision.
        start: Its first byte within its bucket.
        num_bytes: Its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together.

    Attributes:
        places: Of its tensors, in their order.
        num_bytes: Size of the whole.
    """

    places: tuple[Place, ...]
    num_bytes: int

    def pack(self, state: Mapping[str, torch.Tensor], memory: torch.Tensor) -> None:
        """Copies this bucket's tensors of a state into memory, shape (at least num_bytes,) of bytes."""
        for name, tensor in self.tensors(memory).items():
            tensor.copy_(state[name])

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as they lie in memory, which they share."""
        return {
            place.name: memory[place.start : place.start + place.num_bytes].view(place.dtype).view(place.shape)
            for place in self.places
        }

    def pieces(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """The used part of the memory, in pieces of at most ``BUCKET_BYTES``: a tensor may be larger."""
        yield from memory[: self.num_bytes].split(BUCKET_BYTES)


@dataclass(frozen=True)
class Plan:
    """How a weight set travels; what sender and receivers have to agree on.

    Attributes:
        buckets: One after the other.
    """

    buckets: tuple[Bucket, ...]

    @staticmethod
    def of(state: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES) -> Plan:
        """Fills one bucket after the other; a tensor that is larger has its own."""
        buckets, places, end = list[Bucket](), list[Place](), 0
        for name, tensor in state.items():
            num_bytes = tensor.numel() * tensor.element_size()
            padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            if places and end + padded > bucket_bytes:
                buckets.append(Bucket(tuple(places), end))
                places, end = [], 0
            places.append(Place(name, tuple(tensor.shape), tensor.dtype, end, num_bytes))
            end += padded
        return Plan((*buckets, *([Bucket(tuple(places), end)] if places else [])))

    @property
    def places(self) -> dict[str, Place]:
        """Of all tensors, by their names."""
        return {place.name: place for bucket in self.buckets for place in bucket.places}

    @property
    def num_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)
