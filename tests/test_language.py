"""Prompts and parsers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_roles import SETTINGS

from rllib_nlac.engine.chat import Prompt
from rllib_nlac.language.backup_stage import backup_stage
from rllib_nlac.language.forms import CritiqueForm, FutureForm
from rllib_nlac.language.improvement_stage import improvement_stage
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.prediction import prediction_stage
from rllib_nlac.language.prompts import load_prompts, resolved_prompts
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling
from rllib_nlac.types import Future, Generation, Message, Transition, Weights

parse_future, parse_critique = FutureForm().parse, CritiqueForm().parse

STATE = (Message("user", "Guess my object."),)


def transition(ended: bool = False, **changes) -> Transition:
    fields = {
        "id": 1,
        "env": "TwentyQuestions",
        "state": STATE,
        "action": "Is it big?",
        "observation": "No.",
        "reward": 0.0,
        "generation": Generation((1,), (2,), np.zeros(1, np.float32), True, 0),
        "terminated": ended,
        "truncated": False,
        "episode_success": False,
        "returns_to_go": 0.0,
    }
    return Transition(**{**fields, **changes})


@pytest.mark.parametrize("name", ["default", "compact"])
class TestEveryPromptSet:
    def test_each_role_shares_the_policys_prefix(self, name):
        prompts = load_prompts(name, "TwentyQuestions")
        asked = [
            prompts.predict_messages(STATE, "A"),
            prompts.backup_messages(transition(action="A"), "d"),
            prompts.evaluate_messages(STATE, "A", [Future("f", True)]),
            prompts.refine_messages(STATE, "A", "c"),
        ]
        for messages in asked:
            assert messages[: len(STATE) + 1] == (*STATE, Message("assistant", "A")) and messages[-1].role == "user"

    def test_predict_shows_nothing_of_what_came_next(self, name):
        """Neither where it is asked, in the stages and in an evaluation, nor where it is trained."""
        prompts = load_prompts(name, "TwentyQuestions")
        known = transition(ended=True, observation="OBSERVED")
        assert "OBSERVED" in str(known.next_state) and "OBSERVED" in str(prompts.backup_messages(known, None))
        evaluating = next(prediction_stage([known], [prompts], Sampling(8), 1, Weights.POLICY))
        improving = next(improvement_stage([known], [prompts], SETTINGS, None, StageReport(), np.random.default_rng(0)))
        trained = []
        chat = SimpleNamespace(prompts=lambda wanted: trained.extend(w.messages for w in wanted) or [Prompt((1,), False)])
        backing_up = backup_stage([known], [prompts], SETTINGS, chat, StageReport())
        for answers in (None, [None], [None]):  # after the end there is neither an action nor a future
            asked = backing_up.send(answers)
        with pytest.raises(StopIteration):
            backing_up.send([(known.generation, "Future: won SUCCESS")])
        shown = prompts.forms.future.shown
        expected = (*STATE, Message("assistant", known.action), Message("user", prompts.predict.format(future_form=shown)))
        assert {*evaluating.prompts, *improving.prompts} == {expected} and trained == [expected]
        assert asked.role == "target" and "OBSERVED" in str(asked.prompts)

    def test_backup_shows_reply_reward_and_next_future(self, name):
        prompts = load_prompts(name, "TwentyQuestions")
        text = prompts.backup_messages(transition(observation="OBSERVED", reward=0.25), "NEXT FUTURE")[-1].content
        assert "OBSERVED" in text and "0.25" in text and "NEXT FUTURE" in text

    def test_backup_of_an_end_has_no_next_future(self, name):
        prompts = load_prompts(name, "TwentyQuestions")
        going_on = prompts.backup_messages(transition(), "d")[-1].content
        ended = prompts.backup_messages(transition(ended=True), None)[-1].content
        assert ended != going_on and "None" not in ended

    def test_every_future_is_in_the_evaluators_prompt(self, name):
        prompts = load_prompts(name, "TwentyQuestions")
        futures = [Future(f"future number {i}", True) for i in range(7)]
        text = prompts.evaluate_messages(STATE, "A", futures)[-1].content
        assert all(future.text in text for future in futures)

    @pytest.mark.parametrize("odd", ["{braces}", "{0}", "%s", "{{x}}", "\\n"])
    def test_texts_with_braces_pass_through(self, name, odd):
        prompts = load_prompts(name, "TwentyQuestions")
        assert odd in prompts.backup_messages(transition(observation=odd), odd)[-1].content
        assert odd in prompts.refine_messages(STATE, "A", odd)[-1].content


def test_a_brace_that_is_written_twice_is_read_once_in_every_role():
    """Fails where one role's text is not formatted: its reader would see both."""
    doubled = {role: f"{{{{json}}}} {getattr(load_prompts('default'), role)}" for role in ("predict", "evaluate", "refine")}
    prompts = load_prompts({"extends": "default", **doubled})
    asked = (
        prompts.predict_messages(STATE, "A"),
        prompts.evaluate_messages(STATE, "A", [Future("f", True)]),
        prompts.refine_messages(STATE, "A", "c"),
    )
    assert all(messages[-1].content.startswith("{json} ") for messages in asked)


def test_environment_overrides_change_one_environment_only():
    assert load_prompts("default", "TwentyQuestions").predict != load_prompts("default", "Other").predict
    assert load_prompts("default", "TwentyQuestions").backup == load_prompts("default", "Other").backup


class TestExtends:
    def test_a_role_that_is_set_is_set_in_every_environment(self):
        """Fails where the base's own text for an environment hides the user's."""
        mine = {"extends": "default", "name": "mine", "predict": "Mine."}
        for env in ("TwentyQuestions", "ServiceDesk", None):
            assert load_prompts(mine, env).predict == "Mine."
            assert load_prompts(resolved_prompts(mine), env) == load_prompts(mine, env)  # as a checkpoint keeps it
        assert load_prompts(mine, "ServiceDesk").evaluate == load_prompts("default", "ServiceDesk").evaluate

    def test_what_is_set_of_one_environment_leaves_the_rest_of_it(self):
        """Fails where the mapping's ``environments`` replace the base's."""
        mine = {"extends": "default", "environments": {"ServiceDesk": {"predict": "Mine."}}}
        found, base = load_prompts(mine, "ServiceDesk"), load_prompts("default", "ServiceDesk")
        assert (found.predict, found.evaluate) == ("Mine.", base.evaluate) and base.predict != "Mine."
        assert load_prompts(mine, "TwentyQuestions") == load_prompts("default", "TwentyQuestions")

    def test_a_path_starts_where_the_file_stands(self, tmp_path):
        (tmp_path / "base.yaml").write_text("extends: compact\nname: base\npredict: Base.")
        (tmp_path / "own.yaml").write_text("extends: base.yaml\nname: own")
        found = load_prompts(str(tmp_path / "own.yaml"))
        assert (found.name, found.predict, found.refine) == ("own", "Base.", load_prompts("compact").refine)

    def test_no_circle(self, tmp_path):
        (tmp_path / "a.yaml").write_text("extends: b.yaml")
        (tmp_path / "b.yaml").write_text("extends: a.yaml")
        with pytest.raises(ValueError, match=r"'a\.yaml' extends itself"):
            load_prompts({"extends": str(tmp_path / "a.yaml")})

    @pytest.mark.parametrize("environments", [["ServiceDesk"], {"ServiceDesk": "Mine."}])
    def test_environments_map_names_to_roles(self, environments):
        with pytest.raises(ValueError, match="environments must map names to mappings of roles"):
            load_prompts({"extends": "default", "environments": environments})


def test_system_prompt_is_kept_replaced_or_dropped():
    default, compact = load_prompts("default"), load_prompts("compact")
    assert default.state("You play.", "Go.") == (Message("system", "You play."), Message("user", "Go."))
    assert compact.state("You play.", "Go.") == (Message("user", "Go."),)
    assert "Action:" in default.state("You play.", "Go.", "react")[0].content


class TestBadPromptSets:
    def base(self) -> dict:
        return {
            "name": "own",
            "version": 1,
            "predict": "p",
            "backup": "{observation}{reward}{next_future}",
            "backup_end": "{observation}{reward}",
            "evaluate": "{futures}",
            "refine": "{critique}",
        }

    def test_the_base_is_good(self):
        assert load_prompts(self.base()).name == "own"

    @pytest.mark.parametrize(
        ("role", "value"), [("predict", None), ("evaluate", 5), ("quote", None), ("system", 5), ("name", 7)]
    )
    def test_a_role_that_is_no_text_is_named(self, role, value):
        with pytest.raises(ValueError, match=rf"{role}: it must be a text, and it is {value}"):
            load_prompts({**self.base(), role: value})
        assert load_prompts({**self.base(), "system": None}).system is None

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="shipped are default, small, compact"):
            load_prompts("compakt")

    def test_evaluator_that_sees_no_futures(self):
        with pytest.raises(ValueError, match="evaluate: the fields must be"):
            load_prompts(self.base() | {"evaluate": "Was it good?"})

    def test_unknown_field(self):
        with pytest.raises(ValueError, match="refine: the fields must be"):
            load_prompts(self.base() | {"refine": "{critique} {answer}"})

    def test_unknown_key(self):
        with pytest.raises(ValueError, match="unknown key 'critic'"):
            load_prompts(self.base() | {"critic": "x"})

    def test_missing_role(self):
        with pytest.raises(ValueError, match=r"lacks \['refine'\]"):
            load_prompts({key: value for key, value in self.base().items() if key != "refine"})

    def test_lone_brace(self):
        with pytest.raises(ValueError, match="literal brace"):
            load_prompts(self.base() | {"predict": "a } b"})


@pytest.mark.parametrize(
    ("text", "future"),
    [
        ("Future: Yes. few left. SUCCESS", Future("Yes. few left. SUCCESS", True)),
        ("**Future:** it fails, FAILURE.", Future("it fails, FAILURE.", False)),
        ("future : a SUCCESS at first, then FAILURE", Future("a SUCCESS at first, then FAILURE", False)),
        ("<think>Future: x SUCCESS</think>\nFuture: y FAILURE", Future("y FAILURE", False)),
        ("- Future: x. success", Future("x. success", True)),
        ("> __Future__ : FAILURE", Future("FAILURE", False)),
        ("## future:\ntwo\nlines SUCCESS", Future("two\nlines SUCCESS", True)),
        ("I see a SUCCESS.\nFuture: y FAILURE", Future("y FAILURE", False)),
        ("Future: x. Outcome: **Success**", Future("x. Outcome: **Success**", True)),
        ('Future: it ends. "__FAILURE__."', Future('it ends. "__FAILURE__."', False)),
        ("Future: success", Future("success", True)),
        ("Future: y FAILURE\nFuture: z SUCCESS", None),
        ("Future: <what happens> SUCCESS\nor\nFuture: <what happens> FAILURE", None),
        ("Future: <what happens> SUCCESS", None),
        ("Future: what happens, then SUCCESS or FAILURE", None),
        ("Future: two left. **SUCCESS** / **FAILURE**", None),
        ("Future: two left. Success|failure", None),
        ("Future: **<what happens>** success", None),
        ("Future: see <b>red</b> SUCCESS", Future("see <b>red</b> SUCCESS", True)),
        ("Future: The user says no. The agent has not had success so far and goes on asking.", None),
        ("Future: It will not end in success.", None),
        ("Future: an earlier FAILURE of the app, then the chat goes on", None),
        ("The Future: x SUCCESS", None),
        ("Future x SUCCESS", None),
        ("Future: SUCCESSFUL, FAILURES", None),
        ("SUCCESS\nFuture: x", None),
        ("hm</think>Future: y SUCCESS", Future("y SUCCESS", True)),
        ("Future: nothing is said of the end", None),
        ("It will be a SUCCESS", None),
        ("Future: UNSUCCESSFUL", None),
        ("", None),
    ],
)
def test_parse_future(text, future):
    assert parse_future(text) == future


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Optimal: Yes\nReason: good.", (True, "good.", "")),
        ("Optimal: No\nReason: bad.\nFix: Is it big?", (False, "bad.", "Is it big?")),
        ("**Optimal:** no\n\n**Reason:** two\nlines\n**Fix:** ask", (False, "two\nlines", "ask")),
        ("Fix: x\nOptimal: No", (False, "", "x")),
        ("Optimal: Yes\nFix: ignored", (True, "", "")),
        ("- optimal : YES.\n- reason: r", (True, "r", "")),
        ("Well.\nOptimal: **No**, since\nReason: *r*\nFix: _f_", (False, "r", "f")),
        ("Reason: r\nFix: f\nOptimal: No", (False, "r", "f")),
        ("Optimal: No or not quite\nFix: <b> is the tag", (False, "", "<b> is the tag")),
    ],
)
def test_parse_critique(text, expected):
    critique = parse_critique(text)
    assert (critique.optimal, critique.reason, critique.fix) == expected and critique.text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes",
        "Optimal:",
        "Optimal: maybe\nFix: x",
        "Optimal: No\nReason: bad.",
        "Optimal: No\nFix:",
        "Optimal: Not sure\nFix: x",
        "Optimal: Yesterday",
        "Optimal: Yes or No\nReason: <one or two sentences>",
        "Optimal: **Yes** / No",
        "Optimal: yes|no\nFix: x",
        "Optimal: No\nReason: r\nFix: <the better action>",
        "Optimal: Yes\nReason: <one or two sentences>",
        "Optimal: it is yes",
        "It is Optimal: Yes",
        "Optimal\nYes",
        "<think>Optimal: Yes</think>",
        "Reason: yes",
    ],
)
def test_critiques_that_do_not_parse(text):
    assert parse_critique(text) is None


@pytest.mark.parametrize(
    ("text", "action_format", "action"),
    [
        ("Is it big?", "plain", "Is it big?"),
        ("Thought: hm\nAction: Is it big?", "react", "Is it big?"),
        ("Thought: Action: x\nAction: a\nAction: b", "react", "b"),
        ("Is it big?", "react", None),
        ("Action:", "react", None),
        ("> **Action:** go\nnorth", "react", "go\nnorth"),
        ("thought: x\naction : y", "react", "y"),
        ("<think>Action: x</think>y", "react", None),
        ("my Action: y", "react", None),
        ("   ", "plain", None),
        ("<think>long</think> go", "plain", "go"),
        ("<think>go", "plain", None),
        ("<think>\nAction: go", "react", None),
    ],
)
def test_parse_action(text, action_format, action):
    assert parse_action(text, action_format) == action


@pytest.mark.parametrize("env", ["Other", "TwentyQuestions", "MathReasoning", "ServiceDesk"])
@pytest.mark.parametrize("role", ["predict", "backup", "backup_end", "evaluate"])
def test_a_form_that_is_repeated_states_nothing(env, role):
    prompts = load_prompts("default", env)
    forms = {"future_form": prompts.forms.future.shown, "critique_form": prompts.forms.critique.shown}
    quoted = dict.fromkeys(("observation", "reward", "next_future", "futures"), "")
    text = getattr(prompts, role).format(**forms, **quoted)
    form = text[min(place for label in ("Future:", "Optimal:") if (place := text.find(label)) >= 0) :]
    assert parse_future(form) is None and parse_critique(form) is None


@pytest.mark.parametrize("piece", ["\n", "-\n", "\n ", "> ", "*"])
def test_labels_are_looked_for_in_one_pass(piece):
    """The old patterns took seconds for these."""
    text = f"x{piece * 20_000}x"
    started = time.process_time()
    assert parse_future(text) is None and parse_critique(text) is None and parse_action(text, "react") is None
    assert time.process_time() - started < 2


@given(st.text(max_size=200))
def test_parsers_never_raise(text):
    for result in (parse_future(text), parse_critique(text), parse_action(text, "react"), parse_action(text, "plain")):
        assert result is None or result
