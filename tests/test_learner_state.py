"""What a learner goes on from: a restored state, an earlier one, weights alone, another configuration."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from gradient_steps import update, weights_of, zero
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.types import Weights


class TestState:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_state_restores_the_optimizer_and_the_target(self, make_learner, stage, dtype):
        """In bfloat16 with steps so small that most of them are seen in the float32 weights alone."""
        settings = zero(stage) | {"lr": 1e-3 if dtype == "float32" else 1e-5, "learner_model": {"dtype": dtype}}
        first, second = (make_learner(**settings) for _ in range(2))
        for _ in range(3):
            update(first)
        first.prepare_for_saving()
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        for _ in range(3):
            update(first), update(second)
        assert float(second.trainer.engine.optimizer.param_groups[0]["lr"]) == settings["lr"]
        for which in (Weights.POLICY, Weights.TARGET):
            mine, restored = first.export_weights()[which], second.export_weights()[which]
            assert all(torch.equal(mine[name], restored[name]) for name in mine)

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_an_earlier_state_is_gone_back_to(self, make_learner, stage):
        """Fails where RLlib keeps the weights, which it does of a learner that has made more steps than the state's."""
        learner = make_learner(**zero(stage))
        update(learner)
        learner.prepare_for_saving()
        state, then = learner.get_state(), learner.export_weights()  # as it is, without a copy
        then = {which: {name: tensor.clone() for name, tensor in of.items()} for which, of in then.items()}
        steps = []
        for _ in range(2):  # a state can be set again, whatever was done since
            update(learner), update(learner)
            learner.set_state(state)
            for which, expected in then.items():
                found = learner.export_weights()[which]
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), which
            update(learner)
            steps.append({name: tensor.clone() for name, tensor in learner.export_weights()[Weights.POLICY].items()})
        assert all(torch.equal(tensor, steps[1][name]) for name, tensor in steps[0].items())

    @pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "bfloat16"), (3, "float32")])
    def test_weights_that_are_set_alone_are_gone_on_from(self, make_learner, stage, dtype):
        """As by set_weights(). Fails where the next step writes DeepSpeed's own copies over them."""
        learner = make_learner(lr=1e-2, **zero(stage), learner_model={"dtype": dtype})
        learner.prepare_for_saving()
        early = pickle.loads(pickle.dumps(learner.get_state("rl_module")))["rl_module"]
        first = weights_of(learner)
        for _ in range(8):
            update(learner)
        late = weights_of(learner)
        learner.set_state({"rl_module": early})
        target = learner.export_weights()[Weights.TARGET]
        assert all(torch.equal(target[name].to(w.dtype), w) for name, w in first.items())
        update(learner)
        after = weights_of(learner)
        distance = [sum(float((after[name] - w).float().abs().sum()) for name, w in of.items()) for of in (first, late)]
        assert distance[0] < distance[1] / 2

    def test_a_state_without_target_weights_gives_them_those_of_the_policy(self, make_learner):
        first, second = make_learner(tau=None), make_learner(tau=0.5)
        update(first)
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        policy, target = second.export_weights().values()
        assert all(torch.equal(policy[name], target[name]) for name in policy)

    def test_gathered_weights_wait_for_a_state_that_holds_the_model(self, make_learner):
        learner = make_learner(**zero(3))
        expected = weights_of(learner)
        learner.prepare_for_saving()
        assert "rl_module" not in learner.get_state(not_components="rl_module")
        gathered = learner.get_state()["rl_module"][DEFAULT_MODULE_ID]
        assert expected.keys() <= gathered.keys() and all(torch.equal(gathered[name], expected[name]) for name in expected)

    @pytest.mark.parametrize("stage", [0, 2])
    def test_what_the_configuration_says_now_is_in_force_after_a_restore(self, make_learner, stage):
        """PBT changes a value and restores a checkpoint that holds the former one."""
        first = make_learner(**zero(stage), lr=1e-3, tau=0.5)
        update(first)
        second = make_learner(**zero(stage), lr=2e-4, optimizer={"weight_decay": 0.1}, tau=0.25, grad_clip=1e-3)
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        before = second.export_weights()
        group = second.trainer.engine.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (2e-4, 0.1)
        assert stage == 0 or second.trainer.engine.optimizer.clip_grad == 1e-3
        update(second)
        after = second.export_weights()
        largest = max(float((after[Weights.POLICY][n] - before[Weights.POLICY][n]).abs().max()) for n in after[Weights.POLICY])
        assert largest < 3e-4  # Adam's step is about the learning rate
        for name, value in after[Weights.TARGET].items():
            expected = torch.lerp(before[Weights.TARGET][name], after[Weights.POLICY][name], 0.25)
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("former", [1e-3, [[0, 1e-3], [100, 1e-4]]])
    def test_a_new_schedule_is_in_force_from_the_first_step_after_a_restore(self, make_learner, former):
        """As after a run that diverged. Fails where the former rate holds until RLlib's schedule speaks, after the update."""
        first, second = make_learner(lr=former, tau=0.0), make_learner(lr=[[0, 1e-5], [100, 1e-6]], tau=0.0)
        update(first, env_steps=50)
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        for _ in range(2):
            before = weights_of(second)
            before = {name: tensor.clone() for name, tensor in before.items()}
            update(second, env_steps=50)
            largest = max(float((tensor - before[name]).abs().max()) for name, tensor in weights_of(second).items())
            assert largest < 1.5 * 5.5e-6

    def test_the_schedule_of_the_checkpoint_goes_on_to_the_last_bit(self, make_learner):
        """Its rate is that of the last update, and not what it would be at the steps sampled by now."""
        schedule = [[0, 1e-3], [100, 1e-4]]
        first, second = make_learner(lr=schedule), make_learner(lr=tuple(map(tuple, schedule)))
        update(first, env_steps=50)
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        update(first, env_steps=80), update(second, env_steps=80)
        mine, restored = weights_of(first), weights_of(second)
        assert all(torch.equal(mine[name], restored[name]) for name in mine)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_the_optimizer_has_made_as_many_steps_as_were_asked_for(self, make_learner, stage, dtype):
        """DeepSpeed makes one on its own in bfloat16 without ZeRO, by which the first real one would be half as large."""
        learner = make_learner(**zero(stage), learner_model={"dtype": dtype})
        states = learner.get_optimizer(DEFAULT_MODULE_ID).state
        for made in (1, 2):
            update(learner)
            assert {float(state["step"]) for state in states.values() if "step" in state} == {made}

    def test_a_schedule_of_deepspeeds_goes_on_where_it_was(self, make_learner):
        """Fails where the first step after a restore is made with the configured rate."""
        decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 40, "warmup_num_steps": 2, "warmup_max_lr": 1e-3}}
        first, second = (make_learner(deepspeed_config={"scheduler": decay}) for _ in range(2))
        for _ in range(4):
            update(first)
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        rates = [learner.trainer.engine.optimizer.param_groups[0]["lr"] for learner in (first, second)]
        assert rates[0] == rates[1] < 1e-3

    @pytest.mark.parametrize(
        ("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16")]
    )
    def test_weights_that_were_put_into_the_module_are_what_is_trained_on(self, make_learner, stage, dtype):
        """Fails where DeepSpeed's own copies bring the former ones back with the next step."""
        learner = make_learner(lr=1e-2, tau=0.0, learner_model={"dtype": dtype}, **zero(stage))
        module = learner.module[DEFAULT_MODULE_ID]
        learner.prepare_for_saving()
        wanted, saved = weights_of(learner), pickle.loads(pickle.dumps(learner.get_state()))["rl_module"][DEFAULT_MODULE_ID]
        for _ in range(5):
            update(learner)
        module.set_state(saved)
        learner.take_over()
        for state in learner.export_weights().values():  # θ and θ̄
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
        group = learner.trainer.engine.optimizer.param_groups[0]
        group["lr"] = 1e-5
        update(learner)
        moved = max(float((tensor.float() - wanted[name].float()).abs().max()) for name, tensor in weights_of(learner).items())
        assert moved < 2e-3


def test_a_learner_that_could_not_be_restored_does_not_say_that_it_was(monkeypatch):
    asked: list = []

    def restore(self, path, **how):
        assert self.restored_from is None
        asked.append((path, how))
        if path == "damaged":
            raise OSError(path)

    monkeypatch.setattr(TorchLearner, "restore_from_path", restore)
    learner = LanguageLearner.__new__(LanguageLearner)
    for path, expected in (("a", "a"), ("damaged", None), ("b", "b")):
        with pytest.raises(OSError) if expected is None else contextlib.nullcontext():
            learner.restore_from_path(path, component="c")
        assert learner.restored_from == expected
    assert asked == [(path, {"component": "c"}) for path in ("a", "damaged", "b")]
