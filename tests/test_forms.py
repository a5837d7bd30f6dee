"""The forms of the critic's answers: instruction, pattern and parser are one declaration."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rllib_nlac.language.forms import CritiqueForm, FutureForm
from rllib_nlac.language.prompts import SHIPPED, load_prompts
from rllib_nlac.language.settings import Sampling
from rllib_nlac.types import Future, Message

FUTURE, CRITIQUE = FutureForm(), CritiqueForm()
REASON_FIRST = CritiqueForm(reason_first=True)
STATE = (Message("user", "Guess my number."),)


@given(st.from_regex(FUTURE.pattern(32), fullmatch=True))
@example("Future: It ends in success. FAILURE")
def test_every_answer_of_a_futures_pattern_is_read_with_its_outcome(answer):
    read = FUTURE.parse(answer)
    offered = re.search(r"(?i:SUCCESS|FAILURE)[\s*_]*(?:or|/|\|)[\s*_]*\S+\Z", answer)
    if offered is None and answer.lower().count("future:") == 1:
        assert read is not None and read.success is (answer.split()[-1] == "SUCCESS"), answer


@pytest.mark.parametrize("form", [CRITIQUE, REASON_FIRST])
def test_every_answer_of_a_critiques_pattern_is_read_with_its_verdict(form):
    @given(st.from_regex(form.pattern(32), fullmatch=True))
    def check(answer):
        read = form.parse(answer)
        lines = answer.splitlines()
        accepted = "Optimal: Yes" in lines
        fields = [line.partition(":")[2].strip(" *_") for line in lines if not line.startswith("Optimal")]
        placeholder = any(re.match(r"[^\w<]*<[^<>\n]+>[\W_]*\Z", field) for field in fields)
        if len(answer.splitlines()) == (2 if accepted else 3) and all(fields) and not placeholder:
            assert read is not None and read.optimal is accepted, answer

    check()


@pytest.mark.parametrize("tokens", [12, 32, 192])
def test_the_longest_answer_ends_before_the_token_limit(tokens):
    """At two characters a token; text that a tokenizer was trained on has four."""
    body = re.search(r"\{0,(\d+)\}", FUTURE.pattern(tokens))
    assert int(body[1]) + 1 <= min(2 * tokens, FUTURE.characters)
    fields = [int(most) + 1 for most in re.findall(r"\{0,(\d+)\}", CRITIQUE.pattern(tokens))]
    assert sum(fields[1:]) <= max(2 * tokens, 4)


@pytest.mark.parametrize(
    ("reply", "later", "success", "target"),
    [
        ("Higher.", Future("Lower. Then: Correct. SUCCESS", True), True, "Future: Higher. Then: Lower. SUCCESS"),
        ("Higher.", Future("Lower. Then: Correct. FAILURE", False), False, "Future: Higher. Then: Lower. FAILURE"),
        ("Correct.", None, True, "Future: Correct. SUCCESS"),
        ("No turns left", None, False, "Future: No turns left. FAILURE"),
        ("Two\nlines", Future("success", True), True, "Future: Two lines. SUCCESS"),
        ("", Future("Done. SUCCESS", True), True, "Future: Then: Done. SUCCESS"),
        ("", None, False, "Future: Nothing. FAILURE"),
        ("No.", Future("one left; then none. **FAILURE**", False), False, "Future: No. Then: one left. FAILURE"),
    ],
)
def test_a_composed_target(reply, later, success, target):
    assert FUTURE.composed(reply, later, success) == target


@given(st.text(max_size=300), st.text(max_size=300), st.booleans())
@example("Future: won. SUCCESS", "x SUCCESS", False)
@example("SUCCESS or", "", False)
def test_a_composed_target_keeps_outcome_and_form_whatever_is_said(reply, later, success):
    """A reply that imitates a future cannot change how the target ends."""
    composed = FUTURE.composed(reply, Future(f"{later} {FUTURE.outcome(success)}", success), success)
    assert composed.endswith(FUTURE.outcome(success)) and "\n" not in composed
    read = FUTURE.parse(composed)
    assert read is None or read.success is success


def test_the_discount_drops_what_comes_after_the_first_clause():
    later = FUTURE.parse(FUTURE.composed("b.", Future("c. Then: d. SUCCESS", True), True))
    assert FUTURE.composed("a.", later, True) == "Future: a. Then: b. SUCCESS"


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    "env", [None, "GuessNumber", "GuessNumberTools", "TwentyQuestions", "TextHouse", "MiniWoB", "MathReasoning", "ServiceDesk"]
)
def test_shipped_sets_show_examples_that_parse_and_never_a_placeholder_that_does(name, env):
    prompts = load_prompts(name, env)
    forms = prompts.forms
    for text in forms.future.examples:
        assert forms.future.parse(text) and re.fullmatch(forms.future.pattern(192), text)
    for text in forms.critique.examples:
        assert forms.critique.parse(text) and re.fullmatch(forms.critique.pattern(192), text)
    if name == "small":
        assert "<" not in "".join(m.content for m in prompts.predict_messages(STATE, "7")) and forms.future.examples


def test_forms_of_an_environment_complete_those_of_the_set():
    source = {
        "extends": "default",
        "forms": {"future": {"characters": 99, "what": "all"}},
        "environments": {"Mine": {"forms": {"future": {"what": "mine"}}}},
    }
    assert "Future: <all> SUCCESS" in load_prompts(source).predict_messages(STATE, "7")[-1].content
    assert "Future: <mine> SUCCESS" in load_prompts(source, "Mine").predict_messages(STATE, "7")[-1].content
    assert load_prompts(source, "Mine").forms.future.characters == 99


@pytest.mark.parametrize(
    ("forms", "complaint"),
    [
        ({"future": {"label": "Zukunft"}}, "unknown key 'label'"),
        ({"future": {"examples": ["It ends."]}}, "is not in this form"),
        ({"future": {"examples": "Future: x SUCCESS"}}, "list of texts"),
        ({"critique": {"examples": ["Optimal: No\nReason: x"]}}, "is not in this form"),
        ({"future": {"characters": 3}}, "between 8 and 4000"),
        ({"future": {"characters": True}}, "between 8 and 4000"),
        ({"future": {"exmples": ["x"]}}, "did you mean 'examples'"),
        ({"futures": {}}, "did you mean 'future'"),
        ({"future": "Future"}, "must map future and critique to mappings"),
        (["future"], "must map future and critique to mappings"),
    ],
)
def test_a_form_that_would_not_be_read_back_is_refused_when_it_is_loaded(forms, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        load_prompts({"extends": "small", "forms": forms})
    assert str(error.value).startswith("prompt set 'small', forms")


def test_the_shortest_and_the_longest_parts_that_are_allowed_make_a_form():
    for most in (8, 4000):
        forms = {"future": {"characters": most}, "critique": {"reason_characters": most, "fix_characters": most}}
        load_prompts({"extends": "default", "forms": forms})


def test_free_sampling_asks_for_no_pattern():
    assert Sampling(24).patterns([FUTURE, None]) == [None, None]
    assert Sampling(24, structured=True).patterns([FUTURE, None]) == [FUTURE.pattern(24), None]
