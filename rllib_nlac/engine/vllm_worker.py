"""What runs in vLLM's workers: in this process, or under tensor parallelism in one for each part of the model.

Private seams of vLLM, too, and pinned with those of ``vllm_engine``. vLLM imports this module by its name, before it loads a
model.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.slices import Slices

logger = logging.getLogger(__name__)

if not torch.cuda.is_available():
    # oneDNN packs each matrix into a copy of its own. A reload of weights never reaches the copy of an output layer that is
    # tied to the embedding, so the engine would go on with stale logits. In half precision, on processors with AMX, so does
    # another kernel for small matrices, and nothing is left of the weights to be compared with what was given.
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    if multiprocessing.parent_process() is not None:  # a worker of a tensor-parallel engine, which nothing else shares
        torch.compiler.set_stance("force_eager")


class Sums:
    """Checksums of tensors that come one after the other.

    Args:
        dtype: The model's precision.

    Attributes:
        received: Checksum of the tensors as they come.
        given: Checksum of the tensors in the model's precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.received = self.given = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Takes account of a tensor."""
        found = checksum([tensor])
        self.received += found
        self.given += found if tensor.dtype is self._dtype else checksum([tensor.to(self._dtype)])


class WorkerExtension:
    """Methods that vLLM adds to its worker. None of them raises: under tensor parallelism vLLM would take the answers of the
    other workers for those to its next call.

    Each weight set is kept in the host's memory, so that another set serves after a copy within the worker: nothing is sent,
    pickled or loaded anew. On a CPU that is the state as it was given; beside a GPU, and where workers share the model, it is
    this worker's part, fused and split as the model has it.
    """

    model_runner: Any
    kept_weights: dict[str, Any]
    slices: Slices | None
    # Methods of vLLM's worker.
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    shutdown_weight_transfer_engine: Callable[[], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def take_weights(self, which: str, state: Mapping[str, torch.Tensor], serve: bool) -> tuple[int, int, str | None]:
        """Takes a state in the checkpoint's format and names. On a CPU it is kept as it is, and nobody changes it afterwards.

        Args:
            which: Name of the weight set.
            state: Its tensors, on any device.
            serve: Whether it serves from now on. Else the model stays as it is, unless it had to load the state to keep it.

        Returns:
            Checksums of the state, as it came and in the model's precision; and why it was not taken, or None.
        """
        try:
            sums = Sums(self._parameters()[0].dtype)
            self._take(which, state, serve, sums.add)
            return sums.received, sums.given, None
        except ValueError as error:
            return 0, 0, str(error)
        except Exception as error:
            return 0, 0, f"{type(error).__name__}: {error}"

    def keep_ids(self, count: int) -> None:
        """Leaves the ids from ``count`` on out of the distribution, before a sampler or a grammar sees it.

        vLLM has no cheap way: ``allowed_token_ids`` fills a table of requests by ids at each change of a batch,
        ``logit_bias`` takes at most 100 off and not any number of ids, and processors of logits have one interface in each of
        its two model runners.
        """
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None:  # another worker samples
                logits[..., count:] = -torch.inf
            return logits

        model.compute_logits = compute_logits

    def join_transfer(self, init_info: dict[str, Any]) -> str | None:
        """Connects this worker with a trainer's end of vLLM's weight transfer; why that failed, or None."""
        try:
            self.shutdown_weight_transfer_engine()  # the end of an earlier connection
            self.init_weight_transfer_engine(init_info)
            return None
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def receive_weights(self, which: str, update_info: dict[str, Any]) -> tuple[int, int, str | None]:
        """As ``take_weights``, of a state that a trainer sends by vLLM's weight transfer; it serves from now on.

        After a fault the model is of no use: layers that were not loaded have no memory.
        """
        model, sums = self.model_runner.get_model(), Sums(self._parameters()[0].dtype)
        load = model.load_weights

        def look_and_load(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            pairs = list(weights)
            for _, tensor in pairs:
                sums.add(tensor)
            return load(pairs)

        try:
            model.load_weights = look_and_load
            self.start_weight_update()
            self.update_weights(update_info)
            self.finish_weight_update()
            self._keep_parts(which)
            return sums.received, sums.given, None
        except Exception as error:
            return 0, 0, f"{type(error).__name__}: {error}"
        finally:
            del model.load_weights

    def _kept_parts(self, which: str) -> list[torch.Tensor]:
        """Where this worker keeps its part of a set; what no slice is written to stays zero."""
        kept, parameters = self.__dict__.setdefault("kept_weights", {}), self._parameters()
        if which not in kept:
            kept[which] = [torch.zeros(p.shape, dtype=p.dtype, device="cpu", pin_memory=p.is_cuda) for p in parameters]
        return kept[which]

    def _keep_parts(self, which: str) -> None:
        """Keeps what the model has as its part of a set."""
        for own, parameter in zip(self._kept_parts(which), self._parameters(), strict=True):
            own.copy_(parameter)

    def _take(self, which: str, state: Mapping[str, torch.Tensor], serve: bool, look: Callable[[torch.Tensor], None]) -> None:
        """As ``take_weights``.

        Args:
            which: As there.
            state: As there.
            serve: As there.
            look: Is given each tensor, on the model's device where it goes there anyway.

        Raises:
            ValueError: The state is not this model's.
        """
        parameters, in_parts, learns = self._parameters(), self._keeps_parts(), "slices" not in self.__dict__
        if learns:
            # They are told apart by their memory, and an optimizer may have them in one piece.
            places = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
            apart = len(places) == len(state)
            self.slices = self._learn_slices(state if apart else {name: tensor.clone() for name, tensor in state.items()})
        elif self.slices is not None and (fault := self.slices.fault_of(state)):
            raise ValueError(fault)
        if self.slices is None:
            self._reload(state)
        if self.slices is not None and in_parts and not learns:
            into = parameters if serve else self._kept_parts(which)
            for name, tensor in state.items():
                here = tensor.to(parameters[0].device)
                look(here)
                self.slices.write({name: here}, into)
            if serve:
                self._keep_parts(which)
            return
        for tensor in state.values():
            look(tensor)
        if self.slices is None or in_parts:
            self._keep_parts(which)
            return
        self.__dict__.setdefault("kept_weights", {})[which] = state
        if serve and not learns:
            self.slices.write(state, parameters)

    def serve_weights(self, which: str) -> None:
        """Puts weights that were taken before into the model."""
        kept = self.kept_weights[which]
        if isinstance(kept, Mapping):
            assert self.slices is not None
            self.slices.write(kept, self._parameters())
            return
        for own, parameter in zip(kept, self._parameters(), strict=True):
            parameter.copy_(own)

    def _keeps_parts(self) -> bool:
        return self._parameters()[0].is_cuda or self.model_runner.parallel_config.tensor_parallel_size > 1

    def _learn_slices(self, state: Mapping[str, torch.Tensor]) -> Slices | None:
        """Loads a state into the model as it serves; None where that does not go, and then nothing is known of the model."""
        model = self.model_runner.get_model()
        obstacle: object = "its loader does more than to copy"
        try:
            with torch.no_grad():
                slices = Slices.learned(lambda given: model.load_weights(iter(given.items())), self._parameters(), state)
        except Exception as error:
            slices, obstacle = None, error
        if slices is None:
            logger.warning(
                "%s: vLLM loads the whole model at every sync of weights, which takes longer than to copy them: %s",
                *(type(model).__name__, obstacle),
            )
        return slices

    def _reload(self, state: Mapping[str, torch.Tensor]) -> None:
        """As when the model was first loaded."""
        self.model_runner.reload_weights(weights_iterator=iter(state.items()))

    def take_adapter(self, number: int, settings: dict[str, Any], adapter: Mapping[str, torch.Tensor]) -> None:
        """Puts an adapter, under PEFT's names, in the place of the one that had this number."""
        manager = self.model_runner.lora_manager
        loaded = LoRAModel.from_lora_tensors(
            lora_model_id=number,
            tensors={name: tensor.clone() for name, tensor in adapter.items()},  # vLLM multiplies them by the scale in place
            peft_helper=PEFTHelper.from_dict(settings),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=_renames(self.model_runner.get_model()),
        )
        manager.remove_adapter(number)
        manager._adapter_manager.add_adapter(loaded)
        manager._adapter_manager.activate_adapter(number)

    def adapter_checksums(self, number: int) -> tuple[list[int], torch.dtype]:
        """Checksums of an adapter's tensors in this worker, as the model reads them; and their precision."""
        adapters = self.model_runner.lora_manager._adapter_manager
        slot = adapters.lora_index_to_id.index(number)
        stacks = [s for module in adapters.modules.values() for s in (*module.lora_a_stacked, *module.lora_b_stacked)]
        return [checksum([stack[slot]]) for stack in stacks], stacks[0].dtype

    def weight_checksums(self) -> tuple[list[int], torch.dtype]:
        """Checksums of this worker's parameters, in an order that all workers share; and their precision."""
        parameters = self._parameters()
        return [checksum([parameter]) for parameter in parameters], parameters[0].dtype

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model_runner.get_model().parameters()]


def _renames(model: torch.nn.Module) -> Any:
    """How a checkpoint's modules are called in a model, as far as only names change; None where they are called the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # vLLM 0.25 calls it so.
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
