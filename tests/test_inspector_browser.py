"""The page of ``rllib inspect`` in a real browser without a window; skipped where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsed import key, save
from recorded import make_run, state, transition, write_lines

from rllib_nlac.inspector.run import read_run

STRIP = "return [...document.querySelectorAll('.token')].map((each) => each.getAttribute('style'))"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", iterations=6, each=20)


@pytest.fixture(scope="module")
def address(run) -> str:
    return save(run.parent, run)


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_run(run).lines if line["kind"] == "transition"]


FILTERS: list[tuple[dict[str, Any], Callable[[dict], bool]]] = [
    ({"outcome": "success"}, lambda t: t["success"]),
    ({"outcome": "failure"}, lambda t: not t["success"]),
    ({"verdict": "yes"}, lambda t: t["critique"] and t["critique"]["optimal"]),
    ({"verdict": "no"}, lambda t: t["critique"] and not t["critique"]["optimal"]),
    ({"verdict": "none"}, lambda t: not t["critique"]),
    ({"reason": "refined"}, lambda t: t["reason"] == "refined"),
    ({"iterationLow": "3", "iterationHigh": "4"}, lambda t: 3 <= t["iteration"] <= 4),
    ({"turnLow": "2", "turnHigh": "2"}, lambda t: t["turn"] == 1),
    ({"ageLow": "3"}, lambda t: t["age"] >= 3),
    ({"priorityLow": "0.25", "priorityHigh": "0.75"}, lambda t: t["priority"] is not None and 0.25 <= t["priority"] <= 0.75),
    ({"parse": True}, lambda t: t["unparsed"] or t["reason"].startswith("unparsed")),
    ({"text": "A WHALE"}, lambda t: "a whale" in json.dumps(t).lower()),
    (
        {"outcome": "failure", "verdict": "no", "text": "owl"},
        lambda t: not t["success"] and t["critique"] and not t["critique"]["optimal"] and "owl" in json.dumps(t),
    ),
]


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory) -> Path:
    """With what does not parse and is not known."""
    odd = (
        transition(
            99, 1, critique=None, refined=None, reason="unparsed_critique", unparsed=[{"role": "critique", "text": "blah"}]
        ),
        transition(99, 2, priority=None, critic_loss=None, policy_loss=None, stopped=True, predicted=None, futures=[]),
        transition(99, 3, target=None, next_action=None, next_future=None, ended="terminated", judged="Is it mine?"),
    )
    return make_run(tmp_path_factory.mktemp("odd") / "run", iterations=5, each=20, more=odd)


def test_every_filter_shows_what_passes_it(view, odd_run):
    view.open(save(odd_run.parent, odd_run))
    view.go("#view=transitions")
    every = lines(odd_run)
    assert len(view.keys) == len(every) == 103
    for values, passes in FILTERS:
        for name, value in values.items():
            view.set(name, value)
        expected = {key(line) for line in every if passes(line)}
        assert 0 < len(expected) < len(every) and set(view.keys) == expected, values
        assert f"{len(expected)} of {len(every)}" in view.text
        view.clear()
    assert len(view.keys) == len(every)
    view.set("text", "found nowhere")
    assert view.keys == [] and "Nothing passes these filters." in view.text


def test_every_order(view, odd_run):
    view.open(save(odd_run.parent, odd_run))
    view.go("#view=transitions")
    values: dict[str, Callable[[dict], float | None]] = {
        "priority": lambda t: t["priority"],
        "l1": lambda t: t["critic_loss"],
        "l2": lambda t: t["policy_loss"],
        "age": lambda t: t["age"],
        "surprise": lambda t: None if t["predicted"] is None else abs(t["predicted"] - t["success"]),
    }
    by_key = {key(line): line for line in lines(odd_run)}
    for name, value in values.items():
        view.set("sort", name)
        order = [value(by_key[each]) for each in view.keys]
        known = [each for each in order if each is not None]
        assert known == sorted(known, reverse=True) and order[: len(known)] == known  # what is not known comes last
    view.set("sort", "oldest")
    assert [by_key[each]["iteration"] for each in view.keys] == sorted(line["iteration"] for line in by_key.values())


def test_a_transition_in_full_by_its_link(view, odd_run):
    line = transition(2, 4, 1)
    view.open(save(odd_run.parent, odd_run) + f"#t={key(line)}")
    for text in (
        "Iteration 2, turn 2",
        line["action"],
        line["futures"][0]["text"],
        "it leads on.",
        "one left. FAILURE",
        "Can it fly?",
        "by policy v2",
        "by initial",
        "Question 0 of 4?",
        "The same turn in other iterations",
    ):
        assert text in view.text, text
    assert view.js("return document.querySelector('.row.selected') !== null")
    assert view.js("return [...document.querySelectorAll('.token')].map((each) => each.textContent)") == ["Is", " it", "?"]
    view.choose("token-text", "action")
    for measure in ("share", "policy", "target", "gap", "played"):
        view.choose("token-measure", measure)
        sizes = [float(each.partition("--size:")[2].strip(" ;")) for each in view.js(STRIP)]
        expected = {
            "share": [0.05, 1, 0.2],
            "policy": [0.05, 1, 0.2],
            "target": [0.2, 1, 0.9],
            "gap": [0.1, 1, 0.5],
            "played": [0.067, 1, 0.2],
        }
        assert sizes == pytest.approx(expected[measure], abs=1e-3), measure
    view.go(f"#t={key(transition(99, 1))}")
    assert "blah" in view.text and "The critique did not parse: the policy learns nothing here." in view.text
    view.go(f"#t={key(transition(99, 2))}")
    assert "L1 stopped" in view.text and "none parsed" in view.text
    view.go(f"#t={key(transition(99, 3))}")
    assert (
        "Is it mine?" in view.text
        and "the episode ended here" in view.text
        and "did not parse: the critic learns nothing" in view.text
    )
    view.go("#t=5.77")
    assert "There is no transition 5.77 here." in view.text


def test_a_long_dialogue_with_tools_keeps_its_opening(view, tmp_path):
    """Fails where the tools on offer count as all of it: the task would be folded away."""
    told = [("tools", '[{"function": {"name": "buy"}}]'), ("system", "You run a shop."), ("user", "The task.")]
    turns = [(role, f"{role} {number}") for number in range(8) for role in ("assistant", "tool")]
    dialogue = [{"role": role, "content": text} for role, text in told + turns]
    line = transition(9, 0, 0, state=dialogue)
    view.open(save(tmp_path, make_run(tmp_path / "run", more=(line,))) + f"#t={key(line)}")
    roles = view.js("return [...document.querySelectorAll('.dialogue .role')].map((each) => each.textContent)")
    assert roles == ["tools on offer", "system", "environment", *["agent", "tool"] * 3]
    assert all(text in view.text for text in ("You run a shop.", "The task.", "10 messages between", "tool 7"))


def test_the_refined_action_is_shown_as_a_difference_of_words(view, address):
    view.open(address)
    show = "return difference(arguments[0], arguments[1])"
    assert view.js(show, "go to the red door", "go to the old red gate") == [
        ["=", "go to the "],
        ["+", "old "],
        ["=", "red "],
        ["-", "door"],
        ["+", "gate"],
    ]
    assert view.js(show, "Can you eat it?", "Is this heavy?") == [["-", "Can you eat it"], ["+", "Is this heavy"], ["=", "?"]]
    for before, after in (("", "new"), ("old", ""), ("same", "same"), ("a b c", "c b a"), ("word " * 5000, "other " * 5000)):
        parts = view.js(show, before, after)
        assert "".join(text for kind, text in parts if kind != "+") == before
        assert "".join(text for kind, text in parts if kind != "-") == after


def test_keys(view, address, run):
    view.open(address)
    view.press("2", "j")
    first, second, *_ = view.keys
    assert view.js("return location.hash") == f"#t={first}"
    view.press("j")
    assert view.js("return location.hash") == f"#t={second}"
    view.press("k", "k")
    assert view.js("return location.hash") == f"#t={first}"
    view.press("/")
    view.press(*"owl")
    view.until("return app.list.inputs.text.value === 'owl' && document.activeElement === app.list.inputs.text")
    view.until("return app.list.order.length < app.run.ofKind[0].length")
    view.press("\ue00c")
    assert view.js("return document.activeElement !== app.list.inputs.text")
    view.press("x", "c")
    chat = json.loads(view.until("return document.documentElement.dataset.copied"))
    line = next(line for line in lines(run) if key(line) == first)
    assert chat == [*line["state"], {"role": "assistant", "content": line["action"]}]
    view.press("p")
    command = f"rllib env play 'TwentyQuestions' --config '{{\"max_turns\":6}}' --seed {line['task_seed']}"
    assert (
        view.until(
            "return document.documentElement.dataset.copied.startsWith('rllib') && document.documentElement.dataset.copied"
        )
        == command
    )
    view.press("t")
    assert view.js("return document.documentElement.dataset.theme") == "dark"
    view.press("?")
    assert view.js("return document.getElementById('keys').open")


def test_the_list_holds_only_the_rows_that_are_seen(view, address):
    view.open(address)
    view.go("#view=transitions")
    assert view.js("return document.querySelectorAll('.row').length") < 40 < len(view.keys)
    view.js("app.list.box.scrollTop = 1e6")
    last = view.keys[-1]
    assert view.until("return document.querySelector(`.row[href='#t=${arguments[0]}']`) !== null", last)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1]),
        (0.25, 0.9, [0.4, 0.6, 0.8]),
        (-3, 3, [-2, 0, 2]),
        (3, 3, [3]),
        (1e16, 1e16 + 2, [1e16]),
        (-1e300, 1e300, [-1e300, -5e299, 0, 5e299, 1e300]),
        (1, 0, []),
    ],
)
def test_ticks_are_round_and_few(view, address, low, high, ticks):
    """Fails where a step that is below the number's resolution never arrives."""
    view.open(address)
    assert view.js("return ticks(arguments[0], arguments[1])", low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    "wrong",
    [
        {"predicted": [0.5]},
        {"predicted": [0.5], "came": [0.5], "count": 3},
        {"predicted": [0.5, 1], "came": [0.5], "count": [3, 3]},
        {"predicted": [0.5], "came": [None], "count": [[1]]},
        {"predicted": [], "came": [], "count": []},
        5,
    ],
    ids=str,
)
def test_a_reliability_that_is_none_is_not_drawn(view, tmp_path, wrong):
    for name in ("a", "b"):
        folder = make_run(tmp_path / name)
        rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        rows[-1]["evaluation"]["critic"]["reliability"] = wrong
        write_lines(folder / "result.json", rows)
    view.open(save(tmp_path, tmp_path / "a", tmp_path / "b"))
    view.go("#view=critic")
    assert "By turn" in view.text and "Reliability" not in view.text
    view.choose("evaluation", "0")
    assert "Reliability" in view.text
    view.go("#view=compare")
    assert "A, after iteration 2" in view.text  # the last one that is


def test_all_other_views(view, address):
    view.open(address)
    for text in (
        "NLAC on TwentyQuestions",
        "60 %",
        "60 % of the futures do not parse",
        "most answers do not parse",
        "Where the time went",
        "0.000001",
        "lr",
    ):
        assert text in view.text.replace("1e-6", "0.000001").replace("0.001\t", ""), text
    view.js("document.querySelector('.pickable').dispatchEvent(new MouseEvent('click', {clientX: 1e4, bubbles: true}))")
    view.until("return document.documentElement.dataset.view === 'transitions'")
    assert {each.partition(".")[0] for each in view.keys} == {"6"}
    view.go("#view=states")
    assert view.js("return document.querySelectorAll('#states > .card').length") == 2
    assert view.js("return document.querySelectorAll('#states .moment').length") == 6
    view.js("document.querySelector('.marks').click()")
    view.go("#view=critic")
    for text in (
        "AUC",
        "Reliability",
        "By turn",
        "refined wins",
        "80 %, 40 % to 95 %",
        "How far targets drift",
        "What surprised the critic most",
    ):
        assert text in view.text, text
    view.go("#view=episodes")
    assert view.js("return document.querySelectorAll('.episode').length") == 3
    view.choose("episodes-outcome", "0")
    assert view.js("return document.querySelectorAll('.episode').length") == 1


def test_sums_are_those_of_all_results(view, tmp_path):
    """Fails where the page adds up the rows of its curves, which are a part of a long run's."""
    folder = make_run(tmp_path / "run")
    rows = [{"training_iteration": i, "seconds": {"play": 60.0}} for i in range(1, 4002)]
    rows[999]["learners"] = {"default_policy": {"num_stopped_steps": 1}}
    write_lines(folder / "result.json", rows)
    view.open(save(tmp_path, folder))
    assert "66.7 h" in view.text and "1 gradient steps were stopped" in view.text


def test_pass_at_k_is_that_of_the_same_tasks_for_each_k(view, address):
    """Fails where pass@1 is the success in all tasks, or where the k's are those of a program."""
    view.open(address)
    (text,) = (
        each for each in view.js("return [...document.querySelectorAll('figure')].map(x => x.innerText)") if "Pass@k" in each
    )
    assert "pass@3" in text and "pass@1" in text and "pass@4" not in text
    lines = view.js("return linesOf(CURVES.find(x => x.title === 'Pass@k'), app.run).map(x => app.run.curve(x[0]))")
    assert lines == [[None, 0.5, None, 0.7, None, 0.9], [None, 0.1, None, 0.2, None, 0.3]]


@pytest.mark.parametrize("fragment", ["#view=run", "#view=states", "#view=critic", "#view=episodes", "#view=compare"])
def test_nothing_is_shown_that_a_program_forgot(view, odd_run, fragment):
    view.open(save(odd_run.parent, odd_run, odd_run) + fragment)
    found = [word for word in ("[object", "undefined", "NaN", "null") if word in view.text]
    assert view.js("return document.documentElement.dataset.view") in fragment and found == []


def test_two_runs_side_by_side(view, tmp_path):
    one, other = (
        make_run(tmp_path / "one"),
        make_run(tmp_path / "other", iterations=6, config={"lr": [0.01, 1e-06], "tau": [0.5, None], "grad_clip": [None, 1.0]}),
    )
    write_lines(other / "transitions" / "evaluation_00000002.jsonl", [state(1, 2), state(5, 2)])
    view.open(save(tmp_path, one, other) + "#view=compare")
    assert view.js("return document.querySelectorAll('#compare .sidebyside').length") == 2  # the states that both have
    rows = [[each.strip() for each in row.split("\t")] for row in view.all("#compare .config tbody tr", "innerText")]
    assert rows == [["grad_clip", "1", "–"], ["lr", "0.001", "0.01"], ["tau", "–", "0.5"]]
    assert any("A " in each and "B " in each for each in view.all("#compare .chartcard .legend"))
    view.choose("which", "1")
    view.go("#view=transitions&r=1")
    assert len(view.keys) == 60
    view.go(f"#t={view.keys[0]}&r=1")
    assert view.js("return app.which") == 1 and "Iteration 6" in view.text


def test_a_turn_is_the_same_where_its_dialogue_is(view, tmp_path):
    """Fails where it is known by its id alone: these begin anew where a run goes on with another buffer."""
    other = transition(9, 0, 0, action="Is it red?")
    view.open(save(tmp_path, make_run(tmp_path / "run", more=(other,))))
    own = "return app.run.byTurn.get(app.run.turn(app.run.byKey.get(arguments[0]))).map((i) => app.run.rows.iteration[i])"
    assert view.js(own, "1.0") == [1, 2, 3, 4] and view.js(own, "9.0") == [9]


@pytest.mark.parametrize(
    "fragment", ["#view=run", "#view=transitions", "#t=", "#view=states", "#view=critic", "#view=episodes"]
)
def test_on_a_phone_nothing_sticks_out(view, address, run, fragment):
    view.size(390, 844)
    view.open(address + (fragment + key(lines(run)[4]) if fragment == "#t=" else fragment))
    width = "return Math.max(document.documentElement.scrollWidth, document.getElementById('main').scrollWidth)"
    assert view.js(width) <= 390
    seen = [each for each in ("listpane", "detailpane") if view.all(f".{each}", "offsetParent") not in ([], [None])]
    assert seen == {"#t=": ["detailpane"], "#view=transitions": ["listpane"]}.get(fragment, [])
    if fragment == "#t=":
        view.js("document.querySelector('.back').click()")
        assert view.until("return document.querySelector('.listpane').offsetParent !== null")


def test_it_can_be_read_dark_and_light_and_without_colour(view, address, run):
    line = next(line for line in lines(run) if line["reason"] == "refined" and line["tokens"])
    dark = {}
    for scheme in ("light", "dark"):
        view.scheme(scheme)
        view.open(address + f"#t={key(line)}")
        dark[scheme] = view.js("return getComputedStyle(document.body).backgroundColor")
        for selector in (".words", ".quiet", ".mark.good, .mark.bad", "ins", "del", ".chip", ".who", "#tabs a"):
            assert view.contrast(selector) >= 4.5, (scheme, selector)
    assert dark["light"] != dark["dark"]
    # Marks beside the colours: signs of outcomes and verdicts, underlined and struck through words, bars under tokens.
    assert view.js("return getComputedStyle(document.querySelector('ins')).textDecorationLine") == "underline"
    assert view.js("return getComputedStyle(document.querySelector('del')).textDecorationLine") == "line-through"
    assert view.js("return new Set([...document.querySelectorAll('.token i')].map((each) => each.offsetHeight)).size") > 1
    assert view.js("return /[✓✗]/.test(document.querySelector('.mark').textContent)")
