"""DeepSpeed's private seams, all of them in ``learner/deepspeed.py``."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as deepspeed_config

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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_shard_is_read_without_building_any_other_class(stage):
    trainer = make(stage)
    trainer.backward(trainer(torch.ones(1, 3)).sum())
    trainer.step()
    file = io.BytesIO()
    torch.save({"deepspeed": trainer.state_dict(), "torch_rng": torch.get_rng_state()}, file)
    state = read_shard(file.getvalue())
    trainer.load_state_dict(state["deepspeed"])
    assert torch.equal(state["torch_rng"], torch.get_rng_state()) and state["deepspeed"]["global_steps"] == 1


def test_a_shard_that_names_another_class_is_refused():
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    file = io.BytesIO()
    torch.save({"deepspeed": Evil()}, file)
    with pytest.raises(pickle.UnpicklingError, match="print"):
        read_shard(file.getvalue())
