"""The optimizer Muon (Jordan et al., 2024) in float32.

``torch.optim.Muon`` works in bfloat16, which takes a CPU that has no units for it many times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices of the same singular vectors whose singular values are all about 1, by Newton and Schulz's iteration.

    Args:
        matrices: Shape (N, rows, columns).

    Returns:
        The same shape; singular values are between 0.4 and 1.3, save those that were less than a fiftieth of the largest.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.transpose(1, 2) if tall else matrices
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.transpose(1, 2)
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.transpose(1, 2) if tall else found


def shared(matrices: torch.Tensor) -> torch.Tensor:
    """``orthogonal``, where each process of the group does a part of the matrices."""
    if not dist.is_initialized():
        return orthogonal(matrices)
    found, own = torch.zeros_like(matrices), slice(dist.get_rank(), None, dist.get_world_size())
    found[own] = orthogonal(matrices[own])
    dist.all_reduce(found)
    return found


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum, and steps as large as AdamW's (``match_rms_adamw`` of ``torch.optim.Muon``).

    Matrices of one shape are made orthogonal together; processes of one torch.distributed group share that work.

    Args:
        params: Matrices.
        lr: Learning rate.
        momentum: Momentum of the gradient's running mean.
        weight_decay: Decoupled, times the learning rate.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = torch.zeros_like(parameter)
                    mean = state["mean"]
                    mean.lerp_(parameter.grad, 1 - group["momentum"])
                    alike[parameter.shape].append((parameter, parameter.grad.lerp(mean, group["momentum"])))
            for shape, pairs in alike.items():
                size = group["lr"] * 0.2 * max(shape) ** 0.5
                for (parameter, _), update in zip(pairs, shared(torch.stack([u for _, u in pairs])), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=size)
