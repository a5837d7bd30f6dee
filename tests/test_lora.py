"""Weight sets as adapters over one base: in vLLM, in the learner, between them, and in a run."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.lora import LoRASettings, adapter_name, as_served, merged, pairs
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.shared import checksum
from rllib_nlac.learner import learner as learner_module
from rllib_nlac.learner.adapter import add_adapter, as_base, check_targets, has_adapter, with_dropout
from rllib_nlac.learner.batch import POLICY, TrainingSequence, to_multi_agent_batch
from rllib_nlac.learner.rl_module import load_own_entries, own_entries, served_state
from rllib_nlac.types import Generation, Message, Request, Weights

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
            *(({"target_modules": bad}, "give at least one name of a linear") for bad in ([], 3, {"q_proj": 1}, [[]])),
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

    @pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ("q_proj", "down_proj"), None])
    def test_what_can_be_used_is_taken(self, config, targets):
        given = {} if targets is None else {"target_modules": targets}
        config.language(lora=given).validate()
        expected = targets if isinstance(targets, str) else tuple(targets) if targets else "all-linear"
        assert config.lora_settings == LoRASettings(target_modules=expected)
        as_json = expected if isinstance(expected, str) else list(expected)
        assert config.lora_settings.for_peft()["target_modules"] == as_json

    def test_a_serving_that_does_not_exist(self, config):
        with pytest.raises(
            ValueError, match=r"config.engine_config\['lora_serving'\] is 'both' and must be one of auto, adapter, merged"
        ):
            config.language(lora={}).engines(engine_config={"lora_serving": "both"}).validate()


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

    engine = VLLMEngine(model_path, chat.max_context, [chat.end_id], lora=SETTINGS, merges_lora=False)
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


def test_an_answer_keeps_its_form_under_each_set(serving, models, chat):
    """And requests without a form, in the same batch, are answered as without such neighbours."""
    give(serving, models)
    free = mixed(chat, 6)
    alone = serving.generate(free)
    together = serving.generate([*mixed(chat, 6, pattern="(?:Yes|No), it is [a-z]{2,6}\\."), *free])
    said = [chat.decode(answer.token_ids) for answer in together[:6]]
    assert all(re.fullmatch(r"(?:Yes|No), it is [a-z]{2,6}\.", text) for text in said), said
    assert [g.token_ids for g in together[6:]] == [g.token_ids for g in alone]


def test_a_new_version_is_in_force_although_prompts_are_cached(adapters, models, model_path, chat):
    """Fails where an adapter is replaced under the same name: the cache holds keys and values of the former one."""
    long = tuple(chat.prompt_ids(DIALOGUE)) * 8  # several whole blocks
    ask = [Request(long, 8, seed=seed) for seed in range(3)]
    for version, seed in ((6, 11), (7, 12), (7, 13)):  # a version comes again where a run is restored
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


def test_a_new_adapter_leaves_the_others_where_they_are(adapters, models, chat):
    """Fails where a set is given by a reload of the base, which removes all adapters, or where a slot makes room for another.

    No adapter has a file, so one that vLLM looks for on the disk, because it was removed or is to be read again, fails too.
    """
    give(adapters, models, 20)
    other = model_with_adapter(adapters._llm.vllm_config.model_config.model, 31)
    for version in (21, 22):
        adapters.set_weights(Weights.POLICY, version, {n: t.clone() for n, t in served_state(other).items()})
        expected = {**models, Weights.POLICY: other}
        for answer in adapters.generate(mixed(chat)):
            np.testing.assert_allclose(answer.logprobs, logprobs(expected[answer.weights], answer), atol=2e-5)
            known = {Weights.POLICY: version, Weights.TARGET: 20, Weights.INITIAL: 0}
            assert answer.weight_version == known[answer.weights]


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


def test_a_request_reads_no_adapter_anew(adapters, models, chat, monkeypatch):
    """Fails with ``load_inplace``, by which vLLM reads the adapter again at every step of a request."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    give(adapters, models, 15)
    read = []
    load = LRUCacheWorkerLoRAManager._load_adapter
    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "_load_adapter", lambda *given: read.append(1) or load(*given))
    assert [answer.weight_version for answer in adapters.generate(mixed(chat)) if answer.weights is not Weights.INITIAL]
    assert not read


def test_a_served_b_is_scaled_in_the_engines_precision():
    adapter = {"x.lora_A.weight": torch.tensor([[1.0, 3.0]]), "x.lora_B.weight": torch.tensor([[0.1], [2.0]])}
    a, b = as_served(adapter, 2.0, torch.bfloat16)
    assert torch.equal(a, adapter["x.lora_A.weight"].bfloat16())
    assert torch.equal(b, adapter["x.lora_B.weight"].bfloat16() * 2)


def base_alone(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def answers_of_folder(folder: Path, prompt: torch.Tensor):
    """One answer of a new vLLM engine that loads a whole model."""
    from rllib_nlac.engine.vllm_engine import VLLMEngine
    from rllib_nlac.engine.vllm_settings import VLLMSettings

    chat = Chat.from_pretrained(str(folder))
    engine = VLLMEngine(str(folder), chat.max_context, [chat.end_id], VLLMSettings(cpu_kv_cache_gib=0.125))
    engine._enqueue([Request(tuple(prompt.tolist()), 12, seed=0)])  # as it was loaded: given no weights
    ((_, answer),) = engine.poll()
    engine.stop()
    return answer


def answers_of_adapter(engine, folder: Path, prompt: torch.Tensor):
    """One answer under an adapter that vLLM reads from a folder, as it would for anybody else."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=12, temperature=1.0, seed=0, logprobs=0, detokenize=False)
    request = LoRARequest(lora_name=str(folder), lora_int_id=3, lora_path=str(folder))
    engine._llm.add_request("of a folder", {"prompt_token_ids": prompt.tolist()}, params, lora_request=request)
    (output,) = [output for _ in range(100) for output in engine._llm.step() if output.finished][:1]
    engine._llm.remove_lora(3)
    ids, places = tuple(output.outputs[0].token_ids), output.outputs[0].logprobs
    known = np.array([place[token].logprob for token, place in zip(ids, places, strict=True)], np.float32)
    return Generation(tuple(prompt.tolist()), ids, known, True, 0)


@pytest.fixture()
def small(config):
    """A configuration with an adapter whose iteration takes a second or two."""
    config.language(lora={"rank": 8})
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=48, minibatch_size=24, lr=1e-2, tau=0.5)
    config.num_envs_per_env_runner = 16
    return config


@pytest.fixture()
def lent(adapters, lend_any) -> Iterator[None]:
    with lend_any(adapters):
        yield


class TestRun:
    def test_an_iteration_trains_the_adapter_alone_and_engines_follow(self, small, ray_session, lent, model_path):
        algorithm = small.build_algo()
        learner = algorithm.learner_group._learner
        base = {n: p.detach().clone() for n, p in learner.lm.named_parameters() if not p.requires_grad}
        gaps = []
        for _ in range(2):
            result = algorithm.train()
            gaps.append(result["logprob_gap"])
        assert gaps[1] < 1e-3  # a NaN would say that no turn is by the weights of the first update
        states = learner.export_weights()
        assert all(torch.equal(p, base[n]) for n, p in learner.lm.named_parameters() if n in base)
        assert any(states[Weights.POLICY][n].abs().max() > 0 for n in states[Weights.POLICY] if "lora_B" in n)
        whole = sum(p.numel() for p in base.values()) * 4 * 2
        assert result["sync"]["num_bytes"] < whole / 5
        assert 0 < result["kl_to_base"] < 10
        algorithm.stop()

    def test_a_checkpoint_resumes_exactly_and_is_exported(self, small, ray_session, lent, adapters, tmp_path, chat):
        """What is exported says the same under PEFT, Transformers and vLLM, each by its own loader."""
        from peft import PeftModel

        from rllib_nlac.checkpoints.checkpoint import CheckpointError, check_lora, export_model, read_manifest

        algorithm = small.build_algo()
        algorithm.train()
        path = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
        expected = algorithm.train()["learners"]["default_policy"]["critic_loss"]
        again = small.copy(copy_frozen=False).build_algo()
        again.restore_from_path(str(path))
        assert again.train()["learners"]["default_policy"]["critic_loss"] == expected
        again.restore_from_path(str(path))

        adapter = export_model(path, tmp_path / "adapter")
        whole = export_model(path, tmp_path / "whole", merge=True)
        base = AutoModelForCausalLM.from_pretrained(small.model_path, dtype=torch.float32)
        by_peft = PeftModel.from_pretrained(base, str(adapter))
        by_transformers = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
        ids = torch.tensor([chat.prompt_ids(DIALOGUE)])
        learner = again.learner_group._learner
        with torch.no_grad():
            expected = learner.lm(ids).logits
            torch.testing.assert_close(by_peft(ids).logits, expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(by_transformers(ids).logits, expected, rtol=1e-5, atol=1e-4)
        for answer in (answers_of_folder(whole, ids[0]), answers_of_adapter(adapters, adapter, ids[0])):
            np.testing.assert_allclose(answer.logprobs, logprobs(learner.lm, answer), atol=2e-5)
            assert abs(answer.logprobs - logprobs(base_alone(small.model_path), answer)).max() > 1e-3
        algorithm.stop()
        again.stop()

        manifest = read_manifest(path)
        check_lora("it", manifest, small)
        for lora in ({"rank": 4}, {"rank": 8, "alpha": 8}, {"rank": 8, "target_modules": ["q_proj"]}, None):
            other = small.copy(copy_frozen=False).language(lora=lora)
            with pytest.raises(CheckpointError, match=r"it was written with config\.lora \{'rank': 8.*set lora to the former"):
                check_lora("it", manifest, other)
        house = small.copy(copy_frozen=False).language(language_model="tiny_house")
        with pytest.raises(CheckpointError, match="an adapter of another base than 'tiny_house': set language_model to 'tiny'"):
            check_lora("it", manifest, house)

    @pytest.mark.parametrize("tau", [0.0, 1.0])
    def test_the_target_keeps_its_adapter_or_takes_the_policys(self, small, ray_session, lent, tau):
        algorithm = small.training(tau=tau).build_algo()
        before = algorithm.learner_group._learner.export_weights()
        algorithm.train()
        after = algorithm.learner_group._learner.export_weights()
        expected = before[Weights.TARGET] if tau == 0 else after[Weights.POLICY]
        assert all(torch.equal(after[Weights.TARGET][n], expected[n]) for n in expected)
        assert any(not torch.equal(after[Weights.POLICY][n], before[Weights.POLICY][n]) for n in expected)
        algorithm.stop()


@pytest.mark.parametrize("name", ["PPO", "APPO"])
def test_rllibs_own_algorithms_train_an_adapter(name, small, ray_session, adapters, monkeypatch):
    from rllib_nlac.algorithms import STOCK_ON_TEXT

    monkeypatch.setattr("rllib_nlac.baselines.stock_runner.local_engine", lambda config, chat: adapters)
    config = STOCK_ON_TEXT[name].get_default_config()
    config.environment("TwentyQuestions", env_config=dict(small.env_config)).debugging(seed=0)
    config.language(language_model="tiny", lora={"rank": 8}).env_runners(num_env_runners=0, num_envs_per_env_runner=16)
    config.learners(num_learners=0).training(lr=1e-2, train_batch_size_per_learner=64)
    if name == "PPO":
        config.training(minibatch_size=32, num_epochs=1)
    else:
        config.env_runners(rollout_fragment_length=4).reporting(min_time_s_per_iteration=0)
    algorithm = config.build_algo()
    module = algorithm.learner_group._learner.module["default_policy"]
    served = {n: t.clone() for n, t in served_state(module.lm).items()}
    base = {n: p.detach().clone() for n, p in module.lm.named_parameters() if not p.requires_grad}
    for _ in range(10):
        algorithm.train()
        if moved := any(not torch.equal(tensor, served[n]) for n, tensor in served_state(module.lm).items()):
            break
    assert moved and all(torch.equal(p, base[n]) for n, p in module.lm.named_parameters() if n in base)
    algorithm.train()
    assert algorithm.env_runner._weights.keys() == served.keys()  # what RLlib's sync brings is the adapter
    algorithm.stop()


def test_a_head_is_trained_beside_the_adapter(small, ray_session, adapters, lend_any):
    """The scalar critic's target holds both, and answers with both."""
    from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig

    config = ScalarCriticConfig().environment("TwentyQuestions", env_config=dict(small.env_config)).debugging(seed=0)
    config.language(language_model="tiny", lora={"rank": 8}).env_runners(num_envs_per_env_runner=16)
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=48, minibatch_size=24, lr=1e-2, tau=1.0)
    with lend_any(adapters):
        algorithm = config.build_algo()
    learner = algorithm.learner_group._learner
    algorithm.train()
    names = {name for name in learner.target.state if "lora_" not in name}
    assert names == {"head.weight", "head.bias"} and learner.target.state["head.weight"].abs().max() > 0
    sequence = (5, 6, 7, 8)
    assert learner.q_values([sequence], target=True) == pytest.approx(learner.q_values([sequence], target=False), abs=1e-6)
    algorithm.stop()


def sequences() -> list[TrainingSequence]:
    made = [((3, 10, 11), (20, 21, 1)), ((3, 12), (22, 1)), ((3, 13, 14, 15), (23, 24, 25, 1))]
    return [TrainingSequence(prompt, answer, i % 2, i, 0, 1 / 3) for i, (prompt, answer) in enumerate(made)]


class TestLearner:
    def test_zero_stages_agree_and_move_the_adapter_alone(self, make_learner):
        found = []
        for stage in range(4):
            learner = make_learner(lora={"rank": 8}, deepspeed_config={"zero_optimization": {"stage": stage}}, tau=0.5)
            for number in range(3):
                steps = {"num_env_steps_sampled_lifetime": number}
                learner.update(batch=to_multi_agent_batch(sequences(), 3), timesteps=steps)
            learner.prepare_for_saving()
            state = learner.get_state()["rl_module"]["default_policy"]
            assert state and all("lora_" in name for name in state)
            found.append(learner.export_weights())
        for other in found[1:]:
            for which in (Weights.POLICY, Weights.TARGET):
                for name, tensor in found[0][which].items():
                    torch.testing.assert_close(other[which][name], tensor, rtol=0, atol=2e-4)

    def test_gradient_checkpointing_changes_nothing(self, make_learner):
        found = []
        for checkpointing in (False, True):
            learner = make_learner(lora={"rank": 8}, learner_model={"gradient_checkpointing": checkpointing})
            learner.update(batch=to_multi_agent_batch(sequences(), 3), timesteps={"num_env_steps_sampled_lifetime": 0})
            found.append(learner.export_weights()[Weights.POLICY])
        assert any(tensor.abs().max() > 0 for name, tensor in found[0].items() if "lora_B" in name)
        for name in found[0]:
            torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-6)

    def test_dropout_is_at_work_in_gradient_steps_alone(self, make_learner):
        """Else the engine, which has none, and the learner would not agree."""
        learner = make_learner(lora={"rank": 8, "dropout": 0.5}, lr=1e-2)
        losses = []
        for number in range(4):
            learner.update(batch=to_multi_agent_batch(sequences(), 3), timesteps={"num_env_steps_sampled_lifetime": number})
        first, second = (learner.logprobs_of([(3, 10, 11)], [(20, 21, 1)])[0] for _ in range(2))
        np.testing.assert_array_equal(first, second)
        rows = {
            name: torch.as_tensor(column) for name, column in to_multi_agent_batch(sequences(), 3)["default_policy"].items()
        }
        before = torch.get_rng_state()
        for draw in ((0, 0, 7), (0, 1, 7), (0, 0, 8), (0, 0, 7)):
            with with_dropout(learner.lm, draw):
                losses.append(learner._sequence_losses(rows)[0].detach())
        assert torch.equal(before, torch.get_rng_state())  # nobody else draws other numbers for it
        # Another learner leaves out something else, and so does another step; what goes on from a checkpoint the same.
        assert not any(torch.equal(losses[0], each) for each in losses[1:3]) and torch.equal(losses[0], losses[3])

    def test_every_step_and_every_learner_leaves_out_its_own(self, make_learner, monkeypatch):
        """Fails where the draws are those of the run, the same in each step or on each learner."""
        draws: list[tuple] = []
        monkeypatch.setattr(
            learner_module, "with_dropout", lambda lm, draw: draws.append(tuple(draw)) or with_dropout(lm, draw)
        )
        learner = make_learner(lora={"rank": 4, "dropout": 0.5})
        batch = to_multi_agent_batch([TrainingSequence((3,), (20, 1), POLICY, i, i, 1.0) for i in range(2)], 2)
        for learner._learner_index in (0, 1):
            learner.update(batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0})
        assert draws == [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 1, 3)]

    def test_a_learner_that_is_restored_says_the_same_without_a_step(self, make_learner):
        """Fails where dropout is at work until the first gradient step has turned it off."""
        first, second = (make_learner(lora={"rank": 8, "dropout": 0.5}, lr=1e-2) for _ in range(2))
        for number in range(2):  # until B is not 0 any more
            first.update(batch=to_multi_agent_batch(sequences(), 3), timesteps={"num_env_steps_sampled_lifetime": number})
        untrained = second.logprobs_of([(3, 10, 11)], [(20, 21, 1)])[0]
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        going_on, restored = (learner.logprobs_of([(3, 10, 11)], [(20, 21, 1)])[0] for learner in (first, second))
        np.testing.assert_array_equal(going_on, restored)
        assert not np.allclose(untrained, restored)

    def test_what_dropout_leaves_out_is_the_same_after_a_restore(self, make_learner):
        """Fails where it is drawn from a random state that others move, or that is not part of a checkpoint, as a GPU's."""
        first, second = (make_learner(lora={"rank": 8, "dropout": 0.5}, lr=1e-2) for _ in range(2))
        batch, times = to_multi_agent_batch(sequences(), 3), {"num_env_steps_sampled_lifetime": 0}
        first.update(batch=batch, timesteps=times)
        second.set_state(pickle.loads(pickle.dumps(first.get_state())))
        torch.rand(5)
        for learner in (first, second):
            learner.update(batch=batch, timesteps=times)
        mine, restored = (learner.export_weights()[Weights.POLICY] for learner in (first, second))
        assert all(torch.equal(mine[name], restored[name]) for name in mine)
