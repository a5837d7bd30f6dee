"""DeepSpeed's private seams, all of them in ``learner/deepspeed.py``."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pickle
from itertools import pairwise
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from rllib_nlac.learner.deepspeed import DeepSpeedTrainer, read_shard


def make(stage: int = 0, **zero: int) -> DeepSpeedTrainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return DeepSpeedTrainer(model, optimizer, {"zero_optimization": {"stage": stage, **zero}, "gradient_clipping": 0.0})


def test_the_shared_memory_operator_is_asked_for_by_this_name():
    source = inspect.getsource(importlib.import_module("deepspeed.comm.torch").build_shm_op)
    assert "__compatible_ops__" in source and "builder.NAME" in source
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__


def test_unmanaged_accumulation_is_a_key():
    assert deepspeed_config.get_managed_gradient_accumulation({"managed_gradient_accumulation": False}) is False


def test_the_engine_works_where_the_model_is(monkeypatch):
    """Whatever a launcher's variables say: DeepSpeed would move the model to the device that they name."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    trainer = make()
    assert trainer.engine.local_rank == 0 and trainer.engine.device == torch.device("cpu")


def test_the_optimizer_of_bfloat16_without_zero_fills_its_state_by_a_step_of_its_own():
    """Which is why the trainer clears it; without this the step that it makes good is gone, or has another place."""
    source = inspect.getsource(FP16_UnfusedOptimizer.initialize_optimizer_states)
    assert "self.optimizer.step()" in source
    assert "self.initialize_optimizer_states()" in inspect.getsource(FP16_UnfusedOptimizer.__init__)
    assert callable(FP16_UnfusedOptimizer.refresh_fp32_params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sets_no_more_aside_than_the_model_has_numbers(stage):
    assert make(stage).engine.optimizer.reduce_bucket_size == 8
    assert make(stage, reduce_bucket_size=100).engine.optimizer.reduce_bucket_size == 100


def weight_of(trainer: DeepSpeedTrainer) -> torch.Tensor:
    (whole,) = trainer.parts()
    return whole["weight"].detach().clone()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("size", "parts"), [(1, [["weight"], ["bias"]]), (7, [["weight"], ["bias"]]), (8, [["weight", "bias"]])]
)
def test_parts_hold_every_parameter_once_and_whole(stage, size, parts):
    shapes = {"weight": (2, 3), "bias": (2,)}
    seen = []
    for part in make(stage).parts(size):
        seen.append(list(part))
        assert all(tuple(parameter.shape) == shapes[name] for name, parameter in part.items())
    assert seen == parts


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_backward_adds_up_and_step_is_the_only_boundary(stage):
    trainer = make(stage)
    x = torch.ones(1, 3)
    before = weight_of(trainer)
    for _ in range(3):
        trainer.backward(trainer(x).sum())
    norm = trainer.step()
    moved = before - weight_of(trainer)
    torch.testing.assert_close(moved, torch.full((2, 3), 1.5))  # learning rate 0.5, three times a gradient of 1
    assert norm == pytest.approx((8 * 9) ** 0.5)  # six weights and two biases, each with a gradient of 3


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def adam(stage: int, dtype: str, **settings) -> DeepSpeedTrainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(DTYPES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return DeepSpeedTrainer(
        model,
        optimizer,
        {"zero_optimization": {"stage": stage}, "bf16": {"enabled": dtype == "bfloat16"}, "gradient_clipping": 1.0} | settings,
    )


def all_weights(trainer: DeepSpeedTrainer) -> list[float]:
    return [x for part in trainer.parts() for p in part.values() for x in p.detach().float().flatten().tolist()]


def backward(trainer: DeepSpeedTrainer, times: float) -> None:
    x = torch.ones(2, 3, dtype=next(trainer.engine.module.parameters()).dtype)
    trainer.backward(trainer(x).float().sum() * times)


@pytest.mark.parametrize("times", [float("nan"), float("inf"), 2e38])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_is_dropped_and_leaves_no_trace(stage, dtype, times):
    """With a loss that is none, and with one that is finite while the gradient's norm overflows."""
    fresh, trainer = adam(stage, dtype), adam(stage, dtype)
    before = all_weights(trainer)
    for _ in range(3):
        backward(trainer, 1.0)
        backward(trainer, times)
        assert not math.isfinite(trainer.step())
        assert all_weights(trainer) == before
    for each in (fresh, trainer):
        backward(each, 1.0)
        assert math.isfinite(each.step())
        backward(each, 2.0)
        each.step()
    assert all_weights(trainer) == all_weights(fresh) != before


@pytest.mark.parametrize("stage", [1, 2])
def test_a_deepspeed_that_does_not_look_is_an_error(stage):
    zero = {"stage": stage, "compute_grad_norm": False}
    trainer = adam(stage, "float32", zero_optimization=zero, gradient_clipping=0.0)
    backward(trainer, 1.0)
    with pytest.raises(RuntimeError, match="leave compute_grad_norm"):
        trainer.step()
    trainer = adam(stage, "bfloat16", bf16={"enabled": True, "check_grad_overflow": False})
    backward(trainer, float("nan"))
    with pytest.raises(RuntimeError, match="DeepSpeed stepped on a gradient whose norm is"):
        trainer.step()


def two_learners(rank: int, folder: str) -> None:
    """One of two processes; the second's second loss is none."""
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for stage in (0, 1, 2, 3):
        for dtype in DTYPES:
            trainer = adam(stage, dtype)
            weights, norms = [all_weights(trainer)], []
            for number in range(3):
                backward(trainer, float("nan") if (rank, number) == (1, 1) else 1.0)
                norms.append(math.isfinite(trainer.step()))
                weights.append(all_weights(trainer))
            found[f"{stage} {dtype}"] = norms, [a == b for a, b in pairwise(weights)], weights[-1]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.process
def test_two_learners_drop_it_together(tmp_path):
    torch.multiprocessing.spawn(two_learners, args=(str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == 8
    for name, (norms, stayed, weights) in first.items():
        assert norms == [True, False, True] and stayed == [False, True, False], name
        assert second[name] == [norms, stayed, weights], name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_shard_is_read_without_building_any_other_class(stage, tmp_path):
    trainer = make(stage)
    trainer.backward(trainer(torch.ones(1, 3)).sum())
    trainer.step()
    torch.save({"deepspeed": trainer.state_dict(), "torch_rng": torch.get_rng_state()}, tmp_path / "shard.pt")
    state = read_shard(tmp_path / "shard.pt")
    trainer.load_state_dict(state["deepspeed"])
    assert torch.equal(state["torch_rng"], torch.get_rng_state()) and state["deepspeed"]["global_steps"] == 1


def test_a_shard_that_names_another_class_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"deepspeed": Evil()}, tmp_path / "shard.pt")
    with pytest.raises(pickle.UnpicklingError, match="print"):
        read_shard(tmp_path / "shard.pt")
