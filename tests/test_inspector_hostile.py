"""Texts that are long, strange or hostile on the page of ``rllib inspect``, in a real browser; skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browsed import Page, key, save
from recorded import episode, make_run, state, transition, write_lines

from rllib_nlac.inspector import page

LOOK = """
for (const each of document.querySelectorAll("details")) each.open = true;
for (const each of document.querySelectorAll(".marks")) each.click();
const own = document.getElementById("any-metric");
if (own) { own.selectedIndex = own.options.length - 1; own.dispatchEvent(new Event("change")); }
"""
CANARY = "document.documentElement.dataset.pwned=1"
HOSTILE = (
    f"""</script></style>"'><img src=x onerror="{CANARY}"><script>{CANARY}</script><svg onload="{CANARY}">{{{{DATA}}}}\u202e"""
)


def test_turns_of_a_hundred_thousand_characters(view, tmp_path):
    long = "word " * 20_000
    line = transition(
        99, 1, action=long, refined=long + "more", observation="x" * 100_000, state=[{"role": "user", "content": long}]
    )
    view.open(save(tmp_path, make_run(tmp_path / "run", more=(line,))) + f"#t={key(line)}")
    assert view.js("return document.getElementById('detail').innerText.length") < 120_000
    view.js("document.querySelector('.message .more').click()")
    assert view.js("return document.querySelector('.message .words').textContent === arguments[0]", long)
    view.go("#view=transitions&text=word+word")
    assert view.keys == [key(line)]


@pytest.mark.parametrize(
    "text",
    [
        "مرحبا بالعالم",
        "שלום עולם",
        "日本語 한국어",
        "👩‍👩‍👧‍👦 e\u0301",
        "a\u202eb\u2066c",
        "half \ud83d a pair",
        "\0\x1b[31m\ufeff",
    ],
)
def test_all_of_unicode(view, tmp_path, text):
    line = transition(99, 1, action=text, observation=text)
    view.open(save(tmp_path, make_run(tmp_path / "run", 1, 2, more=(line,))) + f"#t={key(line)}")
    shown = text.encode("utf-8", "replace").decode()
    assert view.js("return document.querySelector('.step.act .words').textContent") == shown
    found = view.js(
        "const own = getComputedStyle(document.querySelector('.step.act .words')); return [own.direction, own.unicodeBidi]"
    )
    assert found == ["rtl" if text[0] in "مש" else "ltr", "isolate"]


def hostile(value: Any) -> Any:
    """A value with all its texts replaced, but for those that decide what it is."""
    if isinstance(value, dict):
        return {name: each if name == "kind" else hostile(each) for name, each in value.items()}
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return HOSTILE + value if isinstance(value, str) else value


@pytest.fixture()
def hostile_run(tmp_path) -> Path:
    folder = make_run(tmp_path / "run <b>'\"", 4, 4)
    record = folder / "transitions"
    unparsed = {"unparsed": [{"role": "critique", "text": "blah"}], "judged": "other", "ended": "terminated"}
    write_lines(record / "iteration_00000004.jsonl", [hostile(transition(4, number, 1, **unparsed)) for number in range(4)])
    told = [state(1, 4), transition(4, 50, kind="prediction"), episode(4, 0)]
    write_lines(record / "evaluation_00000004.jsonl", [hostile(line) for line in told])
    facts = {
        "algorithm": HOSTILE,
        "env": HOSTILE,
        "env_config": {HOSTILE: HOSTILE},
        "language_model": HOSTILE,
        "config": {HOSTILE: [HOSTILE, HOSTILE]},
    }
    (record / "run.json").write_text(json.dumps(facts))
    results = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    results[-1]["notices"] = HOSTILE
    results[-1]["env_runners"][HOSTILE] = 1.0
    results[-1]["evaluation"]["critic"]["by_turn"][HOSTILE] = {"num_states": 1.0}
    write_lines(folder / "result.json", results)
    return folder


def look_everywhere(view: Page) -> str:
    """Opens all there is to see, and returns the texts."""
    seen = []
    for fragment in (
        "#view=run",
        "#view=transitions",
        "#t=4.2000001",
        "#view=states",
        "#view=critic",
        "#view=episodes",
        "#view=compare",
    ):
        view.go(fragment)
        view.js(LOOK)
        seen.append(view.js("return document.getElementById('main').textContent"))
        view.js("return new Promise((done) => setTimeout(done, 100))")
    return "\n".join(seen)


def troubles(view: Page) -> list[str]:
    """What hostile texts achieved."""
    strange = view.all("img, iframe, object, embed, link, b > b, svg[onload], [onerror], [onload], script", "tagName")
    return [
        *(tag for tag in strange if tag != "SCRIPT"),
        *(["more scripts"] if strange.count("SCRIPT") != 1 else []),
        *(["pwned"] if view.js("return document.documentElement.dataset.pwned") else []),
    ]


def test_hostile_texts_stay_texts_in_every_field(view, tmp_path, hostile_run):
    view.open(save(tmp_path, hostile_run, hostile_run))
    seen = look_everywhere(view)
    assert troubles(view) == []
    line = transition(4, 2, 1)
    texts = [
        line["action"],
        line["observation"],
        line["refined"],
        line["futures"][0]["text"],
        line["critique"]["reason"],
        "blah",
        "other",
        "Can it fly?",
        "one left. FAILURE",
        "Guess my object.",
        "Kite?",
    ]
    for text in texts:
        assert HOSTILE[:20] in seen and (HOSTILE + text)[:60] in seen and text[:5] in seen, text
    assert view.js("return document.title") == "a run" and seen.count(HOSTILE) > 60


@pytest.mark.parametrize("name", ["constructor", "__proto__", "toString"])
def test_names_that_every_object_knows_stay_texts(view, tmp_path, name):
    """Fails where a record's text is looked up in a plain object, which inherits these."""
    said = [{"role": name, "content": "Guess."}]
    by = {"action": [name, 1], "future": [{"toString": 1}, 1], "critique": ["policy", {"toString": 1}]}
    line = transition(99, 1, reason=name, state=said, by=by)
    one = make_run(tmp_path / "one", more=(line,))
    config = json.loads(f'{{"lr": [0.001, 1e-06], "{name}": [5, null]}}')
    other = make_run(tmp_path / "other", config=config)
    view.open(save(tmp_path, one, other) + f"#t={key(line)}")
    assert line["action"] in view.text and f"by {name} v1" in view.text and "native code" not in view.text
    assert view.all(".message .role") == [name] and view.all(".message", "className") == ["message user"]
    assert view.all(".step.act .who", "title") == [""]
    view.go("#view=compare")
    rows = [[each.strip() for each in row.split("\t")] for row in view.all("#compare .config tbody tr", "innerText")]
    assert rows == [[name, "–", "5"]]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_page_that_took_texts_for_markup_would_be_found_out(view, tmp_path, hostile_run, monkeypatch, guarded):
    """The wrong version, under the page's policy, which stops it, and without, where the canary proves that scripts run."""
    right = page.source

    def wrong(name: str) -> str:
        text = right(name)
        if name == "dom.js":
            text = text.replace(
                "element.textContent = text;\n    return element;", "element.innerHTML = text;\n    return element;"
            )
            assert "innerHTML" in text
        return text if guarded or name != "page.html" else text.replace('content="{{POLICY}}"', 'content=""')

    monkeypatch.setattr(page, "source", wrong)
    view.open(save(tmp_path, hostile_run))
    view.js("window.mayFail = true")
    if guarded:
        assert "could not be shown" in view.text or not view.js("return document.querySelector('#detail, #run')")
        assert troubles(view) == []
    else:
        look_everywhere(view)
        assert "pwned" in troubles(view) and "IMG" in troubles(view)
