"""Which numbers of a checkpoint's tensors are which of a model's parameters, learned by watching one load.

A model that serves fuses and splits what a checkpoint holds: the query, key and value matrices are one parameter, and a worker
has its part of it. vLLM's loader knows how and takes most of a sync's time. What it copied once from where to where is what it
would copy again, so that later weights are written straight into the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rllib_nlac.engine.shared import same_bits


class Layout(NamedTuple):
    """A view of a tensor's storage.

    Attributes:
        size: Its shape.
        stride: Steps of each axis, in numbers.
        offset: Place of the slice's first number, counted from the tensor's first.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(view: torch.Tensor, tensor: torch.Tensor) -> Layout:
        return Layout(tuple(view.shape), view.stride(), view.storage_offset() - tensor.storage_offset())

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Slice:
    """One copy.

    Attributes:
        name: Name of the checkpoint's tensor.
        source: Which part of it, where it is contiguous.
        parameter: Index of the model's parameter.
        target: Which part of that.
    """

    name: str
    source: Layout
    parameter: int
    target: Layout


class Slices:
    """All copies that make a model's parameters of a checkpoint's tensors.

    Args:
        copies: In the order in which they were made.
        shapes: Shapes of the checkpoint's tensors, by their names.
    """

    def __init__(self, copies: Sequence[Slice], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._copies = list(copies)
        self._of: dict[str, list[Slice]] = {}
        for copy in self._copies:
            self._of.setdefault(copy.name, []).append(copy)
        self._shapes = dict(shapes)

    @staticmethod
    def learned(
        load: Callable[[Mapping[str, torch.Tensor]], Any],
        parameters: Sequence[torch.Tensor],
        state: Mapping[str, torch.Tensor],
    ) -> Slices | None:
        """Loads a state and watches.

        Args:
            load: Writes a state into the parameters.
            parameters: The model's, each once.
            state: In the checkpoint's format and names.

        Returns:
            None where the loader does more than to copy, or leaves out numbers of a parameter that are not zero: what it did
            does not tell what it would do with other weights.
        """
        given = {name: tensor.contiguous() for name, tensor in state.items()}
        copies = _Copies()
        with copies:
            load(given)
        names = {tensor.untyped_storage().data_ptr(): name for name, tensor in given.items()}
        places = {parameter.untyped_storage().data_ptr(): i for i, parameter in enumerate(parameters)}
        if len(names) < len(given) or len(places) < len(parameters):
            return None  # which of two is meant cannot be known
        found = []
        for target, source in copies.made:
            place = places.get(target.untyped_storage().data_ptr())
            if place is None:
                continue  # not a parameter
            name = names.get(source.untyped_storage().data_ptr())
            if name is None or source.shape != target.shape:
                return None
            layouts = Layout.of(source, given[name]), Layout.of(target, parameters[place])
            found.append(Slice(name, layouts[0], place, layouts[1]))
        slices = Slices(found, {name: tuple(tensor.shape) for name, tensor in given.items()})
        return slices if slices._give_back(parameters, given) else None

    def fault_of(self, state: Mapping[str, torch.Tensor]) -> str | None:
        """What keeps a state from being written: a tensor that is missing, unknown, or of another shape."""
        if state.keys() != self._shapes.keys():
            lacks, knows_not = sorted(self._shapes.keys() - state.keys()), sorted(state.keys() - self._shapes.keys())
            return f"{f'the weights lack {lacks[0]}' if lacks else f'the model has no {knows_not[0]}'}"
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) != shape:
                return f"{name} has the shape {tuple(state[name].shape)} and not {shape}"
        return None

    def write(self, state: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Copies a state without a fault, or some tensors of it, into parameters or others of their shapes and strides."""
        for name, tensor in state.items():
            given = tensor.contiguous()
            for copy in self._of.get(name, ()):
                copy.target.within(parameters[copy.parameter]).copy_(copy.source.within(given))

    def _give_back(self, parameters: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the copies alone make each parameter what it is now, number by number, and all else of it is zero."""
        for place, parameter in enumerate(parameters):
            again = torch.zeros_like(parameter)
            for copy in self._copies:
                if copy.parameter == place:
                    copy.target.within(again).copy_(copy.source.within(state[copy.name]))
            if not same_bits(again, parameter):
                return False
        return True


class _Copies(TorchDispatchMode):
    """Notes who was copied into whom."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.made.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))
