"""DeepSpeed behind a handful of methods. Every private seam of DeepSpeed is in this file; ``tests/compatibility`` pins each."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LARGEST_BUCKET = 500_000_000  # DeepSpeed's default


class DeepSpeedTrainer:
    """A model, its optimizer and the gradient step, in a DeepSpeed engine.

    Args:
        lm: The model, already on its device.
        optimizer: A torch optimizer over the model's parameters.
        settings: DeepSpeed's own configuration, as ``NLACConfig.deepspeed_settings`` resolves it.
    """

    def __init__(self, lm: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> None:
        # DeepSpeed moves the model to the device that these two name: the one where it is, also beside GPUs that are not ours.
        device = next(lm.parameters()).device
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        os.environ["DS_ACCELERATOR"] = device.type
        import deepspeed

        if not torch.distributed.is_initialized():
            # A world of one needs no port and no environment variables.
            backend = "nccl" if device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.world_size = torch.distributed.get_world_size()
        # On a CPU DeepSpeed compiles an operator for communication through shared memory when it starts (35 s and a C++
        # compiler), which gloo makes unnecessary.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        zero = dict(settings.get("zero_optimization", {}))
        self.zero_stage = int(zero.get("stage", 0))
        # ZeRO sets a buffer of this many numbers aside, 2 GB by default, and a small model's gradients need no such room.
        numbers = sum(parameter.numel() for parameter in lm.parameters() if parameter.requires_grad)
        zero.setdefault("reduce_bucket_size", min(LARGEST_BUCKET, numbers))
        self.engine, *_ = deepspeed.initialize(
            model=lm,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                # backward() adds up as many micro-batches as it is given; step() is the only boundary.
                "gradient_accumulation_steps": 1,
                "managed_gradient_accumulation": False,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": 10**9,
                **settings,
                "zero_optimization": zero,
            },
        )
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        if isinstance(self.engine.optimizer, FP16_UnfusedOptimizer):
            # It has made a step on gradients of zero, to fill the memory: Adam's bias correction would be one step ahead.
            optimizer.state.clear()
            self.take_over()
        # Without ZeRO, DeepSpeed clips in float32 without keeping the norm.
        self._keeps_norm = self.zero_stage > 0 or self.engine.bfloat16_enabled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, through DeepSpeed's hooks."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's share of the gradient; shares add up to the sum over all learners.

        DeepSpeed averages over learners, and a loss whose weights already hold the mean wants the sum. The gradient of a loss
        that is not finite may be: it is made NaN, so that ``step`` of every learner learns of it by the gradient's norm.
        """
        poison = torch.where(loss.detach().isfinite(), 1.0, torch.nan).to(loss.dtype)
        self.engine.backward(loss * self.world_size * poison)

    def step(self) -> float:
        """Clips, steps the optimizer and its schedule, clears the gradient; returns the gradient's norm before clipping.

        Where the norm is not finite, on any learner, all learners drop the gradient: weights, optimizer and schedule stay as
        they were.

        Raises:
            RuntimeError: DeepSpeed stepped on such a gradient, or keeps no norm.
        """
        own = None if self._keeps_norm else self._reduced_norm()
        if own is not None and not own.isfinite():
            self.engine.zero_grad()
            return float(own)
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if self._keeps_norm else own
        if norm is None or (not math.isfinite(norm) and self.engine.was_step_applied()):
            raise RuntimeError(
                f"DeepSpeed stepped on a gradient whose norm is {norm}: leave compute_grad_norm and check_grad_overflow out of "
                "deepspeed_config, and go on from the last checkpoint"
            )
        return float(norm)

    def _reduced_norm(self) -> torch.Tensor | None:
        """Norm of the gradient, averaged over the learners here and not in DeepSpeed's step, which keeps no norm."""
        if self.world_size > 1:
            self.engine.enable_backward_allreduce = False
            self.engine.buffered_allreduce_fallback()
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else None

    def most_of_any_learner(self, count: int) -> int:
        """The largest ``count`` over all learners."""
        if self.world_size == 1:
            return count
        largest = torch.tensor(count, device=next(self.engine.module.parameters()).device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    @property
    def is_sharded(self) -> bool:
        """Whether each learner holds another part of the optimizer's state."""
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        return self.world_size > 1 and isinstance(self.engine.optimizer, ZeROOptimizer)

    @property
    def rank(self) -> int:
        """This learner's place among all."""
        return torch.distributed.get_rank()

    def parts(self, size: int = LARGEST_BUCKET) -> Iterator[dict[str, torch.nn.Parameter]]:
        """All parameters that are trained, by their names, a part at a time; each whole, also where ZeRO 3 shards them.

        All learners must take part, to the end.

        Args:
            size: The most numbers of a part; a single parameter that has more is a part of its own.
        """
        parts: list[dict[str, torch.nn.Parameter]] = [{}]
        room = size
        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            numbers = getattr(parameter, "ds_numel", parameter.numel())  # of a shard numel() is 0
            if parts[-1] and numbers > room:
                parts.append({})
                room = size
            parts[-1][name] = parameter
            room -= numbers
        for part in parts:
            with whole(part.values()):
                yield part

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, this learner's shard, in the host's memory, as its reader may have no GPU."""
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        scheduler = self.engine.lr_scheduler
        return {
            "optimizer": clone_tensors_for_torch_save(self.engine.optimizer.state_dict(), torch.device("cpu")),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "global_steps": self.engine.global_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` gave."""
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        optimizer = state["optimizer"]
        if self.engine.device.type == "cpu":  # there the optimizer would train in the state's own tensors
            optimizer = copy.deepcopy(optimizer)
        if isinstance(self.engine.optimizer, ZeROOptimizer):
            # It asks for the shards of all learners and takes its own.
            rank = torch.distributed.get_rank()
            shards = [optimizer if place == rank else None for place in range(self.world_size)]
            # Without the last word, stages 1 and 2 would go on from the float32 weights that bfloat16 ones are rounded from.
            self.engine.optimizer.load_state_dict(shards, load_from_fp32_weights=True)
            self.engine.optimizer.clip_grad = self.engine.gradient_clipping()  # the configuration's, not the checkpoint's
        else:
            self.engine.optimizer.load_state_dict(optimizer)
        if state["scheduler"] is not None and self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.load_state_dict(state["scheduler"])
        self.engine.global_steps = state["global_steps"]

    def take_over(self) -> None:
        """Parameters that were set from outside are what is trained from now on: copies of them that are kept follow."""
        refresh = getattr(self.engine.optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()


def read_shard(file: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote of a learner's state. Of all classes that a file can name, only these are ever built."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(file, weights_only=True)


@contextmanager
def whole(parameters: Iterable[torch.nn.Parameter], modified: bool = False) -> Iterator[None]:
    """Within it, those of the parameters that ZeRO 3 shards are whole; all learners must take part.

    Args:
        parameters: A module's.
        modified: Whether the block changes the parameters; the first learner's are taken over by all.
    """
    import deepspeed

    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modified else None, enabled=bool(sharded)):
        yield
