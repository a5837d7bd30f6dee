"""The RLModule around a Hugging Face causal language model. One set of weights plays every role."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from transformers import AutoModelForCausalLM

from rllib_nlac.engine.chat import check_model_path
from rllib_nlac.learner.deepspeed import whole


class CausalLMModule(TorchRLModule):
    """Holds the trained model; generation happens in the engines, never here.

    ``model_config``: ``model`` (a folder or name), ``dtype`` ("float32", "bfloat16"), ``gradient_checkpointing``,
    ``attn_implementation``.
    """

    def setup(self) -> None:
        self.lm = self.load_lm()

    def load_lm(self) -> torch.nn.Module:
        """The language model that ``model_config`` names."""
        config = self.model_config
        check_model_path(config["model"])
        lm = AutoModelForCausalLM.from_pretrained(
            config["model"],
            dtype=getattr(torch, config.get("dtype", "float32")),
            attn_implementation=config.get("attn_implementation"),
        )
        if config.get("gradient_checkpointing"):
            lm.gradient_checkpointing_enable()
            # A layer recomputes in training mode only, and models are loaded in evaluation mode. What is inside the layers
            # stays in it: with dropout engine and learner would not agree.
            for module in lm.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True
        return lm

    @property
    def trained(self) -> torch.nn.Module:
        """What the learner trains."""
        return self.lm

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The weights as CPU tensors, which keep bfloat16 where NumPy has none.

        Empty for ``inference_only``: EnvRunners hold no weights, the engines do, and those are fed by ``sync``.
        """
        return {} if inference_only else {name: tensor.cpu().clone() for name, tensor in self.trained.state_dict().items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if state:
            with whole(self.trained.parameters(), modified=True):
                self.trained.load_state_dict(state)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.LOGITS: self.lm(input_ids=batch["ids"]).logits}


def trainable_state(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by their Hugging Face names, tied ones once, as references and not copies."""
    return {name: parameter.detach() for name, parameter in lm.named_parameters()}
