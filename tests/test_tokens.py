"""What each role cost in tokens: the results say what the engines counted, all of it and nothing twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scripted_engine import ScriptedEngine, last_message
from scripted_roles import SETTINGS, script, transition

from rllib_nlac.ablations import FreshActions
from rllib_nlac.diagnostics.examination import Examiner
from rllib_nlac.diagnostics.token_usage import IterationTokens
from rllib_nlac.engine.actor import EngineActor
from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.engine.token_usage import Tokens, TokenUsage
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.sampling.refining import RefiningPolicy
from rllib_nlac.types import Generation, Message, Request


def answered(request: Request, size: int) -> Generation:
    return Generation(request.prompt_ids, tuple(range(size)), np.zeros(0, np.float32), True, 0)


class TestRoles:
    """Every request says what it is for."""

    @pytest.fixture()
    def asked(self, chat, compact):
        """The roles of two transitions' requests, by what their prompts ask for."""

        def asked(variant=NLAC_AS_IT_IS, **settings) -> dict[str, Counter]:
            engine = ScriptedEngine(chat, script())
            stages = LanguageStages(engine, chat, lambda env: compact, replace(SETTINGS, **settings), 0, variant)
            stages.run([transition(1), transition(2)])
            found: dict[str, Counter] = {}
            for _, request in engine.requests:
                kind = last_message(engine.text(request)).split(maxsplit=1)[0].rstrip(".\n")
                found.setdefault(request.role, Counter())[kind] += 1
            return found

        return asked

    def test_of_the_paper(self, asked):
        assert asked() == {
            "next_action": {"No": 2},  # the prompt ends with the environment's reply
            "next_future": {"Predict": 2},
            "target": {"Backup": 2},
            "future": {"Predict": 2},
            "critique": {"Evaluate": 2},
            "refinement": {"Refine": 2},
        }

    def test_what_only_verifies_and_what_only_chooses_a_next_action_has_names_of_its_own(self, asked):
        found = asked(num_next_actions=3, num_futures=2, rejected_weight=0.5)
        assert found["next_action"] == {"No": 6} and found["next_critique"] == {"Evaluate": 6}
        assert found["future"] == {"Predict": 4} and found["critique"] == {"Evaluate": 2}
        assert found["verification"] == {"Predict": 4, "Evaluate": 2}  # of the refined action, k futures again
        # A second round judges in order to refine: that is no verification.
        again = asked(num_refinements=2)
        assert again["critique"] == {"Evaluate": 4} and again["future"] == {"Predict": 4} and "verification" not in again

    def test_an_ablations_own(self, asked):
        assert asked(FreshActions.variant)["fresh_action"].total() == 2

    def test_what_is_asked_for_another_purpose_counts_as_that(self, chat, compact):
        """An evaluation asks in all roles."""
        engine = ScriptedEngine(chat, script())
        stages = LanguageStages(engine, chat, lambda env: compact, SETTINGS)
        examiner = Examiner(stages, "TwentyQuestions", 0, 2)
        examiner.predict([transition(1)])
        examiner.refine([transition(1)])
        assert {request.role for _, request in engine.requests} == {"evaluation_critic"} and stages.purpose is None
        engine.requests.clear()
        refining = RefiningPolicy(engine, chat, lambda env: compact, SETTINGS)
        prompt = (Message("user", "Guess my object."),)
        refining.submit([Request(chat.prompt_ids(prompt), 24, messages=prompt, role="evaluation")])
        refining.poll()
        assert [request.role for _, request in engine.requests] == ["evaluation"] * 4


class TestIterationTokens:
    def test_each_reading_tells_what_came_since_the_last(self, chat):
        engine = ScriptedEngine(chat, script())
        usage = IterationTokens(engine)
        ask = Request((1, 2, 3), 8, role="future")
        engine.token_usage.book(ask, answered(ask, 4))
        engine.token_usage.book(ask, replace(answered(ask, 1), cached_tokens=2))
        expected = {"tokens": {"future": 5}, "prompt_tokens": {"future": 6}, "cached_tokens": {"future": 2}}
        assert usage.since_last() == expected
        other = replace(ask, role="play", prompt_ids=(1,))
        engine.token_usage.book(other, answered(other, 2))
        assert usage.since_last() == {
            "tokens": {"future": 0, "play": 2},
            "prompt_tokens": {"future": 0, "play": 1},
            "cached_tokens": {"future": 0, "play": 0},
        }

    def test_of_several_engines_one_that_started_again_counts_from_its_start(self):
        class Engines(RemoteEngines):
            def __init__(self, *readings) -> None:
                self.readings = iter(readings)

            def tokens_so_far(self):
                return next(self.readings)

        usage = IterationTokens(
            Engines(
                [],
                [{"play": Tokens(10, 5, 9)}, {"play": Tokens(8, 4)}],
                [],  # one did not answer
                [{"play": Tokens(12, 6, 10)}, {"play": Tokens(3, 1), "future": Tokens(2, 2)}],
            )
        )
        assert usage.since_last() == {"tokens": {"play": 9}, "prompt_tokens": {"play": 18}, "cached_tokens": {"play": 9}}
        assert usage.since_last() == {}
        assert usage.since_last() == {
            "tokens": {"future": 2, "play": 1 + 1},
            "prompt_tokens": {"future": 2, "play": 2 + 3},
            "cached_tokens": {"future": 0, "play": 1},
        }

    def test_one_that_started_again_is_known_by_any_role(self, monkeypatch):
        """Though it has answered more in all since then."""
        readings = iter([[], [{"play": Tokens(6, 6)}], [{"future": Tokens(9, 8)}]])
        monkeypatch.setattr(RemoteEngines, "tokens_so_far", lambda self: next(readings))
        usage = IterationTokens(RemoteEngines([], 1.0))
        usage.since_last()
        found = usage.since_last()
        assert (found["tokens"], found["prompt_tokens"]) == ({"future": 8, "play": 0}, {"future": 9, "play": 0})

    def test_an_actor_tells_what_its_engine_counts(self):
        class Engine:
            mixes_sets = True

            def __init__(self) -> None:
                self.token_usage = TokenUsage()

            def submit(self, requests):
                for request in requests:
                    self.token_usage.book(request, answered(request, 2))
                self.done = list(enumerate(answered(request, 2) for request in requests))
                return [ticket for ticket, _ in self.done]

            def poll(self, patience_s=None):
                return self.done

        actor = EngineActor(Engine)
        actor.generate([Request((1, 2), 4, role="target")] * 3, {})
        assert actor.tokens_so_far() == {"target": Tokens(6, 6)}


class Counted:
    """What vLLM hands out, counted where it leaves it."""

    def __init__(self, engine) -> None:
        self.generated = self.prompts = 0
        self._step, engine._llm.step = engine._llm.step, self.step

    def step(self):
        outputs = self._step()
        for output in outputs:
            if output.finished:
                self.generated += len(output.outputs[0].token_ids)
                self.prompts += len(output.prompt_token_ids)
        return outputs

    def taken(self) -> tuple[int, int]:
        taken, self.generated, self.prompts = (self.generated, self.prompts), 0, 0
        return taken


def test_a_run_says_what_the_engine_counted(config, ray_session, lent_engine):
    """The whole of an iteration: episodes, waves, and evaluation with all that it asks."""
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=24, minibatch_size=12, preset="long_horizon")
    config.evaluation(
        evaluation_interval=2,
        evaluation_duration=8,
        evaluation_repeats={"tasks": 4, "attempts": 2},
        evaluation_critic={"states": 8, "branches": 1, "fixed_states": 2},
    )
    config.num_envs_per_env_runner = 8
    algorithm = config.build_algo()
    counted = Counted(algorithm.engine)
    try:
        results = []
        for _ in range(3):
            results.append((algorithm.train(), counted.taken()))
    finally:
        algorithm.engine._llm.step = counted._step
        algorithm.stop()
    for result, (generated, prompts) in results:
        assert (sum(result["tokens"].values()), sum(result["prompt_tokens"].values())) == (generated, prompts)
        assert result["tokens"].keys() == result["prompt_tokens"].keys() == result["cached_tokens"].keys()
        assert all(cached <= result["prompt_tokens"][role] for role, cached in result["cached_tokens"].items())
    first, second, third = (result for result, _ in results)
    waves = {"next_action", "next_future", "next_critique", "target", "future", "critique", "refinement", "verification"}
    assert {role for role, tokens in first["tokens"].items() if tokens} == {"play", "evaluation", "evaluation_critic", *waves}
    assert {role for role, tokens in second["tokens"].items() if tokens} == {"play", "evaluation", "evaluation_critic", *waves}
    assert third["tokens"]["evaluation"] == 0
    for result, _ in results:  # what other figures say of parts of it
        assert result["tokens"]["play"] == result["env_runners"]["num_generated_tokens"]
        assert sum(result["tokens"][role] for role in waves) == result["language_stages"]["num_generated_tokens"]
