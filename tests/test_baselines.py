"""The baselines: what makes each of them what it is, and one real iteration of every one."""

from __future__ import annotations

import copy
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_episodes import episode
from scripted_engine import dialogue_of

from rllib_nlac import algorithms
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.baselines.grpo import GRPOConfig, group_advantages
from rllib_nlac.baselines.nlql import NLQLConfig, choose, value_of
from rllib_nlac.baselines.nlrl import NLRLConfig
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.baselines.rft import RFTConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig
from rllib_nlac.baselines.self_distillation import SelfDistillationConfig
from rllib_nlac.checkpoints.checkpoint import CheckpointError, export_model
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.endpoint_engine import EndpointEngine
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.episode import GENERATION, TASK_SEED
from rllib_nlac.language.critique import transcript
from rllib_nlac.learner.batch import POLICY, TrainingSequence, into_minibatches, to_multi_agent_batch, turn_sequences
from rllib_nlac.learner.losses import clipped_policy_loss
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.types import Critique, Future, Generation, Message, Request

WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}
CONFIGS = {
    "GRPO": GRPOConfig,
    "RFT": RFTConfig,
    "NLRL": NLRLConfig,
    "SelfDistillation": SelfDistillationConfig,
    "NLQL": NLQLConfig,
    "ScalarCritic": ScalarCriticConfig,
    "ReAct": ReActConfig,
}
UNTRAINED = ("ReAct",)


def small(config):
    config.environment("TwentyQuestions", env_config=dict(WORLD)).debugging(seed=0)
    config.language(language_model="tiny", action_format="plain")
    config.training(lr=1e-3, episodes_per_iteration=16, train_batch_size_per_learner=32, minibatch_size=16)
    config.num_envs_per_env_runner = 16
    if hasattr(config, "roles"):
        config.roles(max_future_tokens=24, max_critique_tokens=32)
    return config


@pytest.fixture()
def build(ray_session, lent_engine):
    built = []

    def build(config):
        built.append(small(config).build_algo())
        return built[-1]

    yield build
    for algorithm in built:
        algorithm.stop()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_baseline_trains_saves_and_goes_on(build, name, tmp_path):
    algorithm = build(CONFIGS[name]())
    assert algorithms.OURS[name] is type(algorithm)
    results = [algorithm.train() for _ in range(2)]
    assert results[1]["env_runners"]["num_episodes_lifetime"] >= 32
    assert 0.0 <= results[1]["env_runners"]["success_rate"] <= 1.0
    if name not in UNTRAINED:
        # Of the first iteration with something to learn: by chance all episodes of a small one may be alike.
        learned = next(own for r in results if (own := r["learners"]["default_policy"])["num_gradient_steps"] >= 1)
        assert learned["num_gradient_steps"] >= 1 and math.isfinite(learned["gradient_norm"])
        assert results[1]["logprob_gap"] < 1e-3  # the engine plays with the weights of the last sync
    saved = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    if name in UNTRAINED:
        with pytest.raises(CheckpointError, match=f"{name}, which trains nothing: use tiny"):
            export_model(saved, tmp_path / "model")
    algorithm.restore_from_path(saved)
    result = algorithm.train()
    assert result["training_iteration"] == 3 and result["env_runners"]["num_episodes"] >= 16
    assert name in UNTRAINED or result["logprob_gap"] < 1e-3


@pytest.mark.parametrize("kind", [GRPOConfig, ScalarCriticConfig])
def test_at_another_temperature_engine_and_learner_agree(build, kind):
    """So that the ratio of a policy that has not changed is 1."""
    algorithm = build(kind().language(action_temperature=0.5))
    learner = algorithm.learner_group._learner
    algorithm.train()
    episodes = algorithm.collect()
    generations = [g for e in episodes for g in e.get_extra_model_outputs(GENERATION)][:8]
    sequences = [TrainingSequence(g.prompt_ids, g.token_ids, POLICY, 0, 0, 1.0, 1.0, g.logprobs) for g in generations]
    rows = to_multi_agent_batch(sequences, 8)["default_policy"]
    losses, _ = learner._sequence_losses({name: torch.from_numpy(column) for name, column in rows.items()})
    assert losses.tolist() == pytest.approx([-1.0] * 8, abs=1e-3)  # minus the ratio times an advantage of 1
    assert algorithm.train()["logprob_gap"] < 1e-3


class TestPolicyGradient:
    @given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
    @settings(max_examples=100)
    def test_group_advantages(self, returns):
        returns = np.array(returns)
        centred = group_advantages(returns, normalize_by_std=False)
        assert abs(centred.mean()) < 1e-9 and np.allclose(np.diff(centred), np.diff(returns))
        if returns.std() > 1e-3:
            assert group_advantages(returns, normalize_by_std=True).std() == pytest.approx(1.0)

    def test_a_group_without_spread_says_nothing(self):
        assert group_advantages(np.ones(4), normalize_by_std=True).tolist() == [0.0] * 4

    def test_loss_in_closed_form(self):
        logprobs = torch.log(torch.tensor([[0.5, 0.2], [0.5, 0.9]]))
        behaviour = torch.log(torch.tensor([[0.5, 0.4], [0.1, 0.9]]))
        mask = torch.tensor([[True, True], [True, False]])
        loss = clipped_policy_loss(logprobs, behaviour, torch.tensor([2.0, 3.0]), mask, clip=0.2)
        # Ratios 1 and 0.5 with A = 2: min(0.5 A, 0.8 A) = 0.5 A. Ratio 5 with A = 3 is clipped at 1.2.
        assert loss.tolist() == pytest.approx([-(2.0 + 1.0) / 2, -3.6])

    def test_a_clipped_token_has_no_gradient(self):
        logprobs = torch.log(torch.tensor([[0.5, 0.5]])).requires_grad_()
        behaviour = torch.log(torch.tensor([[0.1, 0.5]]))
        clipped_policy_loss(logprobs, behaviour, torch.ones(1), torch.ones(1, 2, dtype=torch.bool), 0.2).sum().backward()
        assert logprobs.grad.tolist() == [[0.0, -0.5]]

    def test_a_step_makes_good_turns_likelier_and_bad_ones_less_likely(self, build, chat):
        algorithm = build(GRPOConfig())
        learner = algorithm.learner_group._learner
        prompt = chat.prompt_ids((Message("user", "Guess my object."),))
        turns = [chat.encode("Is it big?"), chat.encode("Is it alive?")]
        before = learner.logprobs_of([prompt] * 2, turns)
        batch = [
            TrainingSequence(prompt, turn, POLICY, 0, 0, 0.5, advantage, logprobs)
            for turn, advantage, logprobs in zip(turns, (1.0, -1.0), before, strict=True)
        ]
        learner.update(batch=to_multi_agent_batch(batch, 2), timesteps={"num_env_steps_sampled_lifetime": 0})
        after = learner.logprobs_of([prompt] * 2, turns)
        assert after[0].sum() > before[0].sum() and after[1].sum() < before[1].sum()

    def test_a_group_plays_one_task_and_differs_in_its_play(self, build):
        algorithm = build(GRPOConfig())
        episodes = algorithm.collect()
        tasks = Counter(e.custom_data[TASK_SEED] for e in episodes)
        assert sorted(tasks.values()) == [8, 8]
        for seed in tasks:
            group = [e for e in episodes if e.custom_data[TASK_SEED] == seed]
            assert len({e.get_infos(0)["task_id"] for e in group}) == 1
            assert len({tuple(e.get_actions()) for e in group}) > 4


class TestMinibatches:
    @given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
    @settings(max_examples=50)
    def test_every_sequence_once_an_epoch_and_weights_of_a_step_sum_to_1(self, count, size, epochs):
        sequences = [TrainingSequence((1,), (2,), POLICY, i, 0, 1.0 + i) for i in range(count)]
        made = into_minibatches(sequences, size, epochs, np.random.default_rng(0))
        assert Counter(s.item for s in made) == dict.fromkeys(range(count), epochs)
        for step in {s.minibatch for s in made}:
            members = [s for s in made if s.minibatch == step]
            assert len(members) <= size and sum(s.weight for s in members) == pytest.approx(1.0)

    def test_an_episode_weighs_1_whatever_its_length(self):
        for length in (1, 5):
            assert sum(s.weight for s in turn_sequences(episode(0, length))) == pytest.approx(1.0)


class TestRFT:
    def test_only_successful_episodes_are_imitated(self, build):
        algorithm = build(RFTConfig())
        won, lost = episode(1), episode(2, truncated=True)
        won.get_infos(-1)["success"], lost.get_infos(-1)["success"] = True, False
        sequences = algorithm.training_sequences([won, lost])
        expected = {g.token_ids for g in won.get_extra_model_outputs(GENERATION)}
        assert {s.answer_ids for s in sequences} == expected
        assert algorithm.training_sequences([lost]) == []  # without a pool nothing of the former iteration is left

    def test_the_pool_keeps_the_latest(self, build):
        algorithm = build(RFTConfig().training(pool_size=3))
        for number in range(5):
            algorithm.training_sequences([episode(number)])
        assert [e.id_ for e in algorithm.pool] == ["episode-2", "episode-3", "episode-4"]


class TestNLRLAndSelfDistillation:
    def test_the_evaluator_sees_every_rollout(self, build):
        algorithm = build(NLRLConfig())
        prompts = []
        generate = algorithm.engine.generate

        def spy(requests):
            prompts.extend(algorithm.chat.tokenizer.decode(list(r.prompt_ids)) for r in requests)
            return generate(requests)

        algorithm.engine.generate = spy
        algorithm.train()
        shown = [p for p in prompts if "Evaluate." in p]
        assert len(shown) == 16
        lines = [p.split("Evaluate.\n")[1].split("<|end|>")[0].splitlines() for p in shown]
        assert all(len(futures) <= 4 for futures in lines) and sum(len(futures) == 4 for futures in lines) >= 12
        # Every step was played: nothing is predicted, and no next action is asked for.
        assert not any(p.endswith("Predict.<|end|><|assistant|>") for p in prompts)

    def test_self_distillation_shows_bare_replies_and_trains_no_critic(self, build):
        t = transition_at("E", episode(3), 1, n_step=10)
        assert transcript(t) == Future("reply 3.1 reply 3.2 reply 3.3 SUCCESS", True)
        algorithm = build(SelfDistillationConfig())
        sequences = algorithm.training_sequences(algorithm.collect())
        assert {s.role for s in sequences} == {POLICY}


class TestNLQL:
    YES, NO = Critique("Optimal: Yes", True, "", ""), Critique("Optimal: No", False, "", "x")
    GOOD, BAD = (Future("SUCCESS", True),), (Future("FAILURE", False),)

    def test_value_orders_verdict_before_prediction(self):
        values = [value_of(critique, future) for critique in (self.NO, self.YES) for future in (self.BAD, self.GOOD)]
        assert values == sorted(values) and len(set(values)) == 4

    def test_the_best_candidate_is_distilled_and_ties_teach_nothing(self):
        t = transition_at("E", episode(1), 0)
        answers = [(t.generation, text) for text in ("a", "b", "c")]
        best = choose(t, answers, [self.BAD, self.GOOD, self.BAD], [self.NO, self.NO, self.NO])
        assert best.action == "b" and best.generation is not None and best.reason == "refined"
        assert choose(t, answers, [self.BAD] * 3, [self.NO] * 3).generation is None
        assert choose(t, [None] * 3, [()] * 3, [None] * 3).reason == "unparsed_action"
        assert choose(t, answers, [()] * 3, [None] * 3).reason == "unparsed_critique"


class TestScalarCritic:
    def test_targets_in_closed_form_and_nothing_across_an_end(self, build):
        algorithm = build(ScalarCriticConfig().training(gamma=0.9, entropy_alpha=0.1))
        algorithm._q = lambda generations, target: np.array([5.0] * len(generations))
        whole = episode(1, length=3)
        one_step = [transition_at("E", whole, t) for t in range(3)]
        following = transition_at("E", whole, 0).generation  # log-probability 0
        targets = algorithm._targets(one_step, [following, following, None])
        assert targets == pytest.approx([0.9 * 5.0, 0.9 * 5.0, 1.0])
        two_steps = [transition_at("E", whole, t, n_step=2) for t in range(2)]
        assert algorithm._targets(two_steps, [following, None]) == pytest.approx([0.81 * 5.0, 0.9])

    def test_q_learns_its_target_and_the_target_network_lags(self, build, chat):
        algorithm = build(ScalarCriticConfig().training(lr=3e-3, tau=0.1))
        learner = algorithm.learner_group._learner
        prompt = chat.prompt_ids((Message("user", "Guess my object."),))
        turns = [chat.encode("Is it big?"), chat.encode("Is it alive?")]
        sequences = [TrainingSequence(prompt, turns[i], 0, i, 0, 0.5, target) for i, target in enumerate((1.0, -0.5))]
        whole = [(*prompt, *turn) for turn in turns]
        assert learner.q_values(whole, target=False).tolist() == [0.0, 0.0]
        for number in range(60):
            learner.update(batch=to_multi_agent_batch(sequences, 2), timesteps={"num_env_steps_sampled_lifetime": 0})
            if number == 2:
                now, lagging = (np.abs(learner.q_values(whole, target=which)).sum() for which in (False, True))
                assert lagging < now
        assert learner.q_values(whole, target=False) == pytest.approx([1.0, -0.5], abs=0.15)

    def test_zero_3_is_refused(self):
        with pytest.raises(ValueError, match=r"zero_optimization\.stage below 3"):
            small(ScalarCriticConfig()).deepspeed(deepspeed_config={"zero_optimization": {"stage": 3}}).validate()


class TestReAct:
    def ask(self, chat, url, **settings):
        engine = EndpointEngine(chat, url, "m", **settings)
        request = Request((3,), 12, 0.7, seed=5, messages=(Message("user", "Guess my object."),))
        return engine.generate([request, request])

    def test_an_endpoint_plays(self, ray_session, serve):
        server = serve()
        config = small(ReActConfig()).training(endpoint={"base_url": server.url, "model": "somebody"})
        algorithm = config.build_algo()
        try:
            result = algorithm.train()
            assert result["env_runners"]["num_episodes"] == 16
            assert server.asked[0]["model"] == "somebody" and server.asked[0]["max_tokens"] == 128
            turns = max((body["messages"] for body in server.asked), key=len)
            assert [m["role"] for m in turns] == ["system", "user", *["assistant", "user"] * 5]
        finally:
            algorithm.stop()

    def test_messages_go_out_and_text_comes_back(self, chat, serve):
        server = serve()
        answers = self.ask(chat, server.url)
        assert [chat.decode(a.token_ids) for a in answers] == ["Is it big?"] * 2
        assert server.asked[0]["messages"] == [{"role": "user", "content": "Guess my object."}] and server.asked[0]["seed"] == 5

    def test_what_the_local_template_opens_says_nothing_of_an_endpoints_answer(self, chat, serve, monkeypatch):
        tokenizer = copy.deepcopy(chat.tokenizer)
        tokenizer.chat_template = tokenizer.chat_template.rstrip() + "<think>\n"
        thinking = Chat(tokenizer, chat.max_context)
        monkeypatch.setattr(LanguageConfig, "make_chat", lambda self: thinking)
        for endpoint, said in (({}, "<think>Is it big?"), ({"base_url": serve().url, "model": "m"}, "Is it big?")):
            books = ReActConfig().training(endpoint=endpoint).make_chat()
            ids = books.prompt_ids((Message("user", "Guess my object."),))
            assert books.tokenizer.decode(ids).endswith("<think>")
            assert books.said(Generation(ids, books.encode("Is it big?"), np.empty(0), True, 0)) == said

    def test_what_may_be_retried_is_retried(self, chat, serve):
        server = serve(429, 500)
        assert len(self.ask(chat, server.url, max_concurrency=1)) == 2 and len(server.asked) == 4

    def test_what_fails_for_good_says_where_and_why(self, chat, serve):
        server = serve(*[500] * 20)
        with pytest.raises(
            EngineError, match=r"endpoint http://127.0.0.1:\d+/v1 failed: InternalServerError.*not now"
        ) as raised:
            self.ask(chat, server.url, max_retries=1)
        assert raised.value.__cause__ is None  # the client's own exceptions cannot be pickled, and Ray would lose ours
        with pytest.raises(EngineError, match="needs a key: set the environment variable NO_SUCH_KEY"):
            EndpointEngine(chat, "https://api.openai.com/v1", "m", api_key_env="NO_SUCH_KEY")

    def test_a_dialogue_that_is_refused_does_not_end_the_others(self, chat, serve):
        """As one that outgrows the served model's context: its turn is empty and cut off. If all are refused, the run ends."""
        first, second = self.ask(chat, serve(200, 400).url, max_concurrency=1)
        assert chat.decode(first.token_ids) == "Is it big?" and first.finished
        assert chat.decode(second.token_ids) == "" and not second.finished
        engine = EndpointEngine(chat, serve(*[400] * 20).url, "m", max_concurrency=1)
        with pytest.raises(EngineError, match=r"BadRequestError.* 9 requests were refused, 0 answered\. .*set max_context"):
            engine.generate([Request((3,), 12, messages=(Message("user", "Guess."),))] * 12)
        with pytest.raises(EngineError, match="AuthenticationError"):
            self.ask(chat, serve(401).url)

    def test_a_model_that_knows_the_newer_name_of_the_limit_alone_is_asked_by_it(self, chat, serve):
        refusal = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        server = serve((400, refusal))
        engine = EndpointEngine(chat, server.url, "m", max_concurrency=1, max_retries=0)
        request = Request((3,), 12, messages=(Message("user", "Guess."),))
        assert [chat.decode(a.token_ids) for a in engine.generate([request, request])] == ["Is it big?"] * 2
        assert [("max_tokens" in body, body.get("max_completion_tokens")) for body in server.asked] == [
            (True, None),
            (False, 12),
            (False, 12),
        ]

    def test_no_engine_waits_for_an_adapter_that_nobody_trains(self):
        config = small(ReActConfig()).language(lora={"rank": 4})
        assert config.engine_spec.lora is None and not config.engine_spec.merges_lora

    def test_wrong_keys_are_named(self):
        config = small(ReActConfig())
        with pytest.raises(ValueError, match="did you mean 'base_url'"):
            config.training(endpoint={"base_ur": "x", "model": "m"}).validate()
        with pytest.raises(ValueError, match="needs 'base_url'"):
            config.training(endpoint={"model": "m"}).validate()
        config.training(endpoint={"base_url": "x", "model": "m"}).env_runners(num_env_runners=2)
        with pytest.raises(ValueError, match="num_env_runners is 2 and must be 0 with an endpoint"):
            config.validate()
        config.env_runners(num_env_runners=0)
        assert isinstance(config.training(endpoint={"base_url": "x", "model": "m"}).make_chat(), Chat)


def test_dialogues_in_prompts_are_read_back(chat):
    """The helper that scripted players use reads what the chat template wrote."""
    messages = (Message("user", "Go."), Message("assistant", "a"), Message("user", "b"))
    assert dialogue_of(chat.tokenizer.decode(list(chat.prompt_ids(messages)))) == [("a", "b")]
