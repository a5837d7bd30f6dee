"""Target weights θ̄: an exponential moving average of θ, which guards the backup against chasing itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class TargetWeights:
    """θ̄ <- (1-τ) θ̄ + τ θ, kept in float32 so that a small τ is not lost to rounding.

    Args:
        state: θ at the start, which θ̄ copies.
        tau: 0 freezes the target, 1 makes it a copy of θ.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], tau: float) -> None:
        self.tau = tau
        self.state = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in state.items()}

    @torch.no_grad()
    def update(self, state: Mapping[str, torch.Tensor]) -> None:
        """One step of the average towards θ."""
        for name, tensor in state.items():
            self.state[name].lerp_(tensor.to(torch.float32), self.tau)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces θ̄, as when a checkpoint is restored."""
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
