"""One engine over two workers, as it spans two GPUs: on a CPU vLLM splits a model between processes in the same way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_nlac.command.experiment import load_experiments
from rllib_nlac.engine.actor import EngineActor
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.engine.vllm_settings import VLLMSettings
from rllib_nlac.learner.adapter import add_adapter
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.types import Message, Request, Weights


@pytest.fixture(scope="module")
def folder(model_path, tmp_path_factory):
    """The shipped model with a fourth head of zeros, which changes nothing, so that two workers can divide it."""
    folder = tmp_path_factory.mktemp("models") / "four_heads"
    shutil.copytree(model_path, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**settings, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4})
    )

    def padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros([128 if size == 96 else size for size in tensor.shape])
        wide[tuple(slice(size) for size in tensor.shape)] = tensor
        return wide * (96 / 128) ** 0.5 if "norm" in name else wide  # a mean over more numbers

    state = load_file(folder / "model.safetensors")
    save_file({name: padded(name, t) for name, t in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_model(config, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # the normalizations and biases, too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@contextmanager
def served(folder: Path, chat, lora: LoRASettings | None) -> Iterator[RemoteEngines]:
    """In a placement group, as in a trial of Tune, which vLLM must not take for its own."""
    group = placement_group([{"CPU": 2}])
    ray.get(group.ready(), timeout=60)
    inside = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)}
    settings = VLLMSettings(tensor_parallel_size=2, cpu_kv_cache_gib=0.25)
    actor = ray.remote(num_cpus=1, max_concurrency=10, **inside)(EngineActor)
    make = partial(careless_engine(), str(folder), chat.max_context, [chat.end_id], settings, 0, lora, False)
    engines = RemoteEngines([actor.remote(make)], timeout_s=300)
    yield engines
    engines.stop()
    remove_placement_group(group)


def careless_engine() -> type[VLLMEngine]:
    """An engine whose workers receive other tensors under the versions in ``LOST`` than it was given."""

    class Careless(VLLMEngine):  # within a function it reaches an actor that cannot import this file
        lost = LOST

        def _take_adapter(self, weights, state) -> None:
            name, columns = self.lost.get(self._versions[weights], ("", 0))
            real = self._llm

            class Altered:
                @staticmethod
                def collective_rpc(call, args=()):
                    if call == "take_adapter":
                        number, settings, adapter = args
                        adapter = {key: tensor.clone() for key, tensor in adapter.items()}
                        for key in adapter:
                            if name and key.endswith(name):
                                adapter[key][-columns:] += 0.01
                        args = (number, settings, adapter)
                    return real.collective_rpc(call, args=args)

            self._llm = Altered
            try:
                super()._take_adapter(weights, state)
            finally:
                self._llm = real

    return Careless


# What is lost: rows of the second worker's part of B, which is divided there, and of an A that both hold whole.
LOST = {100: ("layers.1.self_attn.q_proj.lora_B.weight", 4), 101: ("layers.0.mlp.up_proj.lora_A.weight", 1)}


def add_random_adapter(model: torch.nn.Module, lora: LoRASettings, seed: int) -> None:
    add_adapter(model, lora)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn_like(parameter))


def check_logprobs(engines: RemoteEngines, models: Mapping[Weights, torch.nn.Module]) -> None:
    """Those of sampled tokens are the trainer's. Fails where a worker keeps former weights, or a copy packed before."""
    requests = [Request(tuple(range(10, 30 + i)), 8, seed=i) for i in range(4)]
    for which in (Weights.TARGET, Weights.POLICY, Weights.TARGET):
        for generation in engines.generate([replace(request, weights=which) for request in requests]):
            ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
            with torch.no_grad():
                logits = models[which](input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1].log_softmax(-1)
            expected = logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
            assert generation.weights is which


class TestWholeWeights:
    @pytest.fixture(scope="class")
    def engines(self, folder, chat, ray_session):
        with served(folder, chat, None) as engines:
            yield engines

    @pytest.mark.parametrize("version", [3, 4])  # by the first sync an engine learns how its workers divide
    def test_logprobs_equal_the_trainers_after_a_sync_of_both_sets(self, engines, folder, version):
        config = AutoConfig.from_pretrained(folder)
        models = {
            which: random_model(config, seed=10 * version + i) for i, which in enumerate((Weights.TARGET, Weights.POLICY))
        }
        for which, model in models.items():
            engines.set_weights(which, version, served_state(model))
        check_logprobs(engines, models)

    def test_an_actors_answers_keep_their_form_under_each_set(self, engines, folder, chat):
        sets = (Weights.TARGET, Weights.POLICY)
        for which in sets:
            engines.set_weights(which, 5, served_state(random_model(AutoConfig.from_pretrained(folder), seed=5)))
        prompt = chat.prompt_ids((Message("user", "Is it a dog?"),))
        asked = [Request(prompt, 12, seed=i, weights=which, pattern="(?:Yes|No)\\.") for which in sets for i in range(3)]
        said = [(g.weights, chat.decode(g.token_ids)) for g in engines.generate(asked)]
        assert [which for which, _ in said] == [request.weights for request in asked]
        assert {text for _, text in said} <= {"Yes.", "No."}

    @pytest.mark.parametrize("lost", ["mlp.down_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight"])
    def test_weights_that_did_not_reach_the_workers_are_found(self, engines, folder, lost):
        """Tensors that the workers divide and tensors that both hold whole. The workers answer the next call as before."""
        state = dict(served_state(random_model(AutoConfig.from_pretrained(folder), seed=3)))
        engines.set_weights(Weights.POLICY, 7, state)
        del state[f"model.layers.1.{lost}"]
        with pytest.raises(EngineError, match=rf"did not take the policy weights: the weights lack model\.layers\.1\.{lost}"):
            engines.set_weights(Weights.POLICY, 8, state)
        whole = served_state(random_model(AutoConfig.from_pretrained(folder), seed=4))
        assert engines.set_weights(Weights.POLICY, 9, whole) == checksum(whole.values())


@pytest.mark.long
class TestAdapters:
    LORA = LoRASettings(rank=8)

    @pytest.fixture(scope="class")
    def engines(self, folder, chat, ray_session):
        with served(folder, chat, self.LORA) as engines:
            yield engines

    def adapted(self, folder: Path, seed: int) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        add_random_adapter(model, self.LORA, seed)
        return model

    def test_logprobs_equal_the_trainers_after_a_sync_of_both_sets(self, engines, folder):
        models = {which: self.adapted(folder, seed) for seed, which in enumerate((Weights.TARGET, Weights.POLICY))}
        for which, model in models.items():
            engines.set_weights(which, 5, served_state(model))
        check_logprobs(engines, models)

    @pytest.mark.parametrize("version", LOST)
    def test_an_adapter_that_did_not_reach_a_worker_is_found(self, engines, folder, version):
        """Tensors that the workers divide and tensors that both hold whole."""
        model = self.adapted(folder, 3)
        engines.set_weights(Weights.POLICY, 99, served_state(model))
        with pytest.raises(EngineError, match="does not serve the policy weights that it was given"):
            engines.set_weights(Weights.POLICY, version, served_state(model))
        engines.set_weights(Weights.POLICY, 102, served_state(model))


@pytest.mark.long
def test_the_7b_examples_processes_work_together_on_a_cpu(folder, config, ray_session):
    """Two learners under ZeRO 3 in bfloat16 that recompute activations, two EnvRunners, and an engine in two parts."""
    (example,) = load_experiments(Path(__file__).parent.parent / "tuned_examples" / "twenty_questions_nlac_qwen2.5_7b.yaml")
    shared = ("learner_model", "deepspeed_config", "learner_snapshot_interval")
    config.language(language_model=str(folder), prompts="compact", max_action_tokens=12)
    config.roles(max_future_tokens=24, max_critique_tokens=32)  # as the shipped model has them, which a folder has not
    config.training(train_batch_size_per_learner=32, minibatch_size=16, episodes_per_iteration=16, judge_weights="initial")
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=8).learners(num_learners=2)
    engine = {"dtype": "bfloat16", "tensor_parallel_size": 2, "cpu_kv_cache_gib": 0.25, "timeout_s": 600}
    config.engines(num_engines=1, engine_config=engine)
    for key in shared:
        setattr(config, key, example.config[key])
    algorithm = config.build_algo()
    try:
        results = [algorithm.train() for _ in range(2)]
    finally:
        algorithm.stop()
    assert all(result["logprob_gap"] < 0.2 for result in results)  # bfloat16 rounds
    assert all(0 < result["learners"]["default_policy"]["gradient_norm"] < float("inf") for result in results)
    assert results[-1]["env_runners"]["num_episodes_lifetime"] == 32 and results[-1]["sync"]["weight_version"] == 3
