"""What runs in vLLM's workers: in this process, or under tensor parallelism in one for each part of the model.

Private seams of vLLM, too, and pinned with those of ``vllm_engine``. vLLM imports this module by its name, before it loads a
model.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

import torch
import vllm._custom_ops
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rllib_nlac.engine.shared import checksum

if not torch.cuda.is_available():
    # oneDNN packs each matrix into a copy of its own. A reload of weights never reaches the copy of an output layer that is
    # tied to the embedding, so the engine would go on with stale logits.
    vllm._custom_ops._supports_onednn = False
    if multiprocessing.parent_process() is not None:  # a worker of a tensor-parallel engine, which nothing else shares
        torch.compiler.set_stance("force_eager")


class WorkerExtension:
    """Methods that vLLM adds to its worker.

    Each weight set is kept in the host's memory as this worker has it, fused and split, so that another set serves after a
    copy within the worker: nothing is sent, pickled or loaded anew.
    """

    model_runner: Any
    kept_weights: dict[str, list[torch.Tensor]]

    def take_weights(self, which: str, state: Mapping[str, torch.Tensor]) -> None:
        """Loads and keeps a state dict in the checkpoint's format and names, as when the model was first loaded."""
        self.model_runner.reload_weights(weights_iterator=iter(state.items()))
        parameters = self._parameters()
        kept = self.__dict__.setdefault("kept_weights", {})
        if which not in kept:
            kept[which] = [torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=p.is_cuda) for p in parameters]
        for own, parameter in zip(kept[which], parameters, strict=True):
            own.copy_(parameter)

    def serve_weights(self, which: str) -> None:
        """Puts weights that were taken before into the model."""
        for own, parameter in zip(self.kept_weights[which], self._parameters(), strict=True):
            parameter.copy_(own)

    def take_adapter(self, number: int, settings: dict[str, Any], adapter: Mapping[str, torch.Tensor]) -> None:
        """Puts an adapter, under PEFT's names, in the place of the one that had this number."""
        manager = self.model_runner.lora_manager
        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        loaded = LoRAModel.from_lora_tensors(
            lora_model_id=number,
            tensors={name: tensor.clone() for name, tensor in adapter.items()},  # vLLM multiplies them by the scale in place
            peft_helper=PEFTHelper.from_dict(settings),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )
        manager.remove_adapter(number)
        manager._adapter_manager.add_adapter(loaded)
        manager._adapter_manager.activate_adapter(number)

    def adapter_checksums(self, number: int) -> tuple[list[int], torch.dtype]:
        """Of each tensor of an adapter's part in this worker, where the model reads it; and their precision."""
        adapters = self.model_runner.lora_manager._adapter_manager
        slot = adapters.lora_index_to_id.index(number)
        stacks = [s for module in adapters.modules.values() for s in (*module.lora_a_stacked, *module.lora_b_stacked)]
        return [checksum([stack[slot]]) for stack in stacks], stacks[0].dtype

    def weight_checksums(self) -> tuple[list[int], torch.dtype]:
        """Of each parameter of this worker's part of the model, in the order that all parts have; and their precision."""
        parameters = self._parameters()
        return [checksum([parameter]) for parameter in parameters], parameters[0].dtype

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model_runner.get_model().parameters()]
