"""Weight sets as adapters over one base: in vLLM, in the learner, between them, and in a run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rllib_nlac.engine.lora import LoRASettings, adapter_name, as_served, merged, pairs
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.shared import checksum
from rllib_nlac.learner.adapter import add_adapter, as_base, check_targets, has_adapter
from rllib_nlac.learner.rl_module import load_own_entries, own_entries, served_state
from rllib_nlac.types import Message, Request, Weights

SETTINGS = LoRASettings(rank=8)
DIALOGUE = (Message("user", "Guess my object."), Message("assistant", "Is it alive?"), Message("user", "Yes."))


def model_with_adapter(path: str, seed: int, settings: LoRASettings = SETTINGS, size: float = 0.05) -> torch.nn.Module:
    """The shipped model with an adapter whose A and B are random."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    add_adapter(model, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model


def logprobs(model: torch.nn.Module, generation) -> np.ndarray:
    ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1].log_softmax(-1)
    return logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].numpy()


class TestSettings:
    def test_alpha_is_twice_the_rank_where_nothing_is_said(self):
        assert LoRASettings(rank=4).scale == 2 and LoRASettings(rank=4, alpha=4).scale == 1
        assert LoRASettings(rank=4).for_peft()["lora_alpha"] == 8

    def test_room_is_made_for_the_next_rank_that_vllm_knows(self):
        assert [LoRASettings(rank=rank).served_rank for rank in (1, 2, 8, 9, 100, 512)] == [1, 8, 8, 16, 128, 512]

    @pytest.mark.parametrize(
        ("lora", "complaint"),
        [
            ({"use_dora": True}, "config.lora has 'use_dora', which vLLM cannot serve"),
            ({"modules_to_save": ["lm_head"]}, "config.lora has 'modules_to_save', which vLLM cannot serve"),
            ({"init_lora_weights": "pissa"}, "config.lora has 'init_lora_weights', which vLLM cannot serve"),
            ({"rnk": 8}, "config.lora: unknown key 'rnk'; did you mean 'rank'?"),
            ({"rank": 1024}, r"config.lora\['rank'\] is 1024 and must be between 1 and 512: vLLM serves adapters of no higher"),
            ({"rank": 0}, r"config.lora\['rank'\] is 0"),
            ({"alpha": 0}, r"config.lora\['alpha'\] is 0"),
            ({"dropout": 1.0}, r"config.lora\['dropout'\] is 1.0"),
            ({"target_modules": "q_proj"}, r"give \"all-linear\" or a list of names"),
            ({"target_modules": []}, "give at least one name of a linear layer"),
            (
                {"target_modules": ["q_proj", "query"]},
                "has 'query', and .* has no such linear layer within it; it has down_proj",
            ),
            ({"target_modules": ["lm_head"]}, "has 'lm_head', and .* has no such linear layer within it"),
        ],
    )
    def test_what_cannot_be_used_is_refused_by_its_key(self, config, lora, complaint):
        with pytest.raises(ValueError, match=complaint):
            config.language(lora=lora).validate()

    def test_a_serving_that_does_not_exist(self, config):
        with pytest.raises(ValueError, match=r"config.lora_serving is 'both' and must be one of adapter, merged"):
            config.language(lora={}, lora_serving="both").validate()


class TestModel:
    def test_a_new_adapter_changes_nothing(self, model_path):
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        adapted = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        add_adapter(adapted, SETTINGS)
        ids = torch.tensor([[5, 6, 7, 8]])
        torch.testing.assert_close(base(ids).logits, adapted(ids).logits, rtol=0, atol=0)

    def test_merged_weights_are_the_adapted_model(self, model_path):
        """W + alpha / rank B A, worked out by hand for one layer, and the whole model's logits."""
        settings = LoRASettings(rank=4, alpha=12)
        model = model_with_adapter(model_path, 1, settings)
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        state = {name: parameter.detach() for name, parameter in base.named_parameters()}
        whole = merged(state, served_state(model), settings.scale, torch.float32)
        name = "model.layers.0.self_attn.q_proj.weight"
        a, b = pairs(served_state(model))[name]
        assert a.shape[0] == b.shape[1] == 4
        torch.testing.assert_close(whole[name], state[name] + 3 * b @ a)
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        expected = model(ids).logits
        assert (expected - base(ids).logits).abs().max() > 0.01
        base.load_state_dict(whole, strict=False)
        torch.testing.assert_close(base(ids).logits, expected, rtol=1e-5, atol=1e-4)

    def test_without_its_adapter_it_is_its_base(self, model_path):
        model = model_with_adapter(model_path, 1)
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        ids = torch.tensor([[5, 6, 7, 8]])
        adapted = model(ids).logits
        with as_base(model):
            torch.testing.assert_close(model(ids).logits, base(ids).logits, rtol=0, atol=0)
        torch.testing.assert_close(model(ids).logits, adapted, rtol=0, atol=0)

    def test_a_checkpoint_holds_the_adapter_alone_and_of_no_other_rank(self, model_path):
        model = model_with_adapter(model_path, 1)
        own = own_entries(model)
        assert own and all("lora_" in name for name in own)
        other = model_with_adapter(model_path, 2)
        load_own_entries(other, {name: entry.detach().clone() for name, entry in own.items()})
        ids = torch.tensor([[5, 6, 7, 8]])
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="size mismatch"):
            load_own_entries(model_with_adapter(model_path, 1, LoRASettings(rank=4)), own)
        whole = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        assert not has_adapter(whole)
        with pytest.raises(RuntimeError, match=r"names differ.*see config.lora"):
            load_own_entries(whole, own)

    def test_names_are_pefts_own(self, model_path, tmp_path):
        """As PEFT writes them into a file, which vLLM reads."""
        from safetensors.torch import load_file

        model = model_with_adapter(model_path, 1)
        model.save_pretrained(tmp_path)
        written = load_file(tmp_path / "adapter_model.safetensors")
        served = served_state(model)
        assert written.keys() == served.keys() and all(torch.equal(written[name], served[name]) for name in written)
        assert adapter_name("a.lora_A.default.weight") == "base_model.model.a.lora_A.weight"

    def test_every_named_layer_is_found(self, model_path):
        check_targets(model_path, LoRASettings(target_modules=("q_proj", "model.layers.0.mlp.down_proj")))


@pytest.fixture(scope="module")
def adapters(model_path, chat) -> Iterator:
    """Real vLLM that serves adapters."""
    from rllib_nlac.engine.vllm_engine import VLLMEngine

    engine = VLLMEngine(model_path, chat.max_context, [chat.end_id], lora=SETTINGS)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def merging(model_path, chat) -> Iterator:
    """Real vLLM that puts adapters into the model."""
    from rllib_nlac.engine.vllm_engine import VLLMEngine

    engine = VLLMEngine(model_path, chat.max_context, [chat.end_id], lora=SETTINGS, merges_lora=True)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def models(model_path) -> dict[Weights, torch.nn.Module]:
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return {
        Weights.POLICY: model_with_adapter(model_path, 1),
        Weights.TARGET: model_with_adapter(model_path, 2),
        Weights.INITIAL: base,
    }


def mixed(chat, count: int = 12, **changes) -> list[Request]:
    """Requests that name the three sets in turn."""
    prompts, sets = [chat.prompt_ids(DIALOGUE[:1]), chat.prompt_ids(DIALOGUE)], list(Weights)
    return [
        Request(prompts[i // 3 % 2], **{"max_tokens": 12, "seed": i // 3, "weights": sets[i % 3], **changes})
        for i in range(count)
    ]


def give(engine, models, version: int = 5) -> None:
    for which in (Weights.TARGET, Weights.POLICY):
        engine.set_weights(which, version, {n: t.clone() for n, t in served_state(models[which]).items()})


@pytest.fixture(params=["adapter", "merged"])
def serving(request, adapters, merging):
    return adapters if request.param == "adapter" else merging


def test_one_call_answers_under_three_sets_as_the_learner_would(serving, models, chat):
    """Fails where a request without an adapter gets another's, as on a CPU without an empty slot."""
    engine = serving
    give(engine, models)
    asked = mixed(chat)
    answers = engine.generate(asked)
    for ask, answer in zip(asked, answers, strict=True):
        assert answer.weights is ask.weights and answer.weight_version == (0 if ask.weights is Weights.INITIAL else 5)
        np.testing.assert_allclose(answer.logprobs, logprobs(models[ask.weights], answer), atol=2e-5)
    for one in Weights:
        for other in set(Weights) - {one}:  # and none of them is silently another
            gaps = [abs(a.logprobs - logprobs(models[other], a)).max() for a in answers if a.weights is one]
            assert min(gaps) > 1e-3


def test_adapters_and_merged_weights_say_the_same(adapters, merging, models, chat):
    for engine in (adapters, merging):
        give(engine, models)
    asked = mixed(chat, 24, temperature=0.0)
    for one, other in zip(adapters.generate(asked), merging.generate(asked), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_new_version_is_in_force_although_prompts_are_cached(adapters, models, model_path, chat):
    """Fails where an adapter is replaced under the same name: the cache holds keys and values of the former one."""
    long = tuple(chat.prompt_ids(DIALOGUE)) * 8  # several whole blocks
    ask = [Request(long, 8, seed=seed) for seed in range(3)]
    for version, seed in ((6, 11), (7, 12)):
        models = {which: model_with_adapter(model_path, seed + i) for i, which in enumerate((Weights.POLICY, Weights.TARGET))}
        give(adapters, models, version)
        adapters.generate(ask)
        for answer in adapters.generate(ask):
            np.testing.assert_allclose(answer.logprobs, logprobs(models[Weights.POLICY], answer), atol=2e-5)
            assert answer.weight_version == version


def test_given_tensors_stay_as_they_are(adapters, models):
    """Fails without a copy: vLLM multiplies B by alpha / rank in place."""
    state = {name: tensor.clone() for name, tensor in served_state(models[Weights.POLICY]).items()}
    adapters.set_weights(Weights.POLICY, 8, state)
    adapters.set_weights(Weights.POLICY, 9, state)
    expected = served_state(models[Weights.POLICY])
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_what_the_workers_hold_is_compared_with_what_was_given(adapters, models, monkeypatch):
    """Fails where nobody looks: a worker that keeps a former adapter, or one without its scale."""
    state = {name: tensor.clone() for name, tensor in served_state(models[Weights.POLICY]).items()}
    assert adapters.set_weights(Weights.POLICY, 10, state) == checksum(state.values())
    rpc = adapters._llm.collective_rpc
    monkeypatch.setattr(adapters._llm, "collective_rpc", lambda call, **kwargs: call == "take_adapter" or rpc(call, **kwargs))
    other = {name: tensor + 0.01 for name, tensor in state.items()}
    with pytest.raises(EngineError, match="does not serve the policy weights that it was given"):
        adapters.set_weights(Weights.POLICY, 11, other)
    with pytest.raises(EngineError, match="never given the policy weights"):
        adapters.submit([Request((3, 4), 1)])
    monkeypatch.undo()
    adapters.set_weights(Weights.POLICY, 12, other)


def test_the_base_is_no_adapter(adapters, models):
    with pytest.raises(EngineError, match="the initial weights are the base"):
        adapters.set_weights(Weights.INITIAL, 0, served_state(models[Weights.POLICY]))


def test_weights_do_not_change_under_a_request(adapters, models, chat):
    give(adapters, models, 13)
    adapters.submit([Request(chat.prompt_ids(DIALOGUE), 8, seed=0)])
    with pytest.raises(EngineError, match="weights cannot change while 1 requests are being answered"):
        give(adapters, models, 14)
    while adapters.poll():
        pass
    give(adapters, models, 14)


def test_a_served_b_is_scaled_in_the_engines_precision():
    adapter = {"x.lora_A.weight": torch.tensor([[1.0, 3.0]]), "x.lora_B.weight": torch.tensor([[0.1], [2.0]])}
    a, b = as_served(adapter, 2.0, torch.bfloat16)
    assert torch.equal(a, adapter["x.lora_A.weight"].bfloat16())
    assert torch.equal(b, adapter["x.lora_B.weight"].bfloat16() * 2)
