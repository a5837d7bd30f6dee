"""A language model with one scalar beside its logits, for algorithms whose critic is a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rllib_nlac.learner.rl_module import CausalLMModule


class ValueHeadModel(nn.Module):
    """The language model and a linear head on its last hidden state, zero at the start.

    Args:
        lm: A Hugging Face causal language model.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_to_keep: int | torch.Tensor = 1, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model once.

        Args:
            input_ids: Shape (B, T), padded on the right, or all in one row.
            positions: Where to read the scalar, shape (B,).
            logits_to_keep: Logits are computed for so many last positions, or at these.
            arguments: More of the language model's.

        Returns:
            Logits (B, logits_to_keep, V) and scalars (B,).
        """
        arguments["use_cache"] = False
        out = self.lm(input_ids=input_ids, logits_to_keep=logits_to_keep, output_hidden_states=True, **arguments)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        hidden = out.hidden_states[-1][rows, positions]
        return out.logits, self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()


class ValueHeadModule(CausalLMModule):
    """The RLModule around a language model with a value head."""

    def setup(self) -> None:
        self.model = ValueHeadModel(self.load_lm())

    @property
    def lm(self) -> torch.nn.Module:  # type: ignore[override]
        """The language model inside, which engines serve."""
        return self.model.lm

    @property
    def trained(self) -> torch.nn.Module:
        return self.model
