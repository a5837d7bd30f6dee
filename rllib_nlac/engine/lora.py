"""LoRA: a weight set is an adapter over one base that all sets share. What an adapter is made of, and what serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from rllib_nlac.names import unknown_key

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM sets room aside for one of these
NOT_SERVED = {
    "use_dora": "DoRA scales the base's weights too",
    "modules_to_save": "these are full weights beside the adapter",
    "bias": "biases belong to the base",
    "init_lora_weights": "other starts than PEFT's own change the base's weights",
}
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoRASettings:
    """What ``config.lora`` says; the names are PEFT's, shortened. Weights are W + alpha / rank B A.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Scale of an adapter; None is twice the rank.
        dropout: Share of an adapter's inputs that are left out in a gradient step.
        target_modules: Names of the linear layers that have an adapter, or "all-linear": all but the output layer.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"

    @staticmethod
    def of(given: Mapping[str, Any]) -> LoRASettings:
        """Reads ``config.lora``.

        Raises:
            ValueError: A key is unknown, or is one that vLLM cannot serve, or a value cannot be used.
        """
        known = {field.name for field in fields(LoRASettings)}
        for key in given:
            if key in NOT_SERVED:
                raise ValueError(f"config.lora has {key!r}, which vLLM cannot serve ({NOT_SERVED[key]}): leave it out")
            if key not in known:
                raise ValueError(f"config.lora: {unknown_key(key, known)}")
        targets = given.get("target_modules", "all-linear")
        if isinstance(targets, str) and targets != "all-linear":
            raise ValueError(f"config.lora['target_modules'] is {targets!r}: give \"all-linear\" or a list of names")
        is_list = isinstance(targets, (list, tuple)) and bool(targets) and all(isinstance(name, str) for name in targets)
        if not isinstance(targets, str) and not is_list:
            raise ValueError(f"config.lora['target_modules'] is {targets!r}: give at least one name of a linear layer")
        return LoRASettings(**{**given, "target_modules": targets if isinstance(targets, str) else tuple(targets)})

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    @property
    def served_rank(self) -> int:
        """The rank that vLLM sets room aside for."""
        return next(rank for rank in SERVED_RANKS if rank >= self.rank)

    def for_peft(self) -> dict[str, Any]:
        """The same as arguments of PEFT's ``LoraConfig``, which are what its ``adapter_config.json`` holds."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        alpha = self.scale * self.rank
        return {"r": self.rank, "lora_alpha": alpha, "lora_dropout": self.dropout, "target_modules": targets}


def adapter_name(parameter: str) -> str:
    """PEFT's name of an adapter's tensor in a file, by its name within the learner's model."""
    return _PREFIX + parameter.replace(".default.", ".")


def pairs(adapter: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A (rank, in) and B (out, rank) of each layer, by the name of the layer's weight in the base."""
    layers = [name.removesuffix("lora_A.weight") for name in adapter if name.endswith("lora_A.weight")]
    return {
        f"{layer.removeprefix(_PREFIX)}weight": (adapter[f"{layer}lora_A.weight"], adapter[f"{layer}lora_B.weight"])
        for layer in layers
    }


def as_served(adapter: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """An adapter's tensors as an engine keeps them: in its precision, and each B times the scale."""
    return [tensor.to(dtype) * scale if ".lora_B." in name else tensor.to(dtype) for name, tensor in adapter.items()]


@torch.no_grad()
def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """W + scale B A in a precision for every layer that has an adapter, and else the base's own tensors as they are."""
    state = dict(base)
    for name, (a, b) in pairs(adapter).items():
        delta = (b.float() @ a.float()).mul_(scale)
        state[name] = delta.add_(base[name].float()).to(dtype)
    return state
