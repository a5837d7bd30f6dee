"""One engine over two workers, as it spans two GPUs: on a CPU vLLM splits a model between processes in the same way."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_nlac.learner.rl_module import trainable_state
from rllib_nlac.sampling.engine import EngineError
from rllib_nlac.sampling.engines import CurrentWeights, EngineActor, RemoteEngines
from rllib_nlac.sampling.vllm_engine import VLLMSettings
from rllib_nlac.types import Request, Weights


@pytest.fixture(scope="module")
def folder(model_path, tmp_path_factory):
    """A small model that two workers can divide: the shipped one has three heads."""
    folder = tmp_path_factory.mktemp("models") / "four_heads"
    shutil.copytree(model_path, folder)
    config = AutoConfig.from_pretrained(model_path)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 128, 4, 2
    random_model(config, seed=0).save_pretrained(folder)
    return folder


def random_model(config, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # the normalizations and biases, too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def engines(folder, chat, ray_session):
    """In a placement group, as in a trial of Tune, which vLLM must not take for its own."""
    group = placement_group([{"CPU": 2}])
    ray.get(group.ready(), timeout=60)
    inside = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)}
    current = ray.remote(num_cpus=0, **inside)(CurrentWeights).remote()
    settings = VLLMSettings(tensor_parallel_size=2, cpu_kv_cache_gib=0.25)
    actor = ray.remote(num_cpus=1, max_concurrency=10, **inside)(EngineActor)
    engines = RemoteEngines(
        [actor.remote(str(folder), chat.max_context, [chat.end_id], settings, 0, current)], current, timeout_s=300
    )
    yield engines
    engines.stop()
    remove_placement_group(group)


def test_logprobs_equal_the_trainers_after_a_sync_of_both_weight_sets(engines, folder):
    """Fails where a worker keeps former weights, or a copy of them that was packed before."""
    config = AutoConfig.from_pretrained(folder)
    models = {Weights.TARGET: random_model(config, seed=1), Weights.POLICY: random_model(config, seed=2)}
    for which, model in models.items():
        engines.set_weights(which, 5, trainable_state(model))
    requests = [Request(tuple(range(10, 30 + i)), 8, seed=i) for i in range(4)]
    for which in (Weights.TARGET, Weights.POLICY, Weights.TARGET):
        for generation in engines.generate(requests, which):
            ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
            with torch.no_grad():
                logits = models[which](input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1].log_softmax(-1)
            expected = logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
            assert generation.weights is which


@pytest.mark.parametrize("lost", ["mlp.down_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight"])
def test_a_worker_that_keeps_former_weights_is_found(engines, folder, lost):
    """Of what is divided between the workers as of what both hold whole."""
    state = dict(trainable_state(random_model(AutoConfig.from_pretrained(folder), seed=3)))
    engines.set_weights(Weights.POLICY, 6, state)
    del state[f"model.layers.1.{lost}"]
    with pytest.raises(EngineError, match="does not serve the policy weights that it was given"):
        engines.set_weights(Weights.POLICY, 7, state)
