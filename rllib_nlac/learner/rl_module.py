"""The RLModule around a Hugging Face causal language model. One set of weights plays every role."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from transformers import AutoModelForCausalLM, PreTrainedModel

from rllib_nlac.engine.chat import check_model_path
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.model_folder import num_ids
from rllib_nlac.learner.adapter import add_adapter, has_adapter, served_names
from rllib_nlac.learner.deepspeed import whole


@dataclass(frozen=True)
class LearnerModel:
    """How the learner holds the model; each field is a key of ``learner_model``.

    Attributes:
        dtype: "float32" or "bfloat16"; with the latter DeepSpeed keeps float32 master weights. Under RLlib's own algorithms,
            which have no DeepSpeed, "bfloat16" is for the base of an adapter, and the adapter is float32. "auto" takes
            bfloat16 on a CPU that computes in it, for models that are saved in it, and else float32.
        attn_implementation: As in Transformers: "sdpa", "flash_attention_2", ...
        packing: "always" lays the sequences of a micro-batch end to end, without padding, and computes once what several begin
            with; where the model's attention does not allow it they are padded, and the log says why. "never" pads. "auto"
            packs on a CPU and pads on a GPU.
        gradient_checkpointing: Trades compute for memory.
    """

    dtype: str = "auto"
    attn_implementation: str | None = None
    packing: str = "auto"
    gradient_checkpointing: bool = False


class CausalLMModule(TorchRLModule):
    """Holds the trained model; generation happens in the engines, never here.

    ``model_config``: ``model`` (a folder or name), the fields of ``LearnerModel``, ``lora`` (as ``config.lora``, None without
    an adapter) and its ``seed``.
    """

    def setup(self) -> None:
        self.lm = self.load_lm()

    def load_lm(self) -> torch.nn.Module:
        """The language model that ``model_config`` names; its logits are of the ids that its tokenizer has."""
        config = self.model_config
        check_model_path(config["model"])
        lm = AutoModelForCausalLM.from_pretrained(
            config["model"],
            dtype=getattr(torch, config.get("dtype", "float32")),
            attn_implementation=config.get("attn_implementation"),
        )
        if (known := num_ids(config["model"])) and known < lm.config.get_text_config().vocab_size:
            lm.register_forward_hook(partial(_keep_ids, known))
        if config.get("lora") is not None:
            add_adapter(lm, LoRASettings.of(config["lora"]), config.get("seed", 0))
        if config.get("gradient_checkpointing"):
            if (
                config.get("lora") is not None
            ):  # the embedding is frozen, and a layer without an input to differentiate is skipped
                lm.enable_input_require_grads()
            lm.gradient_checkpointing_enable()
            # A layer recomputes in training mode only, and models are loaded in evaluation mode. What is inside the layers
            # stays in it: with dropout engine and learner would not agree.
            for module in lm.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True
        return lm

    @override(torch.nn.Module)
    def train(self, mode: bool = True) -> Self:
        """Changes nothing: RLlib asks before every loss, and with dropout engine and learner would not agree."""
        return self

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
        """The weights as CPU tensors, which keep bfloat16 where NumPy has none; with an adapter only what is trained.

        Empty for ``inference_only``: EnvRunners hold no weights, the engines do, and those are fed by ``sync``.
        """
        return {} if inference_only else copied(own_entries(self.trained))

    def set_state(self, state: Mapping[str, Any]) -> None:
        if state:
            with whole(self.trained.parameters(), modified=True):
                load_own_entries(self.trained, state)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.LOGITS: self.lm(input_ids=batch["ids"]).logits}


def _keep_ids(count: int, lm: torch.nn.Module, given: Any, out: Any) -> None:
    """Leaves logits of the first ids alone, as a view."""
    out.logits = out.logits[..., :count]


def served_state(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What engines are given, by its names there, tied parameters once, as references and not copies."""
    names = served_names(lm)
    return {names[name]: parameter.detach() for name, parameter in lm.named_parameters() if name in names}


def own_entries(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The entries of a module's state that a checkpoint holds: all but the base of an adapter; as references."""
    base: set[int] = set()
    for lm in module.modules():
        if isinstance(lm, PreTrainedModel) and has_adapter(lm):
            adapter = served_names(lm)
            base |= {id(entry) for name, entry in lm.state_dict(keep_vars=True).items() if name not in adapter}
    return {name: entry for name, entry in module.state_dict(keep_vars=True).items() if id(entry) not in base}


def load_own_entries(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Puts back what ``own_entries`` gave.

    Raises:
        RuntimeError: Its names or shapes are not this module's.
    """
    if missing := own_entries(module).keys() ^ state.keys():
        raise RuntimeError(f"the state is not of this model: {len(missing)} names differ, as {min(missing)!r}; see config.lora")
    module.load_state_dict(state, strict=False)


def copied(entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in the host's memory."""
    return {name: entry.detach().cpu().clone() for name, entry in entries.items()}
