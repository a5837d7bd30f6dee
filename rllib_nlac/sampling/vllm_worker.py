"""What runs in vLLM's workers: in this process, or under tensor parallelism in one for each part of the model.

Private seams of vLLM, too, and pinned with those of ``vllm_engine``. vLLM imports this module by its name, before it loads a
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm._custom_ops

from rllib_nlac.sampling.engine import checksum

if not torch.cuda.is_available():
    # oneDNN packs each matrix into a copy of its own. A reload of weights never reaches the copy of an output layer that is
    # tied to the embedding, so the engine would go on with stale logits.
    vllm._custom_ops._supports_onednn = False


class WorkerExtension:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def take_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads a state dict in the checkpoint's format and names, fused and split as when the model was first loaded."""
        self.model_runner.reload_weights(weights_iterator=iter(state.items()))

    def weight_checksums(self) -> tuple[list[float], torch.dtype]:
        """Of each parameter of this worker's part of the model, in the order that all parts have; and their precision."""
        parameters = list(self.model_runner.get_model().parameters())
        return [checksum([parameter]) for parameter in parameters], parameters[0].dtype
