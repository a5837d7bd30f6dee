"""What the untrained model said: what is kept of it, what is trained on, and what an evaluation makes of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from scripted_roles import SETTINGS, role_of, script, transition

from rllib_nlac import NLACConfig
from rllib_nlac.algorithm import algorithm
from rllib_nlac.algorithm.rehearsal import (
    BaseAnswer,
    BaseAnswers,
    Recorder,
    RehearsalSettings,
    ask_base,
    divided,
    read_prompts,
    retention,
    wanted_parts,
    with_rehearsal,
)
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.baselines.rft import RFTConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.learner.batch import CRITIC, POLICY, REHEARSAL, TrainingSequence, to_multi_agent_batch
from rllib_nlac.types import Generation, Request, Weights

KEPT = [BaseAnswer((3, 10 + i), (20 + i, 1), -1.0) for i in range(7)]


def own(sizes: list[int]) -> list[TrainingSequence]:
    return [TrainingSequence((3,), (9, 1), i % 2, i, step, 0.5) for step, size in enumerate(sizes) for i in range(size)]


class TestShare:
    @given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.floats(0.01, 0.9), st.floats(0.1, 3.0))
    def test_of_each_gradient_step_and_of_its_loss(self, sizes, fraction, weight):
        """Fails where the share is of the own sequences alone, or of the batch, or the weight is that of each."""
        settings = RehearsalSettings(fraction=fraction, weight=weight)
        given_ = own(sizes)
        found = with_rehearsal(given_, KEPT, settings, (0, 3))
        assert found[: len(given_)] == given_
        for step, size in enumerate(sizes):
            added = [s for s in found if s.minibatch == step and s.role == REHEARSAL]
            exact = fraction * size / (1 - fraction)
            assert len(added) == pytest.approx(max(exact, 1), abs=0.5 + 1e-9) and len(added) >= 1
            assert sum(s.weight for s in added) == pytest.approx(weight)
        rehearsed = Counter(s.prompt_ids for s in found if s.role == REHEARSAL)
        counts = [rehearsed[each.prompt_ids] for each in KEPT]
        assert max(counts) - min(counts) <= 1

    def test_a_tenth_of_a_step_of_90_is_10_of_100(self):
        assert RehearsalSettings(fraction=0.1).count_beside(90) == 10

    def test_the_order_follows_the_seed_alone(self):
        orders = [[s.prompt_ids for s in with_rehearsal(own([50]), KEPT, RehearsalSettings(), (0, v))] for v in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2]

    @given(st.integers(0, 40), st.integers(1, 20), st.integers(1, 20))
    def test_parts_share_nothing_and_have_their_shares(self, count, one, other):
        answers = [BaseAnswer((i,), (1,), 0.0) for i in range(count)]
        parts = divided(answers, (one, other), 0)
        both = [each for part in parts for each in part]
        assert len(set(both)) == len(both) == min(count, one + other)
        if count >= one + other:
            assert [len(part) for part in parts] == [one, other]
        else:
            assert len(parts[0]) == pytest.approx(count * one / (one + other), abs=1)


def test_every_iteration_rehearses_others_and_a_repeated_one_the_same(monkeypatch):
    """Fails where the first few of the answers are rehearsed in every iteration, and the rest never."""
    run = algorithm.LanguageAlgorithm.__new__(algorithm.LanguageAlgorithm)
    run.config = SimpleNamespace(rehearsal_settings=RehearsalSettings(fraction=0.5), seed=0, num_learners=0)
    run.base_answers = BaseAnswers(rehearsal=tuple(BaseAnswer((i,), (1,), 0.0) for i in range(64)))
    run.learner_group = SimpleNamespace(is_local=True)
    run.metrics = SimpleNamespace(log_value=lambda *_, **__: None)
    run._with_learners = lambda work, **_: work()
    rehearsed: list[frozenset] = []

    class Enough(Exception):
        pass

    def stop(shares, env_steps):
        rehearsed.append(frozenset(s.prompt_ids for s in shares if s.role == REHEARSAL))
        raise Enough

    monkeypatch.setattr(algorithm, "to_multi_agent_batch", stop)
    for run.weight_version in (1, 2, 1):
        with pytest.raises(Enough):
            run.learn([TrainingSequence((9,), (9,), POLICY, i, 0, 1.0) for i in range(8)])
    assert rehearsed[0] == rehearsed[2] != rehearsed[1] and len(rehearsed[0]) == 8


class TestLoss:
    def test_it_is_the_mean_negative_log_likelihood_and_knows_no_base(self, make_learner):
        """Fails where a rehearsed answer is drawn to the base a second time, or takes the critic's or the policy's place."""
        learner = make_learner(lr=1e-2, kl_to_base_coeff=5.0)
        sequences = [TrainingSequence((3, 10, 11), (20, 21, 1), POLICY, 0, 0, 1.0)]
        learner.update(batch=to_multi_agent_batch(sequences, 1), timesteps={"num_env_steps_sampled_lifetime": 0})
        rows = [
            TrainingSequence((3, 10), (20, 1), REHEARSAL, 0, 0, 1.0),
            TrainingSequence((3, 10), (20, 1), POLICY, 0, 0, 1.0),
            TrainingSequence((3, 10), (20, 1), CRITIC, 0, 0, 1.0),
        ]
        batch = {n: torch.as_tensor(c) for n, c in to_multi_agent_batch(rows, 1)["default_policy"].items()}
        losses, kl = learner._sequence_losses(batch)
        expected = -learner.logprobs_of([(3, 10)], [(20, 1)])[0].mean()
        assert losses.tolist() == pytest.approx([expected] * 3, rel=1e-5)
        rehearsed, policy, critic = kl.tolist()
        assert rehearsed == critic == 0 and policy > 0.01

    def test_a_steps_gradient_is_weighted_as_said(self, make_learner):
        """One step on a rehearsed answer of weight w is one on a critic's sequence of weight w."""
        after = []
        for role in (REHEARSAL, CRITIC):
            learner = make_learner(lr=1e-3)
            sequences = [
                TrainingSequence((3, 10, 11), (20, 21, 1), POLICY, 0, 0, 1.0),
                TrainingSequence((3, 12), (22, 1), role, 0, 0, 0.25),
            ]
            learner.update(batch=to_multi_agent_batch(sequences, 1), timesteps={"num_env_steps_sampled_lifetime": 0})
            after.append(learner.export_weights()[Weights.POLICY])
        assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])

    def test_texts_in_batches_are_as_likely_as_one_by_one(self, make_learner):
        """Fails where padding counts, or a row of a group takes another's place."""
        learner = make_learner(max_tokens_per_micro_batch=12)
        prompts, answers = [(3, 10, 11), (3,), (3, 12, 13, 14), (5, 6)], [(20, 1), (21, 22, 23, 1), (24, 1), (25, 26, 1)]
        together = learner.logprobs_of(prompts, answers)
        one_by_one = [learner.logprobs_of([prompt], [answer])[0] for prompt, answer in zip(prompts, answers, strict=True)]
        assert [len(found) for found in together] == [len(answer) for answer in answers]
        np.testing.assert_allclose(np.concatenate(together), np.concatenate(one_by_one), rtol=1e-5)


class TestAnswers:
    def test_the_untrained_model_speaks_in_all_roles_at_temperature_1(self, chat, compact):
        """Fails where the weights or the temperature of a role in training are taken, or a role is left out."""
        engine = ScriptedEngine(chat, script())
        settings = replace(SETTINGS, action=Sampling(24, 0.5, 0.9), critique=Sampling(24, 0.0))
        stages = LanguageStages(engine, chat, lambda env: compact, settings)
        before = stages.rng.bit_generator.state
        config = (
            NLACConfig().environment("TwentyQuestions").training(rehearsal={"fraction": 0.1, "num_answers": 30, "held_out": 10})
        )
        config.evaluation(evaluation_interval=1)
        turns = [transition(i, action=f"Is it {i}?") for i in range(40)]
        wanted = wanted_parts(config, BaseAnswers())
        assert [part.name for part in wanted] == ["rehearsal", "retention"]
        kept = ask_base(BaseAnswers(), wanted, turns, engine, Weights.INITIAL, chat, config, stages)
        assert len(kept.rehearsal) == 30 and len(kept.retention) == 10
        prompts = [each.prompt_ids for each in (*kept.rehearsal, *kept.retention)]
        assert len(set(prompts)) == 40
        roles = {role_of(engine.text(request)) for _, request in engine.requests}
        assert roles >= {"a'", "d", "critique", "y", "a_r"} and roles >= {role_of(chat.tokenizer.decode(p)) for p in prompts}
        assert {weights for weights, _ in engine.requests} == {Weights.INITIAL}
        assert all(r.temperature == r.top_p == 1.0 and r.logprobs for _, r in engine.requests)
        assert stages.rng.bit_generator.state == before and stages.engine is engine
        again = ask_base(BaseAnswers(), wanted, turns, engine, Weights.INITIAL, chat, config, stages)
        assert again == kept and not wanted_parts(config, kept)

    def test_logged_turns_are_spoken_of_whatever_follows_them(self, chat, compact):
        """As with several steps a target. Fails where the waves follow the chains, which are not equally long."""
        stages = LanguageStages(ScriptedEngine(chat, script()), chat, lambda env: compact, SETTINGS)
        config = NLACConfig().environment("TwentyQuestions").training(rehearsal={"fraction": 0.1, "num_answers": 9})
        plain = [transition(i, action=f"Is it {i}?") for i in range(6)]
        later = [transition(10 + i) for i in range(2)]
        chained = [replace(turn, following=tuple(later[: i % 3])) for i, turn in enumerate(plain)]
        kept = []
        for turns in (plain, chained):
            wanted = wanted_parts(config, BaseAnswers())
            kept.append(ask_base(BaseAnswers(), wanted, turns, stages.engine, Weights.INITIAL, chat, config, stages))
        assert kept[0] == kept[1] and len(kept[0].rehearsal) == 9

    def test_without_a_critic_in_words_the_policy_speaks_in_one_call(self, chat):
        engine = ScriptedEngine(chat, script())
        config = RFTConfig().environment("TwentyQuestions").training(rehearsal={"fraction": 0.1, "num_answers": 5})
        turns = [transition(i) for i in range(9)]
        wanted = wanted_parts(config, BaseAnswers())
        kept = ask_base(BaseAnswers(), wanted, turns, engine, Weights.POLICY, chat, config, None)
        assert len(engine.calls) == 1 and kept.retention is None
        assert [each.prompt_ids for each in kept.rehearsal] == [chat.prompt_ids(turns[0].state)]  # they are all the same

    def test_a_users_prompts_are_answered_in_one_call_and_divided(self, chat, tmp_path):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"Is {i} even?"}) + "\n" for i in range(20)))
        engine = ScriptedEngine(chat, lambda prompt, weights: "Yes.")
        config = (
            RFTConfig()
            .environment("TwentyQuestions")
            .training(rehearsal={"fraction": 0.1, "num_answers": 6, "held_out": 4, "prompts": str(file)})
        )
        config.evaluation(evaluation_interval=1)
        kept = ask_base(BaseAnswers(), wanted_parts(config, BaseAnswers()), [], engine, Weights.POLICY, chat, config, None)
        assert len(engine.calls) == 1 and len(kept.rehearsal) == 6 and len(kept.retention) == 4
        texts = {chat.tokenizer.decode(list(each.prompt_ids)) for each in (*kept.rehearsal, *kept.retention)}
        assert len(texts) == 10 and all("even" in text for text in texts)

    def test_of_what_is_kept_already_nothing_is_held_out_anew(self, chat, tmp_path):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"Is {i} even?"}) + "\n" for i in range(8)))
        engine = ScriptedEngine(chat, lambda prompt, weights: "Yes.")
        config = (
            RFTConfig()
            .environment("TwentyQuestions")
            .training(rehearsal={"fraction": 0.1, "num_answers": 4, "held_out": 8, "prompts": str(file)})
        )
        kept = ask_base(BaseAnswers(), wanted_parts(config, BaseAnswers()), [], engine, Weights.POLICY, chat, config, None)
        config.evaluation(evaluation_interval=1)
        later = ask_base(kept, wanted_parts(config, kept), [], engine, Weights.INITIAL, chat, config, None)
        assert later.rehearsal == kept.rehearsal and len(later.retention) == 4
        assert not {each.prompt_ids for each in later.rehearsal} & {each.prompt_ids for each in later.retention}

    def test_an_answers_probability_is_that_of_all_its_tokens(self):
        class Engine:
            def generate(self, requests):
                return [
                    Generation(r.prompt_ids, ids, np.full(len(ids), -0.5, np.float32), True, 0)
                    for r, ids in zip(requests, ((7, 8, 1), ()), strict=True)
                ]

        recorder = Recorder(Engine(), Weights.INITIAL)
        recorder.generate([Request((3,), 4, 0.0), Request((4,), 4)])
        assert list(recorder.answers.values()) == [BaseAnswer((3,), (7, 8, 1), -1.5)]  # an empty answer teaches nothing


def test_the_figures_of_an_evaluation_are_per_token(monkeypatch):
    learner = SimpleNamespace(logprobs_of=lambda prompts, answers: [np.array([-0.5, -2.0, -0.5]), np.array([-1.0])])
    group = SimpleNamespace(is_local=True, _learner=learner)
    kept = [BaseAnswer((3,), (7, 8, 1), -1.5), BaseAnswer((4,), (1,), -0.5)]
    assert retention(group, kept) == {"loss": 1.0, "loss_of_base": 0.5, "num_tokens": 4.0}


class TestConfig:
    @pytest.mark.parametrize("cls", [GRPOConfig, ScalarCriticConfig, ReActConfig])
    def test_a_policy_gradient_has_nothing_to_rehearse_beside(self, cls):
        with pytest.raises(
            ValueError, match=r"config.rehearsal is \{'fraction': 0.1\} and needs an algorithm that imitates texts"
        ):
            cls().environment("TwentyQuestions").training(rehearsal={"fraction": 0.1}).validate()

    @pytest.mark.parametrize(
        ("given_", "complaint"),
        [
            ({"fraction": -0.1}, r"config.rehearsal\['fraction'\] is -0.1 and must be between 0 and 0.9"),
            ({"fraction": 1.0}, r"config.rehearsal\['fraction'\] is 1.0"),
            ({"weight": -1}, r"config.rehearsal\['weight'\] is -1"),
            ({"num_answers": 2.5}, r"config.rehearsal\['num_answers'\] is 2.5 and must be a whole number"),
            ({"fractoin": 0.1}, "config.rehearsal: unknown key 'fractoin'; did you mean 'fraction'?"),
            (
                {"prompts": "nowhere.jsonl"},
                r"config.rehearsal\['prompts'\] is 'nowhere.jsonl', from which no prompts can be read: no file matches",
            ),
            ("a lot", "config.rehearsal is 'a lot' and must be a mapping"),
        ],
    )
    def test_bad_values_are_refused_by_their_key(self, given_, complaint):
        with pytest.raises(ValueError, match=complaint):
            NLACConfig().environment("TwentyQuestions").training(rehearsal=given_).validate()

    @pytest.mark.parametrize(
        ("line", "complaint"),
        [
            ("", "no row, so no prompt"),
            ('{"prompt": 3}', "line 1: give 'prompt', a text, or 'messages'"),
            ('{"prompt": "hi"}\n{"messages": [{"role": "tool", "content": "x"}]}', "line 2: give 'prompt'"),
            ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last of 'messages' must be the user's"),
            ('{"messages": []}', "the last of 'messages' must be the user's"),
            ("no json", "line 1"),
        ],
    )
    def test_a_users_file_is_read_before_anything_starts(self, tmp_path, line, complaint):
        file = tmp_path / "prompts.jsonl"
        file.write_text(line)
        config = NLACConfig().environment("TwentyQuestions").training(rehearsal={"prompts": str(file)})
        with pytest.raises(
            ValueError, match=rf"config.rehearsal\['prompts'\] is .*, from which no prompts can be read.*{complaint}"
        ):
            config.validate()

    def test_texts_of_a_users_file_are_made_readable(self, tmp_path):
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "a\\u0000b"}\n')
        assert read_prompts(str(file))[0][0].content == "a\ufffdb"


@pytest.fixture()
def small(config):
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=48, minibatch_size=24)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=8,
        evaluation_critic={"states": 0, "fixed_states": 0},
        evaluation_repeats={"tasks": 0},
    )
    config.num_envs_per_env_runner = 16
    return config


def parts(result: dict) -> dict[str, float]:
    """The parts of the loss that a result speaks of."""
    return {key: value for key, value in result["learners"]["default_policy"].items() if key.endswith("_loss")}


class TestRun:
    def test_where_nothing_is_learned_the_loss_is_the_bases(self, small, ray_session, lent_engine):
        """Fails where engine and learner mean another temperature, or other weights."""
        algorithm = small.training(lr=0.0).build_algo()
        figures = algorithm.train()["evaluation"]["retention"]
        algorithm.stop()
        assert figures["num_tokens"] > 40 and figures["loss"] == pytest.approx(figures["loss_of_base"], abs=1e-5)

    def test_it_resumes_exactly_and_forgets_less(self, small, ray_session, lent_engine, tmp_path):
        """Fails where the answers or their order are not those of the checkpoint."""
        losses = {}
        for name, rehearsal in (("without", {"held_out": 40}), ("with", {"fraction": 0.3, "weight": 2.0, "held_out": 40})):
            algorithm = small.copy(copy_frozen=False).training(rehearsal=rehearsal, lr=3e-3).build_algo()
            algorithm.train()
            path = algorithm.save_to_path(str(tmp_path / name))
            result = algorithm.train()
            kept, learned, figures = algorithm.base_answers, parts(result), result["evaluation"]["retention"]
            algorithm.stop()
            assert ("rehearsal_loss" in learned) == ("fraction" in rehearsal)
            losses[name] = figures["loss"] - figures["loss_of_base"]
        assert 0 < losses["with"] < losses["without"]
        again = small.copy(copy_frozen=False).training(rehearsal=rehearsal, lr=3e-3).build_algo()
        again.restore_from_path(path)
        assert again.base_answers == kept
        resumed = again.train()
        again.stop()
        assert parts(resumed) == learned and resumed["evaluation"]["retention"] == figures

    def test_learned_weights_are_never_taken_for_untrained_ones(self, small):
        from rllib_nlac.nlac import NLAC

        algorithm = NLAC.__new__(NLAC)
        algorithm.config, algorithm.weight_version = small.training(rehearsal={"fraction": 0.1}), 5
        with pytest.raises(ValueError, match=r"config.rehearsal is new to this checkpoint"):
            algorithm.remember_base(lambda: [transition()])
        algorithm.config = small.training(rehearsal={})
        algorithm.remember_base(lambda: [transition()])
        assert algorithm.base_answers.retention == ()
