"""What a dry run says of memory: counts that are exact, sums in closed form, and the keys that make a trial fit."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rllib_nlac import NLACConfig, algorithms
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.baselines.stock import TextAPPOConfig, TextPPOConfig
from rllib_nlac.command.cli import app
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.make import EngineSpec
from rllib_nlac.engine.shapes import UnknownShape, shape_of
from rllib_nlac.engine.vllm_settings import VLLMSettings
from rllib_nlac.learner.adapter import add_adapter
from rllib_nlac.learner.heap import LARGE_MODEL, give_back_large_tensors
from rllib_nlac.learner.layout import Packed, packs
from rllib_nlac.learner.packed_attention import adopt
from rllib_nlac.memory import fit
from rllib_nlac.memory.engine import engine_parts
from rllib_nlac.memory.fit import advice
from rllib_nlac.memory.learner import LearnerPlan, learner_parts
from rllib_nlac.memory.trial import PROGRAM_BYTES, estimate
from rllib_nlac.memory.weights import GIB

TINY = NLACConfig().model_path
SHAPE = shape_of(TINY)
P = 495_840
# Numbers of parameters as their authors publish them.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}


def size(parts, what: str) -> float:
    return sum(part.num_bytes for part in parts if part.what == what)


def small() -> NLACConfig:
    return NLACConfig().environment("TwentyQuestions").language(language_model="tiny", max_tokens_per_micro_batch=2048)


def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


class TestShapes:
    def test_a_folders_parameters_are_the_models(self):
        assert SHAPE.parameters == P == sum(parameter.numel() for parameter in model().parameters())

    @pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
    def test_an_adapters_parameters_are_those_of_peft(self, targets):
        settings, lm = LoRASettings.of({"rank": 5, "target_modules": targets}), model()
        add_adapter(lm, settings)
        trained = sum(parameter.numel() for parameter in lm.parameters() if parameter.requires_grad)
        assert SHAPE.adapter_parameters(settings) == trained

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_known_shapes_have_the_published_number_of_parameters(self, name):
        assert shape_of(name).parameters == PUBLISHED[name] and "not on this machine" in shape_of(name).source

    def test_a_configuration_alone_says_the_same_as_the_weights(self, tmp_path):
        shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
        (tmp_path / "model" / "pytorch_model.bin").touch()  # weights whose headers cannot be read alone
        assert replace(shape_of(str(tmp_path / "model")), source="") == replace(SHAPE, source="")

    def test_a_second_copy_of_a_tied_embedding_counts_once(self, tmp_path):
        from safetensors.torch import load_file, save_file

        shutil.copytree(TINY, tmp_path / "model")
        state = load_file(Path(TINY) / "model.safetensors")
        save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "model/model.safetensors")
        assert shape_of(str(tmp_path / "model")).parameters == P

    @pytest.mark.parametrize("name", ["nobody/nothing", "Qwen/Qwen2.5-7B-Instruct-AWQ", "gpt2"])
    def test_what_is_not_known_is_not_guessed(self, name):
        with pytest.raises(UnknownShape, match=r"is none of the shapes known here \(Qwen2.5-0.5B, "):
            shape_of(name)


def kept_bytes(lm: torch.nn.Module, **arguments) -> int:
    """What a forward pass keeps for the backward pass, beside the weights."""
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in lm.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lm(**arguments)
    return sum(storage.nbytes() for storage in kept.values())


class TestLearner:
    def test_all_weights_in_float32(self):
        parts = learner_parts(SHAPE, LearnerPlan("float32", 512, 512))
        found = {what: size(parts, what) for what in ("weights", "gradients", "optimizer", "target weights")}
        assert found == {"weights": 4 * P, "gradients": 4 * P, "optimizer": 8 * P, "target weights": 4 * P}
        assert size(parts, "logits") == 4 * 4 * 512 * 536

    def test_an_adapter_is_all_that_is_trained(self):
        lora = LoRASettings(rank=16)
        numbers = 16 * 4 * (4 * 2 * 96 + 3 * (96 + 256))
        parts = learner_parts(SHAPE, LearnerPlan("float32", 512, 512, lora))
        found = {what: size(parts, what) for what in ("weights", "adapters", "gradients", "optimizer", "target weights")}
        assert found == {
            "weights": 4 * P,
            "adapters": 4 * numbers,
            "gradients": 4 * numbers,
            "optimizer": 8 * numbers,
            "target weights": 4 * numbers,
        }

    def test_zero_divides_what_it_says(self):
        settings = {"zero_optimization": {"stage": 2}}
        parts = learner_parts(SHAPE, LearnerPlan("bfloat16", 64, 64, deepspeed=settings, num_learners=4))
        found = {what: size(parts, what) / P for what in ("weights", "gradients", "optimizer", "target weights", "buckets")}
        assert found == {"weights": 2, "gradients": (2 + 4) / 4, "optimizer": 12 / 4, "target weights": 1, "buckets": 2}
        for dtype, numbers in (("float32", 8), ("bfloat16", 12)):  # without ZeRO nothing is divided
            plan = LearnerPlan(dtype, 64, 64, deepspeed={"bf16": {"enabled": dtype == "bfloat16"}}, num_learners=4)
            found = {what: size(learner_parts(SHAPE, plan), what) for what in ("optimizer", "target weights")}
            assert found == {"optimizer": numbers * P, "target weights": 4 * P}

    def test_an_optimizer_that_is_offloaded_lies_in_the_hosts_memory(self):
        settings = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        parts = learner_parts(SHAPE, LearnerPlan("bfloat16", 64, 64, deepspeed=settings, on_gpu=True))
        assert {part.what for part in parts if part.on_host} == {"optimizer"}

    def test_on_a_gpu_adamw_lists_all_its_steps(self):
        """By when activations and logits are gone."""
        zero = {"zero_optimization": {"stage": 3, "sub_group_size": 1000}}
        few, many = LearnerPlan("float32", 1, 1, on_gpu=True), LearnerPlan("float32", 4096, 4096, on_gpu=True)
        gone = sum(size(learner_parts(SHAPE, few), what) for what in ("activations", "logits"))
        for plan, steps in (
            (few, 4 * P - gone),
            (many, 0),
            (replace(few, on_gpu=False), 0),
            (replace(few, deepspeed={"zero_optimization": {"stage": 2}}, num_learners=2), 4 * P / 2 - gone),
            (replace(few, deepspeed=zero), 0),
        ):
            has_master = bool(plan.deepspeed)
            moments = (12 if has_master else 8) * P / plan.num_learners
            assert size(learner_parts(SHAPE, plan), "optimizer") == pytest.approx(moments + steps)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("lora", [None, LoRASettings(rank=4)])
    def test_activations_are_what_the_backward_pass_keeps(self, dtype, lora):
        lm = AutoModelForCausalLM.from_pretrained(TINY, dtype=getattr(torch, dtype))
        if lora is not None:
            add_adapter(lm, lora)
        measured = kept_bytes(lm, input_ids=torch.randint(3, 500, (4, 64)), logits_to_keep=1, use_cache=False)
        said = size(learner_parts(SHAPE, LearnerPlan(dtype, 256, 1, lora)), "activations")
        assert said == pytest.approx(measured, rel=0.15)

    @pytest.mark.parametrize(("shared", "own"), [(0, 64), (40, 5), (200, 3)])
    def test_a_pack_within_the_budget_keeps_no_more(self, shared, own):
        """Though where beginnings are shared, attention has keys and values of each sequence, which count too."""
        lm, rng = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), np.random.default_rng(0)
        adopt(lm)
        beginning = rng.integers(3, 500, shared)
        sequences = [np.concatenate([beginning, rng.integers(3, 500, own)]) for _ in range(200)]
        ids = torch.from_numpy(np.stack(sequences))[list(next(packs(sequences, 512)))]
        lengths = torch.full((len(ids),), shared + own)
        arguments = Packed(ids, lengths - 1, lengths).arguments
        measured = kept_bytes(lm, **{**arguments, "logits_to_keep": 1})
        said = size(learner_parts(SHAPE, LearnerPlan("float32", 512, 1)), "activations")
        assert 0.5 * said < measured < 1.15 * said

    def test_gradient_checkpointing_keeps_inputs_alone(self):
        parts = [learner_parts(SHAPE, LearnerPlan("float32", 512, 1, gradient_checkpointing=on)) for on in (False, True)]
        full, spared = (size(each, "activations") for each in parts)
        assert spared == full / 4 + 4 * 96 * 4 * 512


def spec_of(lora: LoRASettings | None = None, **settings) -> EngineSpec:
    """An engine that keeps base and adapters apart."""
    return EngineSpec("", VLLMSettings(**{"dtype": "bfloat16", "max_num_seqs": 64, **settings}), lora=lora, merges_lora=False)


class TestEngine:
    ON_CPU: ClassVar = {"dtype": "float32", "max_num_seqs": 32, "cpu_kv_cache_gib": 1.0}
    PINNED = (28 * (32 + 32 + 512 + 256) + 2 * 2048) * 2**20  # of 7B in bfloat16

    def test_whole_sets_and_the_cache(self):
        parts, cache = engine_parts(SHAPE, spec_of(**self.ON_CPU), ("policy", "target"), 512, 0)
        assert size(parts, "weights") == 4 * P and size(parts, "weight sets") == 2 * 4 * P
        assert cache.sequences == 2**30 // (512 * 2 * 4 * 3 * 32 * 4) == 682

    def test_adapters_have_room_for_the_rank_that_is_served(self):
        lora = LoRASettings(rank=9)
        parts, _ = engine_parts(SHAPE, spec_of(lora, **self.ON_CPU), ("policy", "target"), 512, 0)
        assert size(parts, "adapters") == 3 * 4 * SHAPE.adapter_parameters(LoRASettings(rank=16))
        assert size(parts, "weight sets") == 0

    def test_on_a_gpu_the_cache_is_what_is_left(self):
        shape = shape_of("Qwen/Qwen2.5-7B")
        spec = spec_of(LoRASettings(), tensor_parallel_size=2, gpu_memory_utilization=0.5)
        parts, cache = engine_parts(shape, spec, (), 4096, 80 * GIB)
        assert sum(part.num_bytes for part in parts if not part.on_host) == pytest.approx(40 * GIB)
        assert cache.sequences == int(cache.num_bytes / (4096 * 2 * 28 * 4 * 128 * 2 / 2))

    def test_workers_that_share_a_model_keep_whole_sets_together(self):
        """Each keeps its own part in the host's memory."""
        shape = shape_of("Qwen/Qwen2.5-7B")
        for split in (1, 2, 4):
            spec = spec_of(tensor_parallel_size=split, gpu_memory_utilization=0.85)
            parts, _ = engine_parts(shape, spec, ("policy", "target"), 4096, 80 * GIB)
            assert size(parts, "weights") == 2 * shape.parameters / split
            assert size(parts, "weight sets") == 2 * self.PINNED

    def test_beside_a_gpu_each_tensor_of_a_kept_set_takes_a_power_of_two(self):
        """31.5, 24.5, 259 and 129.5 MiB in each of 28 layers: queries, keys and values; output; gate and up; down."""
        spec = spec_of(gpu_memory_utilization=0.85)
        for gpu_bytes, kept in ((80 * GIB, self.PINNED), (None, self.PINNED), (0, 2 * shape_of("Qwen/Qwen2.5-7B").parameters)):
            assert size(engine_parts(shape_of("Qwen/Qwen2.5-7B"), spec, ("policy",), 4096, gpu_bytes)[0], "weight sets") == kept
        tied = shape_of("Qwen/Qwen2.5-0.5B")  # one embedding
        assert size(engine_parts(tied, spec, ("policy",), 4096, 80 * GIB)[0], "weight sets") / GIB == pytest.approx(
            1.72, abs=0.005
        )


class TestTrials:
    def test_the_quick_start(self):
        found = estimate(small().training(judge_weights="initial"))
        (driver,) = found.processes
        assert size(driver.parts, "weight sets") == 3 * 4 * P and size(driver.parts, "optimizer") == 8 * P
        assert found.sync_bytes == 2 * 4 * P and found.trained == P

    def test_initial_weights_that_predict_are_counted(self):
        config = algorithms.OURS["NLAC_FrozenCritic"].get_default_config().environment("TwentyQuestions")
        config.language(language_model="tiny").training(judge_weights="target")
        (driver,) = estimate(config).processes
        assert size(driver.parts, "weight sets") == 3 * 4 * P

    def test_a_target_that_the_learner_alone_asks_is_in_no_engine(self):
        config = algorithms.OURS["ScalarCritic"].get_default_config().environment("TwentyQuestions")
        found = estimate(config.language(language_model="tiny"))
        (driver,) = found.processes
        assert size(driver.parts, "weight sets") == 4 * P and found.sync_bytes == 4 * P
        assert size(driver.parts, "target weights") == 4 * P

    def test_processes_of_their_own(self):
        config = small().learners(num_learners=2).engines(num_engines=3).env_runners(num_env_runners=4)
        found = {process.name: process for process in estimate(config).processes}
        assert {name: process.count for name, process in found.items()} == {
            "driver": 1, "learner": 2, "engine": 3, "EnvRunner": 4, "Ray's object store": 1
        }  # fmt: skip
        assert size(found["driver"].parts, "weights") == size(found["EnvRunner"].parts, "weights") == 0
        # Both sets, which the first learner puts there for all engines.
        assert size(found["Ray's object store"].parts, "weight sets") == 2 * 2 * 4 * P  # the learner's, and the run's own copy
        # Weights, the optimizer's moments and the target weights.
        assert size(found["Ray's object store"].parts, "snapshot") == (4 + 8 + 4) * P

    def test_where_little_else_is_held_loading_is_the_most(self):
        """While a model is read its files lie beside its weights, which are float32 here."""
        large = small().language(language_model="Qwen/Qwen2.5-0.5B", max_context=256, lora={"rank": 16})
        of_engine = {"lora_serving": "adapter", "cpu_kv_cache_gib": 0.25, "max_num_seqs": 16}
        found = estimate(large.engines(num_engines=1, engine_config=of_engine))
        driver, engine = (next(p for p in found.processes if p.name == name) for name in ("driver", "engine"))
        numbers, of_a_number_in_files = 494_032_768, shape_of("Qwen/Qwen2.5-0.5B").bytes_in_files
        assert engine.on_host - size(engine.parts, "program") == (4 + of_a_number_in_files) * numbers
        assert size(driver.parts, "loading") == 0  # a learner's activations take more

    def test_rllibs_own_algorithms_have_an_engine_in_each_runner(self):
        of = {
            cls: estimate(cls().environment("TwentyQuestions").language(language_model="tiny").env_runners(num_env_runners=2))
            for cls in (TextPPOConfig, TextAPPOConfig)
        }
        for found in of.values():
            runner = next(process for process in found.processes if process.name == "EnvRunner")
            assert runner.cache is not None and size(runner.parts, "weights") == 4 * P
        kept = [sum(size(process.parts, "target weights") for process in found.processes) for found in of.values()]
        assert kept == [0, 4 * P]  # APPO has target weights, PPO none

    def test_runners_of_evaluations_are_counted(self):
        """Under RLlib's own algorithms each has an engine. Fails where they are forgotten."""

        def processes(config, **evaluation):
            config.environment("TwentyQuestions").language(language_model="tiny").env_runners(num_env_runners=2)
            return {process.name: process for process in estimate(config.evaluation(**evaluation)).processes}

        found = processes(TextPPOConfig(), evaluation_num_env_runners=8, evaluation_config={"num_gpus_per_env_runner": 0.5})
        (training, runner) = (found[name] for name in ("EnvRunner", "evaluation EnvRunner"))
        assert (training.count, training.gpus, runner.count, runner.gpus) == (2, 0, 8, 0.5)
        assert size(runner.parts, "generation") and size(runner.parts, "weights") == 2 * P  # bfloat16, as on any GPU
        ours = processes(small(), evaluation_num_env_runners=3)["evaluation EnvRunner"]
        assert ours.count == 3 and {part.what for part in ours.parts} == {"program"}
        # Without runners of their own, evaluations are played in the driver.
        alone = [processes(TextPPOConfig(), evaluation_interval=interval)["driver"].cache for interval in (None, 1)]
        assert alone[0] is None and alone[1] is not None

    def test_what_is_not_trained_has_no_optimizer(self):
        config = ReActConfig().environment("TwentyQuestions").language(language_model="tiny")
        found = estimate(config)
        assert size(found.processes[0].parts, "optimizer") == 0 == found.sync_bytes
        assert size(estimate(GRPOConfig().language(language_model="tiny")).processes[0].parts, "target weights") == 0


def on_gpu(**language) -> NLACConfig:
    config = NLACConfig().environment("TwentyQuestions").learners(num_gpus_per_learner=1)
    return config.language(**{"language_model": "Qwen/Qwen2.5-1.5B", "max_context": 1024, **language})


def test_under_ppo_an_adapter_is_in_float32_and_no_engine_is_apart():
    """Fails where it is counted in the base's precision, or num_engines is advised, which PPO refuses."""
    config = TextPPOConfig().environment("TwentyQuestions").env_runners(num_env_runners=0).learners(num_gpus_per_learner=1)
    half = {"lora": {"rank": 16}, "learner_model": {"dtype": "bfloat16"}}
    config.language(language_model="Qwen/Qwen2.5-1.5B", max_context=1024, **half)
    found = estimate(config, 8 * GIB)
    (driver,) = found.processes
    numbers = shape_of("Qwen/Qwen2.5-1.5B").adapter_parameters(LoRASettings(rank=16))
    own = next(part for part in driver.parts if part.what == "adapters")
    assert own.num_bytes == size(driver.parts, "gradients") == found.sync_bytes == 4 * numbers and "in float32" in own.note
    lines = advice(found, config, 8 * GIB, None)
    assert lines and not any("num_engines" in line for line in lines)


class TestSync:
    def test_a_gpu_that_engine_and_learner_share_needs_no_copies_in_the_hosts_memory(self):
        shared, apart = (estimate(on_gpu().learners(num_learners=n)).processes for n in (0, 1))
        numbers = PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"]
        assert size(shared[0].parts, "sync") == 0  # the target's stands where activations and gradients stood
        assert size(apart[1].parts, "sync") == 2 * 4 * numbers

    @pytest.mark.parametrize("learners", [1, 2, 4])
    def test_only_the_first_learner_keeps_copies_to_hand_over(self, learners):
        config = on_gpu().learners(num_learners=learners, num_gpus_per_learner=1).engines(num_engines=1)
        found = next(process for process in estimate(config).processes if process.name == "learner")
        copies = 2 * 4 * PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"]
        assert found.on_host == pytest.approx(PROGRAM_BYTES + copies)
        assert found.on_host_of_all == pytest.approx(learners * PROGRAM_BYTES + copies)
        others = sum(process.on_host_of_all for process in estimate(config).processes if process.name != "learner")
        assert estimate(config).host_bytes == pytest.approx(found.on_host_of_all + others)


class TestAdvice:
    @pytest.mark.parametrize(
        ("config", "gib", "keys"),
        [
            (on_gpu(max_tokens_per_micro_batch=1024), 40, ["lora: {rank: 16}"]),
            (
                on_gpu(lora={"rank": 8}, max_tokens_per_micro_batch=8192),
                40,
                ["max_tokens_per_micro_batch: ", "learner_model: {gradient_checkpointing: true}"],
            ),
            (on_gpu(lora={"rank": 8}, max_tokens_per_micro_batch=1024), 4, ["learner_model: {dtype: bfloat16}"]),
            (on_gpu(lora={"rank": 8}, max_context=32768), 8, ["gpu_memory_utilization", "lower max_context"]),
        ],
    )
    def test_names_the_keys_of_a_gpu(self, config, gib, keys):
        lines = " ".join(advice(estimate(config, gib * GIB), config, gib * GIB, None))
        assert all(key in lines for key in keys), lines

    def test_names_the_keys_of_a_cpu(self):
        config = NLACConfig().language(language_model="Qwen/Qwen2.5-3B", max_context=256, max_tokens_per_micro_batch=256)
        config.training(judge_weights="initial")
        (line,) = advice(estimate(config), config, None, 24 * GIB)
        assert line.startswith("this machine: ") and "lora: {rank: 16}" in line and "judge_weights: target" in line
        config.engines(engine_config={"cpu_kv_cache_gib": 0.01})
        lines = advice(estimate(config), config, None, None)
        assert len(lines) == 1 and "raise engine_config: {cpu_kv_cache_gib: ...}" in lines[0]

    def test_the_advised_budget_fits(self):
        config = on_gpu(lora={"rank": 8}, max_tokens_per_micro_batch=65536, learner_model={"dtype": "bfloat16"})
        (line,) = advice(estimate(config, 40 * GIB), config, 40 * GIB, None)
        tokens = int(line.partition("max_tokens_per_micro_batch: ")[2].split(",")[0])
        for budget, fits in ((tokens, True), (2 * tokens, False)):
            config.language(max_tokens_per_micro_batch=budget)
            assert (advice(estimate(config, 40 * GIB), config, 40 * GIB, None) == []) == fits

    @pytest.mark.parametrize(
        ("settings", "name", "advised"),
        [
            ({"num_engines": 1, "num_gpus_per_engine": 1}, "engine", "tensor_parallel_size with num_gpus_per_engine"),
            ({"num_engines": 1, "num_gpus_per_engine": 1}, "driver", "a smaller language_model"),
            ({}, "driver", "num_engines: 1 with num_gpus_per_engine: 1"),
        ],
    )
    def test_what_is_advised_for_weights_is_of_that_process(self, settings, name, advised):
        """Fails where a learner is told to divide the engine."""
        config = on_gpu(lora={"rank": 8}, learner_model={"dtype": "bfloat16"}).engines(**settings)
        lines = advice(estimate(config, 4 * GIB), config, 4 * GIB, None)
        line = next(each for each in lines if each.startswith(name))
        assert advised in line and ("tensor_parallel_size" in line) == (name == "engine")

    @given(st.floats(1, 200), st.floats(1.01, 4))
    def test_what_fits_a_gpu_fits_a_larger_one(self, gib, times):
        config = on_gpu(lora={"rank": 8}, learner_model={"dtype": "bfloat16"})
        verdicts = [advice(estimate(config, size * GIB), config, size * GIB, None) for size in (gib, gib * times)]
        assert verdicts[0] or not verdicts[1]


def dry_run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", "file", *arguments, "--dry-run"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert len(yaml.safe_load(result.output)) == 1  # the table is a comment
    return result.output


class TestCommand:
    @pytest.mark.parametrize(
        ("name", "gib"),
        [
            ("twenty_questions_nlac_qwen2.5_1.5b_lora", 24),
            ("twenty_questions_nlac_qwen2.5_7b_lora", 80),
            ("twenty_questions_nlac_qwen2.5_7b", 80),
        ],
    )
    def test_examples_fit_the_gpus_that_they_name(self, name, gib):
        printed = dry_run(name, "--gpu-memory-gib", str(gib))
        assert f"# fits: GPUs of {gib} GiB" in printed and "is not on this machine" in printed
        half = dry_run(name, "--gpu-memory-gib", str(gib / 2))
        assert "# does not fit: " in half and "; change " in half and "# fits" not in half

    def test_the_laptops_example_fits_sixteen_gib(self, monkeypatch):
        monkeypatch.setattr(fit, "host_bytes", lambda: 16 * GIB)
        assert "# fits: this machine" in dry_run("twenty_questions_nlac_qwen2.5_0.5b_laptop")
        monkeypatch.setattr(fit, "host_bytes", lambda: 6 * GIB)
        assert "# does not fit: this machine: " in dry_run("twenty_questions_nlac_qwen2.5_0.5b_laptop")

    def test_the_size_of_a_gpu_that_nobody_asks_for(self):
        assert "# no process asks for a GPU (num_gpus_per_learner" in dry_run("twenty_questions_nlac", "--gpu-memory-gib", "24")

    def test_a_name_that_nobody_knows(self, tmp_path):
        entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"language_model": "nobody/nothing"}}
        (tmp_path / "x.yaml").write_text(json.dumps({"mine": entry}))
        assert "# memory: not known: 'nobody/nothing' is no folder" in dry_run(str(tmp_path / "x.yaml"))

    def test_a_folder_whose_name_has_lines_stays_a_comment(self, tmp_path):
        folder = tmp_path / "a\nb: [\n"
        shutil.copytree(TINY, folder)
        entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"language_model": str(folder)}}
        (tmp_path / "x.yaml").write_text(json.dumps({"mine": entry}))
        assert "495,840 parameters" in dry_run(str(tmp_path / "x.yaml"))

    def test_a_broken_folder_is_an_error(self, tmp_path):
        shutil.copytree(TINY, tmp_path / "model")
        (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
        entry = {"run": "NLAC", "env": "TwentyQuestions", "config": {"language_model": str(tmp_path / "model")}}
        (tmp_path / "x.yaml").write_text(json.dumps({"mine": entry}))
        result = CliRunner().invoke(app, ["train", "file", str(tmp_path / "x.yaml"), "--dry-run"], env={"COLUMNS": "300"})
        assert result.exit_code == 2 and "is cut off or damaged" in result.output


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(fit, "CGROUP", tmp_path / "memory.max")
    physical = fit.host_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert fit.host_bytes() == physical
    (tmp_path / "memory.max").write_text("1048576\n")
    assert fit.host_bytes() == 1048576 and math.isfinite(physical)


def test_small_models_leave_the_heap_as_it_is():
    assert not give_back_large_tensors(torch.device("cpu"), LARGE_MODEL - 1)
    assert not give_back_large_tensors(torch.device("cuda"), LARGE_MODEL)
