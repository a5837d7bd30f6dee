"""Structured answers: what an engine, an endpoint and an environment make of a form that is to be kept."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from chat_server import ChatServer
from scripted_engine import ScriptedEngine
from scripted_roles import SETTINGS, script, transition

import rllib_nlac.inputs.endpoint
from rllib_nlac import NLACConfig
from rllib_nlac.ablations import NextObservation
from rllib_nlac.activity import activity
from rllib_nlac.algorithm.model_defaults import defaults_for
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.baselines.rft import RFTConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.endpoint_engine import EndpointChat, EndpointEngine
from rllib_nlac.engine.vllm_structure import THINKING, register_thinking, why_not
from rllib_nlac.envs.guess_number import GuessNumber
from rllib_nlac.episode import action_form_at
from rllib_nlac.inputs.endpoint import WAYS, Endpoint
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.action_forms import THOUGHT, action_form
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import ActionForm, Message, Request, Weights

FORMS = load_prompts("default").forms
STRUCTURED = replace(
    SETTINGS, **{name: Sampling(24, structured=True) for name in ("action", "future", "backup", "critique", "refine")}
)


class TestWaves:
    def patterns(self, chat, compact, settings, **changes) -> dict[str, set[str | None]]:
        engine = ScriptedEngine(chat, script())
        stages = LanguageStages(engine, chat, lambda env: compact, settings)
        stages.run([replace(transition(1), **changes), replace(transition(2), **changes)])
        found: dict[str, set[str | None]] = {}
        for _, request in engine.requests:
            found.setdefault(request.role, set()).add(request.pattern)
        return found

    def test_the_critics_roles_ask_for_their_forms_and_no_other_role_does(self, chat, compact):
        found = self.patterns(chat, compact, STRUCTURED)
        future, critique = compact.forms.future.pattern(24), compact.forms.critique.pattern(24)
        assert found["future"] == found["next_future"] == found["target"] == {future}
        assert found["critique"] == {critique} and found["next_action"] == found["refinement"] == {None}

    def test_off_nobody_asks_for_a_form(self, chat, compact):
        assert set().union(*self.patterns(chat, compact, SETTINGS).values()) == {None}

    def test_an_answer_without_the_form_that_was_asked_for_is_counted(self, chat, compact):
        script_of = {"asked and kept": script(), "asked": script(future="Future: No. FAILURE?", evaluate="Optimal: maybe")}
        found = {}
        for name, says in script_of.items():
            _, _, report = LanguageStages(ScriptedEngine(chat, says), chat, lambda env: compact, STRUCTURED).run([transition()])
            found[name] = report.counts["unstructured"]
        free = LanguageStages(ScriptedEngine(chat, script_of["asked"]), chat, lambda env: compact, SETTINGS)
        assert found == {"asked and kept": 0, "asked": 3}  # d, d' and the critique
        assert free.run([transition()])[2].counts["unstructured"] == 0

    def test_an_action_keeps_the_form_of_the_state_in_which_it_is_taken(self, chat, compact):
        """Fails where a', which is taken in s', is held to what s offered."""
        forms = {"action_form": ActionForm("(?:a|b)"), "next_action_form": ActionForm("(?:c)")}
        found = self.patterns(chat, compact, STRUCTURED, **forms)
        assert found["next_action"] == {"(?:c)"} and found["refinement"] == {"(?:a|b)"}

    def test_a_composed_target_asks_nobody_and_is_trained_on(self, chat, compact):
        engine = ScriptedEngine(chat, script())
        stages = LanguageStages(engine, chat, lambda env: compact, replace(SETTINGS, backup_by="composed"))
        targets, _, report = stages.run([transition(1), replace(transition(2), terminated=True, episode_success=True)])
        assert "target" not in {request.role for _, request in engine.requests}
        form = compact.forms.future
        going_on, ended = targets
        later = form.parse(f"Future: {going_on.next_future}")
        expected = form.composed(going_on.transition.observation, later, later.success)
        assert chat.decode(going_on.generation.token_ids) == expected and going_on.generation.token_ids[-1] == chat.end_id
        assert going_on.future == form.parse(expected) and going_on.prompt_ids
        assert chat.decode(ended.generation.token_ids) == form.composed(ended.transition.observation, None, True)
        assert report.unparsed["target"] == 0
        assert "target" not in stages.answered_by and stages.answered_by["critique"] == SETTINGS.judge_weights

    def test_without_a_bootstrap_the_target_is_what_came_next_and_nothing_later(self, chat, compact):
        """Fails where the outcome of the whole episode, or a prediction, reaches the target of a world model."""
        engine = ScriptedEngine(chat, script())
        stages = LanguageStages(engine, chat, lambda env: compact, SETTINGS, variant=NextObservation.variant)
        won = [replace(transition(number), episode_success=True) for number in (1, 2)]
        targets, refinements, _ = stages.run([won[0], replace(won[1], terminated=True)])
        assert {request.role for _, request in engine.requests} == {"future", "critique", "refinement"}
        form = compact.forms.future
        expected = [form.composed(won[0].observation, None, False), form.composed(won[1].observation, None, True)]
        assert [chat.decode(target.generation.token_ids) for target in targets] == expected
        assert all(target.next_action is None and target.prompt_ids for target in targets)
        assert all(refinement.futures for refinement in refinements)  # its predictions are judged as NLAC's are


class TestConfiguration:
    def test_roles_are_structured_unless_the_model_was_taught_its_forms(self):
        assert NLACConfig().stage_settings.future.structured is False  # the shipped model
        other = NLACConfig().language(language_model="some/model")
        assert other.stage_settings.critique.structured and not other.stage_settings.action.structured
        assert other.roles(structured_answers=False).stage_settings.future.structured is False
        assert NLACConfig().roles(structured_answers=True).stage_settings.backup.structured is True

    @pytest.mark.parametrize("kind", [GRPOConfig, ScalarCriticConfig])
    def test_no_action_of_a_policy_gradient_is_structured(self, kind):
        config = kind().environment("TwentyQuestions").language(structured_actions=True)
        with pytest.raises(ValueError, match=r"structured_actions is True and must be False: .* policy's own distribution"):
            config.validate()

    @pytest.mark.parametrize("kind", [NLACConfig, RFTConfig, ReActConfig])
    def test_those_that_imitate_or_only_play_may(self, kind):
        config = kind().environment("TwentyQuestions").language(structured_actions=True)
        config.validate()
        assert config.action_sampling.structured

    def test_a_small_model_gets_small_prompts_and_a_large_one_the_default(self, model_path):
        own = defaults_for(model_path)
        assert own.prompts == "small"
        assert re.fullmatch(r"prompt set small: the model has \d+ million parameters, less than 3 billion", own.why)
        for name, prompts in (("Qwen/Qwen2.5-7B-Instruct", "default"), ("Qwen/Qwen2.5-1.5B-Instruct", "small")):
            assert NLACConfig().language(language_model=name).model_defaults.prompts == prompts
        unknown = defaults_for("nobody/knows")
        assert (unknown.prompts, unknown.why) == ("default", "prompt set default: nothing here says how large the model is")
        assert NLACConfig().model_defaults.prompts == "compact"

    def test_why_is_said_of_a_choice_alone(self, model_path):
        config = NLACConfig().language(language_model=model_path)
        assert config.model_defaults.why.startswith("prompt set small: ")
        assert config.language(prompts="default").model_defaults.why == "" and NLACConfig().model_defaults.why == ""

    def test_a_run_says_which_prompts_were_chosen(self, model_path, monkeypatch):
        said: list[str] = []
        for config in (NLACConfig().language(language_model=model_path), NLACConfig()):
            Watch(SimpleNamespace(config=config, _storage=None)).setup(lambda: said.append(activity.now.stage))
        assert said[0].startswith("loading the model, prompt set small: the model has") and said[1] == "loading the model"


class TestActionForms:
    @pytest.mark.parametrize(
        ("info", "matches", "not_"),
        [
            ({"action_choices": ["go north", "take (key)"]}, ["go north", "take (key)"], ["go", "take key", "go north "]),
            ({"action_pattern": r"click\(\d+\)"}, ["click(3)"], ["click(a)", "click(3) x"]),
        ],
    )
    def test_what_an_environment_offers(self, info, matches, not_):
        form = action_form(info, "plain")
        assert all(re.fullmatch(form.regex, text) for text in matches)
        assert not any(re.fullmatch(form.regex, text) for text in not_)
        thoughtful = action_form(info, "react").regex
        assert thoughtful.startswith(THOUGHT) and re.fullmatch(thoughtful, f"Thought: hm.\nAction: {matches[0]}")
        assert re.fullmatch(thoughtful, matches[0]) is None
        assert why_not(form.regex) is None

    def test_the_order_of_choices_makes_no_other_pattern(self):
        assert action_form({"action_choices": ["b", "a", "b"]}, "plain") == action_form({"action_choices": ("a", "b")}, "plain")

    @pytest.mark.parametrize(
        "info",
        [
            {"action_choices": "go"},
            {"action_choices": []},
            {"action_choices": ["a", 3]},
            {"action_choices": [""]},
            {"action_choices": [str(i) for i in range(2000)]},
            {"action_pattern": "("},
            {"action_pattern": 3},
            {"action_pattern": "a" * 30_000},
        ],
    )
    def test_what_is_no_form_is_refused_by_name(self, info):
        with pytest.raises(ValueError, match=r"^info\['action_(choices|pattern)'\] ") as raised:
            action_form(info, "plain")
        assert len(str(raised.value)) < 400

    @pytest.mark.parametrize("offers", [{"action_choices": ["1", "2"]}, {"action_choices": "1"}, {}])
    def test_a_runner_asks_for_it_keeps_it_and_counts_what_it_cannot_use(self, chat, config, monkeypatch, offers):
        class Offering(GuessNumber):
            def _info(self):
                return {**super()._info(), **offers}

        from rllib_nlac.envs import registry

        registry.register("Offering", Offering)
        config.env, config.env_config = "Offering", {"top": 4, "max_turns": 2}
        config.language(structured_actions=True)
        config.num_envs_per_env_runner = 2
        runner = TextEnvRunner(config=config, worker_index=0)
        engine = ScriptedEngine(chat, lambda prompt, weights: "9")
        runner.attach(engine)
        episodes = runner.sample(num_episodes=2)
        expected = "(?:1|2)" if isinstance(offers.get("action_choices"), list) else None
        assert {request.pattern for _, request in engine.requests} == {expected}
        for episode in episodes:
            form = action_form_at(episode, 0)
            assert form == (ActionForm(expected) if expected else None)
            step = transition_at("Offering", episode, 0)
            assert step.action_form == form and step.next_action_form == form
        refused = runner.get_metrics().get("action_forms_refused")
        assert (refused is not None and int(refused) > 0) is (offers.get("action_choices") == "1")


@pytest.mark.vllm
class TestVLLM:
    def ask(self, engine, chat, pattern, count: int = 8, **changes):
        prompt = chat.prompt_ids((Message("user", "Guess my object."),))
        requests = [
            Request(**{"prompt_ids": prompt, "max_tokens": 48, "seed": i, "pattern": pattern, "logprobs": False, **changes})
            for i in range(count)
        ]
        return engine.generate(requests)

    def test_a_model_that_says_something_else_is_held_to_the_form(self, engine, chat):
        form = FORMS.critique
        free = [form.parse(chat.said(g)) for g in self.ask(engine, chat, None)]
        held = self.ask(engine, chat, form.pattern(16))
        assert free == [None] * 8 and all(form.parse(chat.said(g)) for g in held)
        assert all(g.finished and g.token_ids[-1] in chat.end_ids for g in held)

    def test_the_same_seed_gives_the_same_and_neighbours_stay_free(self, engine, chat):
        pattern = FORMS.future.pattern(12)
        first, again = (self.ask(engine, chat, pattern, temperature=1.9) for _ in range(2))
        assert [g.token_ids for g in first] == [g.token_ids for g in again] and len({g.token_ids for g in first}) > 1
        prompt = chat.prompt_ids((Message("user", "Guess my object."),))
        mixed = [Request(prompt, 48, seed=i, pattern=pattern if i % 2 else None, logprobs=False) for i in range(8)]
        answers = engine.generate(mixed)
        alone = engine.generate([r for r in mixed if r.pattern is None])
        assert [g.token_ids for g in answers[::2]] == [g.token_ids for g in alone]

    def test_what_cannot_be_enforced_is_free_and_counted(self, engine, chat, caplog):
        before = engine.token_usage.num_unstructured
        answers = self.ask(engine, chat, "(?<=a)b", 2)
        assert len(answers) == 2 and engine.token_usage.num_unstructured == before + 2
        assert why_not("(?<=a)b") and why_not("a\x00") and why_not("(") and why_not("a|b") is None

    @pytest.mark.parametrize("name", ["default", "small", "compact"])
    def test_every_shipped_form_can_be_enforced(self, name):
        for env in (None, "GuessNumber", "MiniWoB", "ServiceDesk"):
            forms = load_prompts(name, env).forms
            assert why_not(forms.future.pattern(192)) is None and why_not(forms.critique.pattern(192)) is None


class TestThinking:
    """The form is enforced behind the answer's own reasoning, whatever stands in the dialogue before."""

    def parser(self):
        from vllm.reasoning import ReasoningParserManager

        vocabulary = {"<think>": 7, "</think>": 8}
        kind = ReasoningParserManager.get_reasoning_parser(register_thinking())
        return kind(SimpleNamespace(get_vocab=lambda: vocabulary))

    @pytest.mark.parametrize(
        ("prompt", "ended"),
        [
            ([1, 2, 3], False),
            ([1, 7, 5, 8, *[2] * 20], False),  # the reasoning of a former turn
            ([1, 2, 7], False),  # opened by the template
            ([1, 2, 7, 3, 8, 3], True),  # closed by the template: the model does not think
        ],
    )
    def test_a_former_turns_reasoning_is_not_the_answers(self, prompt, ended):
        assert self.parser().is_reasoning_end(prompt) is ended

    def test_it_ends_with_the_answers_own_mark(self):
        parser = self.parser()
        assert parser.is_reasoning_end_streaming([1, 2, 5, 8], [8]) and not parser.is_reasoning_end_streaming([1, 8, 5], [5])
        assert register_thinking() == THINKING

    @pytest.mark.parametrize(
        ("opening", "mentions", "thinks"),
        [
            ("<think>\n", "", True),
            ("<think>\n\n</think>\n\n", "", False),
            ("", "", False),
            ("", "{# enable_thinking #}", True),
        ],
    )
    def test_which_models_think_is_read_from_the_template(self, chat, opening, mentions, thinks):
        tokenizer = copy.deepcopy(chat.tokenizer)
        tokenizer.add_tokens(["<think>", "</think>"])
        written = opening.replace("\n", "{{ '\\n' }}")
        tokenizer.chat_template = f"{mentions}{tokenizer.chat_template}{{% if add_generation_prompt %}}{written}{{% endif %}}"
        assert Chat(tokenizer, chat.max_context).thinks is thinks and chat.thinks is False


class TestEndpoints:
    @pytest.fixture(autouse=True)
    def no_pauses(self, monkeypatch):
        monkeypatch.setattr(rllib_nlac.inputs.endpoint, "FIRST_PAUSE_S", 0.0)

    def ask(self, server, pattern="(?:a|b)"):
        endpoint = Endpoint(server.url, "m", max_retries=0)
        return endpoint, endpoint.ask([{"role": "user", "content": "x"}], pattern=pattern).text

    def test_the_form_goes_to_the_server_by_the_field_that_vllm_takes(self):
        server = ChatServer(say="a")
        endpoint, text = self.ask(server)
        assert text == "a" and server.asked[0]["structured_outputs"] == {"regex": "(?:a|b)"}
        assert endpoint.num_unstructured == 0 and "structured_outputs" not in self.asked_without(server)

    def asked_without(self, server):
        Endpoint(server.url, "m").ask([{"role": "user", "content": "x"}])
        return server.asked[-1]

    def test_a_server_that_refuses_it_is_asked_as_openais_is_and_then_without(self):
        refusal = (400, "Unrecognized request argument supplied: structured_outputs")
        server = ChatServer([refusal], say=json.dumps({"answer": "b"}))
        endpoint, text = self.ask(server)
        schema = server.asked[1]["response_format"]["json_schema"]["schema"]
        assert text == "b" and schema["properties"]["answer"]["pattern"] == "^(?:(?:a|b))$" and endpoint.num_unstructured == 0
        server = ChatServer([refusal, (400, "response_format is not supported")], say="c")
        endpoint, text = self.ask(server)
        assert text == "c" and endpoint.num_unstructured == 1 and WAYS[endpoint._way] == ""
        endpoint.ask([{"role": "user", "content": "x"}], pattern="(?:a|b)")
        assert not {"structured_outputs", "response_format"} & server.asked[-1].keys()  # it is not tried again

    def test_another_threads_refusal_meanwhile_skips_no_way(self):
        """Fails where a call counts up from the way that another call has found by then."""
        server = ChatServer(say=json.dumps({"answer": "b"}))
        endpoint = Endpoint(server.url, "m", max_retries=0)

        class Refusals(list):
            def pop(self, place):
                endpoint._way = 1
                return super().pop(place)

        server.behaviours = Refusals([(400, "Unrecognized request argument supplied: structured_outputs")])
        assert endpoint.ask([{"role": "user", "content": "x"}], pattern="(?:a|b)").text == "b"
        assert "response_format" in server.asked[1] and WAYS[endpoint._way] == "response_format"

    def test_another_refusal_is_no_reason_to_give_the_form_up(self):
        server = ChatServer([(400, "context length exceeded")], say="a")
        with pytest.raises(rllib_nlac.inputs.endpoint.RequestRefusedError, match="context length"):
            self.ask(server)
        assert len(server.asked) == 1

    def test_a_server_that_ignores_it_is_counted_by_the_engine(self, chat):
        server = ChatServer(say="something else")
        own = EndpointChat(chat)
        engine = EndpointEngine(own, server.url, "m")
        ask = Request((1,), 8, messages=(Message("user", "x"),), pattern="(?:a|b)", weights=Weights.POLICY)
        answers = engine.generate([ask, replace(ask, pattern=None)])
        assert [own.said(g) for g in answers] == ["something else"] * 2 and engine.token_usage.num_unstructured == 1
        engine.stop()
