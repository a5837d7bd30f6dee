"""Slices write what the loader they watched would have written, and are not learned where it does more than to copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_nlac.engine.shared import same_bits
from rllib_nlac.engine.slices import Slices

SHAPES = {"q": (6, 4), "k": (2, 4), "v": (2, 4), "down": (4, 6), "embed": (5, 4), "norm": (4,)}


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class Model:
    """As vLLM's: three matrices in one, a worker's part of rows and columns, rows of padding that stay zero."""

    def __init__(self, rank: int = 0, workers: int = 1, dtype: torch.dtype = torch.float32):
        self.rank, self.workers = rank, workers
        sizes = [(10 // workers, 4), (4, 6 // workers), (8, 4), (4,)]
        self.qkv, self.down, self.embed, self.norm = self.parameters = [torch.full(s, 9.0, dtype=dtype) for s in sizes]

    def part(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        size = tensor.shape[axis] // self.workers
        return tensor.narrow(axis, self.rank * size, size)

    def load(self, given) -> None:
        row = 0
        for name in "qkv":
            part = self.part(given[name])
            self.qkv.narrow(0, row, len(part)).copy_(part)
            row += len(part)
        self.down.copy_(self.part(given["down"], 1))
        self.embed[:5].copy_(given["embed"])
        self.embed[5:].fill_(0)
        self.norm.copy_(given["norm"])


@given(st.integers(0, 2**20), st.sampled_from([1, 2]), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_later_weights_are_written_as_the_loader_writes_them(seed, workers, dtype, turned):
    for rank in range(workers):
        model, other = Model(rank, workers, dtype), Model(rank, workers, dtype)
        slices = Slices.learned(model.load, model.parameters, state(seed))
        later = {name: tensor.T.contiguous().T if turned else tensor for name, tensor in state(seed + 1).items()}
        slices.write(later, model.parameters)
        other.load(later)
        assert all(same_bits(mine, its) for mine, its in zip(model.parameters, other.parameters, strict=True))


def test_equal_tensors_are_told_apart():
    """By where they lie: all numbers of the first weights may be the same, as of norms that are ones."""
    model = Model()
    slices = Slices.learned(model.load, model.parameters, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    later = state(3)
    slices.write(later, model.parameters)
    assert torch.equal(model.qkv, torch.cat([later["q"], later["k"], later["v"]]))


class Adds(Model):
    def load(self, given):
        super().load({**given, "norm": given["norm"] + 1})


class ScalesAfterwards(Model):
    def load(self, given):
        super().load(given)
        self.norm.mul_(2)


class LeavesOut(Model):
    def load(self, given):
        super().load(given)
        self.down[0].fill_(9.0)


class Spreads(Model):
    def load(self, given):
        super().load(given)
        self.norm.copy_(given["norm"][:1])


@pytest.mark.parametrize("kind", [Adds, ScalesAfterwards, LeavesOut, Spreads])
def test_a_loader_that_does_more_than_to_copy_is_not_learned(kind):
    model, loaded = kind(), kind()
    assert Slices.learned(model.load, model.parameters, state(1)) is None
    loaded.load(state(1))
    assert all(same_bits(a, b) for a, b in zip(model.parameters, loaded.parameters, strict=True))  # but it has loaded


def test_tensors_that_share_their_memory_are_not_learned():
    whole = torch.randn(8, 4)
    model = Model()
    shared = {**state(1), "k": whole[:2], "v": whole[2:4]}
    assert Slices.learned(model.load, model.parameters, shared) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("down"), "the weights lack down"),
        (lambda s: s.update(more=torch.ones(2)), "the model has no more"),
        (lambda s: s.update(down=torch.ones(4, 5)), r"down has the shape (4, 5) and not (4, 6)"),
    ],
)
def test_weights_of_another_model_have_a_fault(change, said):
    model = Model()
    slices = Slices.learned(model.load, model.parameters, state(1))
    assert slices.fault_of(state(2)) is None
    other = state(2)
    change(other)
    assert slices.fault_of(other) == said
