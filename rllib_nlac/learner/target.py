"""Target weights θ̄: an exponential moving average of θ, which guards the backup against chasing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class TargetWeights:
    """θ̄ <- (1-τ) θ̄ + τ θ, kept in float32 so that a small τ is not lost to rounding.

    Args:
        parts: θ at the start, which θ̄ copies, in as many parts as it comes in.
        tau: 0 freezes the target, 1 makes it a copy of θ.
        num_shares: Number of learners that shard θ̄; each keeps a contiguous 1/num_shares of every flattened parameter. 1 keeps
            the parameters as they are.
        rank: Which share is kept here.
    """

    def __init__(self, parts: Iterable[Mapping[str, torch.Tensor]], tau: float, num_shares: int = 1, rank: int = 0) -> None:
        self.tau = tau
        self.num_shares = num_shares
        self.rank = rank
        self.state = {name: self._share(tensor).to(torch.float32, copy=True) for part in parts for name, tensor in part.items()}

    @torch.no_grad()
    def update(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """One step of the average towards θ."""
        for part in parts:
            for name, tensor in part.items():
                self.state[name].lerp_(self._share(tensor).to(torch.float32), self.tau)

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """One parameter of θ̄ in the shape and precision of another tensor; all learners must take part."""
        share = self.state[name].to(like.dtype)
        if self.num_shares == 1:
            return share
        padded = torch.zeros(self._size(like), dtype=share.dtype, device=share.device)
        padded[: len(share)] = share
        shares = [torch.empty_like(padded) for _ in range(self.num_shares)]
        torch.distributed.all_gather(shares, padded)
        return torch.cat(shares)[: like.numel()].view(like.shape)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces this share of θ̄, as when a checkpoint is restored."""
        for name, tensor in state.items():
            self.state[name].copy_(tensor)

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.num_shares == 1:
            return tensor.detach()
        size = self._size(tensor)
        return tensor.detach().flatten()[self.rank * size : (self.rank + 1) * size]

    def _size(self, tensor: torch.Tensor) -> int:
        """Numbers of a share; the last may have fewer, or none."""
        return -(-tensor.numel() // self.num_shares)
