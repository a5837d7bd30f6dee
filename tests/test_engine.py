"""Real vLLM behind the protocol: log-probabilities, both weight sets, no stale cache, seeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.engine.vllm_settings import VLLMSettings
from rllib_nlac.engine.vllm_worker import WorkerExtension
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.types import Message, Request, Weights

DIALOGUE = (Message("user", "Guess my object."), Message("assistant", "Is it alive?"), Message("user", "Yes."))


def requests(chat, count: int = 16, **changes) -> list[Request]:
    prompts = [chat.prompt_ids(DIALOGUE[:1]), chat.prompt_ids(DIALOGUE)]
    return [Request(**{"prompt_ids": prompts[i % 2], "max_tokens": 12, "seed": i, **changes}) for i in range(count)]


def states(model_path: str) -> dict[Weights, dict[str, torch.Tensor]]:
    """Two weight sets that differ from the shipped one in every parameter, the tied embedding included."""
    result = {}
    for which, seed in ((Weights.POLICY, 1), (Weights.TARGET, 2)):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        state = {name: tensor.clone() for name, tensor in served_state(model).items()}
        result[which] = {name: t + 0.05 * t.std() * torch.randn(t.shape, generator=generator) for name, t in state.items()}
    return result


def reference_logprobs(model_path: str, state: dict[str, torch.Tensor], generation) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1].log_softmax(-1)
    return logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].numpy()


@pytest.fixture()
def loaded(engine, model_path):
    both = states(model_path)
    for which, state in both.items():
        engine.set_weights(which, 5, state)
    return both


def test_logprobs_equal_the_trainers_after_a_sync_for_both_weight_sets(engine, chat, model_path, loaded):
    """Fails where any layer keeps its former weights, as an output layer tied to the embedding does under oneDNN."""
    for which in (Weights.TARGET, Weights.POLICY, Weights.TARGET):
        for generation in engine.generate(requests(chat, weights=which)):
            expected = reference_logprobs(model_path, loaded[which], generation)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
            assert generation.weights is which and generation.weight_version == 5


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (0.7, 0.8), (0.0, 1.0), (0.0, 0.5)])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine, chat, model_path, loaded, temperature, top_p):
    """Divided by the temperature and renormalised within the nucleus; of greedy turns at temperature 1. Mixed in one batch."""
    others = requests(chat, 4, temperature=1.3) + requests(chat, 4, temperature=0.0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(loaded[Weights.POLICY], strict=False)
    compared = 0
    for generation in engine.generate([*requests(chat, 8, temperature=temperature, top_p=top_p), *others])[:8]:
        ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1]
        chances = (logits / (temperature or 1.0)).softmax(-1)
        for token, mine, chance in zip(generation.token_ids, generation.logprobs, chances, strict=True):
            ordered = chance.sort(descending=True).values
            before = ordered.cumsum(0) - ordered
            nucleus = before < (top_p if temperature else 1.0)
            if min(abs(before - top_p)) < 1e-3 and top_p < 1:
                continue  # rounding decides about the nucleus' last token
            compared += 1
            assert mine == pytest.approx(float((chance[token] / ordered[nucleus].sum()).log()), abs=1e-3)
    assert compared > 20


def test_a_cached_prefix_does_not_survive_a_change_of_weights(engine, chat, model_path, loaded):
    long = (Message("user", "Guess my object. " * 40),)  # several cache blocks
    ask = [Request(chat.prompt_ids(long), 8, seed=0)]
    engine.generate(ask)
    engine.set_weights(Weights.POLICY, 6, loaded[Weights.TARGET])
    (generation,) = engine.generate(ask)
    np.testing.assert_allclose(
        generation.logprobs, reference_logprobs(model_path, loaded[Weights.TARGET], generation), atol=1e-3
    )
    assert generation.weight_version == 6


def test_what_a_swap_brings_is_the_latest_that_was_given(engine, chat, model_path, loaded):
    """Fails where a worker keeps the first weights of a set."""
    former, latest = loaded[Weights.TARGET], loaded[Weights.POLICY]
    engine.set_weights(Weights.TARGET, 6, latest)
    engine.set_weights(Weights.POLICY, 6, former)
    for generation in engine.generate(requests(chat, 2, weights=Weights.TARGET)):
        np.testing.assert_allclose(generation.logprobs, reference_logprobs(model_path, latest, generation), atol=1e-3)


def test_a_swap_that_brings_other_weights_is_found(engine, chat, model_path, loaded):
    """Each time, and it leaves the other set as it was."""
    engine.generate(requests(chat, 1))
    engine._llm.collective_rpc(_damage_kept, args=(Weights.TARGET,))
    for _ in range(2):
        with pytest.raises(EngineError, match="does not serve the target weights that it was given"):
            engine.generate(requests(chat, 1, weights=Weights.TARGET))
    (generation,) = engine.generate(requests(chat, 1))
    expected = reference_logprobs(model_path, loaded[Weights.POLICY], generation)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)


def _damage_kept(worker, which):
    list(worker.kept_weights[which].values())[3][0] += 1


def test_the_checksum_is_that_of_the_weights(engine, loaded):
    for which, state in loaded.items():
        assert engine.set_weights(which, 7, state) == checksum(state.values())


def test_an_engine_that_keeps_its_own_copies_is_done_with_what_it_was_lent(model_path, chat, loaded, monkeypatch):
    """As on a GPU, where it is lent the learner's own weights, which are one piece of memory and change at the next step."""
    monkeypatch.setattr(WorkerExtension, "_keeps_parts", lambda worker: True)
    engine = VLLMEngine(model_path, chat.max_context, [chat.end_id])
    for version, sets in enumerate(([Weights.TARGET, Weights.POLICY], [Weights.POLICY, Weights.TARGET])):
        for which, source in zip((Weights.TARGET, Weights.POLICY), sets, strict=True):
            memory = torch.cat([tensor.flatten() for tensor in loaded[source].values()])
            pieces = memory.split([tensor.numel() for tensor in loaded[source].values()])
            lent = {n: piece.view(t.shape) for (n, t), piece in zip(loaded[source].items(), pieces, strict=True)}
            assert engine.set_weights(which, version, lent) == checksum(loaded[source].values())
            memory.zero_()
        for which, source in zip((Weights.TARGET, Weights.POLICY), sets, strict=True):
            (generation,) = engine.generate(requests(chat, 1, weights=which))
            expected = reference_logprobs(model_path, loaded[source], generation)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
    assert engine._llm.collective_rpc(_knows_slices) == [True]
    engine.stop()


def _knows_slices(worker):
    return worker.slices is not None


def test_weights_of_another_shape_are_refused(engine, loaded, model_path):
    state = dict(loaded[Weights.POLICY])
    dropped = {name: tensor for name, tensor in state.items() if "layers.1.mlp" not in name}
    with pytest.raises(
        EngineError, match=r"vLLM did not take the policy weights: the weights lack model\.layers\.1\.mlp.* model"
    ):
        engine.set_weights(Weights.POLICY, 8, {**dropped, "model.norm.weight": state["model.norm.weight"] + 1})
    wider = {**state, "model.norm.weight": torch.ones(state["model.norm.weight"].numel() + 1)}
    with pytest.raises(EngineError, match=r"model\.norm\.weight has the shape \(\d+,\) and not \(\d+,\)"):
        engine.set_weights(Weights.TARGET, 8, wider)
    engine.set_weights(Weights.POLICY, 9, state)


def test_seeds_make_requests_reproducible(engine, chat, loaded):
    first = [g.token_ids for g in engine.generate(requests(chat, 32))]
    again = [g.token_ids for g in engine.generate(requests(chat, 32))]
    alone = [engine.generate([request])[0].token_ids for request in requests(chat, 6)]
    assert first == again and first[:6] == alone and len(set(first)) > 3


def test_greedy_needs_no_seed(engine, chat):
    both = [engine.generate(requests(chat, 2, temperature=0.0, seed=seed))[0].token_ids for seed in (1, 2)]
    assert both[0] == both[1]


def test_the_limit_cuts_off_and_is_said(engine, chat):
    (short,) = engine.generate(requests(chat, 1, max_tokens=1))
    assert len(short.token_ids) == 1 and not short.finished
    (whole,) = engine.generate(requests(chat, 1, max_tokens=400, temperature=0.0))
    assert whole.finished is (whole.token_ids[-1] == chat.end_id)


def test_submit_and_poll_return_every_ticket_once(engine, chat):
    asked = engine.submit(requests(chat, 40))
    got: dict[int, object] = {}
    while len(got) < len(asked):
        for ticket, generation in engine.poll():
            assert ticket not in got
            got[ticket] = generation
    assert sorted(got) == sorted(asked) and engine.poll() == []


def test_weights_cannot_change_under_a_running_request(engine, chat, loaded):
    engine.submit(requests(chat, 1))
    with pytest.raises(EngineError, match="1 requests are being answered"):
        engine.set_weights(Weights.POLICY, 10, loaded[Weights.POLICY])
    while engine.poll():
        pass


@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_withdrawn_is_answered_no_more_and_changes_nothing_that_follows(engine, chat, loaded, steps):
    before = engine.generate(requests(chat, 8))
    engine.submit(requests(chat, 4, max_tokens=400, temperature=0.0))
    for _ in range(steps):
        engine._llm.step()
    engine.withdraw()
    assert engine.poll() == []
    engine.set_weights(Weights.POLICY, before[0].weight_version, loaded[Weights.POLICY])
    assert [answer.token_ids for answer in engine.generate(requests(chat, 8))] == [answer.token_ids for answer in before]


def test_an_interrupted_wave_leaves_an_idle_engine(engine, chat, loaded, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "poll", interrupted)
        engine.generate(requests(chat, 4))
    engine.set_weights(Weights.POLICY, 10, loaded[Weights.POLICY])
    assert len(engine.generate(requests(chat, 4))) == 4


def test_an_engine_that_ends_takes_nothing_from_the_others_in_its_process(engine, chat, model_path):
    before = engine.generate(requests(chat, 4))
    other = VLLMEngine(model_path, chat.max_context, [chat.end_id], VLLMSettings(cpu_kv_cache_gib=0.125))
    groups = dict(torch.distributed.distributed_c10d._world.pg_group_ranks)
    other.stop()
    assert groups and torch.distributed.distributed_c10d._world.pg_group_ranks == groups
    assert [answer.token_ids for answer in engine.generate(requests(chat, 4))] == [answer.token_ids for answer in before]


def test_requests_larger_than_one_batch(engine, chat):
    """More seeded prompt tokens than one step takes: chunked prefill would rewind a CPU generator and crash."""
    prompt = chat.prompt_ids((Message("user", "Is it a dog? " * 60),))
    generations = engine.generate([Request(prompt, 4, seed=i) for i in range(120)])
    assert len(generations) == 120


@pytest.fixture(autouse=True)
def shipped_weights_again(engine, model_path):
    """Leaves the session's engine with the shipped weights."""
    yield
    state = served_state(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))
    for which in (Weights.TARGET, Weights.POLICY):
        engine.set_weights(which, 0, {name: tensor.clone() for name, tensor in state.items()})


def test_log_probabilities_come_only_where_they_are_wanted(engine, chat):
    """And whether one of them is wanted changes neither its own tokens nor its neighbours'."""
    wanted = engine.generate(requests(chat, 8))
    mixed = engine.generate([replace(request, logprobs=i % 2 == 0) for i, request in enumerate(requests(chat, 8))])
    none = engine.generate(requests(chat, 8, logprobs=False))
    assert [g.token_ids for g in wanted] == [g.token_ids for g in mixed] == [g.token_ids for g in none]
    for i, (a, b, c) in enumerate(zip(wanted, mixed, none, strict=True)):
        assert a.sampled_logprobs.shape == (len(a.token_ids),) and c.logprobs.shape == (0,)
        if i % 2:
            assert b.logprobs.shape == (0,)
        else:
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
        with pytest.raises(ValueError, match="none were asked for"):
            _ = c.sampled_logprobs


@pytest.mark.vllm
def test_what_no_token_stands_for_is_never_said_and_has_no_probability(padded_model, chat, make_learner):
    """Fails where the engine samples rows that only pad the vocabulary, or where one of engine and learner counts them."""
    learner, engine = make_learner(language_model=padded_model), VLLMEngine(padded_model, chat.max_context, [chat.end_id])
    try:
        asked = [*requests(chat, 8), *requests(chat, 2, temperature=0.0), *requests(chat, 2, pattern="(?:Yes|No)\\.?")]
        found, again = engine.generate(asked), engine.generate(asked)
    finally:
        engine.stop()
    assert [g.token_ids for g in again] == [g.token_ids for g in found]
    assert {chat.decode(g.token_ids).rstrip(".") for g in found[10:]} <= {"Yes", "No"}
    whole = AutoModelForCausalLM.from_pretrained(padded_model, dtype=torch.float32)
    rows, known = whole.config.vocab_size, len(chat.tokenizer)
    mine = learner.logprobs_of([g.prompt_ids for g in found], [g.token_ids for g in found])
    unspoken = []
    for generation, logprobs in zip(found[:10], mine[:10], strict=True):
        assert max(generation.token_ids) < known < rows
        np.testing.assert_allclose(generation.logprobs, logprobs, atol=1e-3)
        ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = whole(input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1]
        unspoken += logits.softmax(-1)[:, known:].sum(-1).tolist()
        expected = logits[:, :known].log_softmax(-1)[range(len(logprobs)), generation.token_ids]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)
    assert np.mean(unspoken) > 0.2  # or this would prove nothing
