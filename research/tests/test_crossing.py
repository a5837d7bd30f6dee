"""The crossing: its way and its traps, what its corpus teaches, and a log of which no dialogue from the near entrance wins."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.crossing import CROSSING, CROWN, DEAD_END, DOORS, ENTRANCES, FAR, LOST, TRAP, WON, Crossing, make_layout
from research.stitching import (
    DIALOGUES,
    complete,
    main,
    picture,
    read_rows,
    steps_of,
    table,
    write_log,
)
from research.tiny.crossing import HORIZON, LEARNERS_LAYOUTS, NOTHING, CrossingCorpus, one_later
from research.tiny.worlds import WORLDS
from rllib_nlac.language.forms import CritiqueForm, FutureForm

parse_future, parse_critique = FutureForm().parse, CritiqueForm().parse

seeds = st.integers(0, 10**6)


def best_by_backup(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Value of every logged action where each next one may be any that the log holds there: one-step backups to their end."""
    known = {step: f"{step[1]}\n{step[2]}" for row in rows for step in steps_of(row)}
    values = dict.fromkeys(((seen, action) for seen, action, _ in known), 0.0)
    for _ in range(max(len(row["rewards"]) for row in rows)):
        best: dict[str, float] = {}
        for (seen, _), value in values.items():
            best[seen] = max(best.get(seen, 0.0), value)
        for (seen, action, reply), following in known.items():
            values[seen, action] = float(reply == WON) if reply in (WON, LOST) else best.get(following, 0.0)
    return values


def best_by_return(rows: list[dict]) -> dict[tuple[str, str], float]:
    """The best that ever came of every logged action."""
    values: dict[tuple[str, str], float] = {}
    for row in rows:
        for seen, action, _ in steps_of(row):
            values[seen, action] = max(values.get((seen, action), 0.0), sum(row["rewards"]))
    return values


@given(seeds, st.sampled_from(list(ENTRANCES)))
def test_the_way_leads_through_the_crossing_to_the_crown(seed, entrance):
    env = Crossing(layout=seed, entrance=entrance)
    env.reset(seed=0)
    replies, info = [], {}
    while not info.get("success"):
        reply, reward, terminated, truncated, info = env.step(env.expert_action())
        replies.append(reply)
        assert reward == float(terminated) and not truncated
    layout = make_layout(seed)
    assert len(replies) == (7 if entrance == "near" else 5) and replies[-1] == "crown."
    assert info["subgoals"] == {"crossing": True} and f"{layout.name(CROSSING)}." in replies


@given(seeds)
def test_what_is_before_one_entrance_cannot_be_reached_from_the_other(seed):
    """And the crossing is come to by a door of the same colour, so that a model sees the same there."""
    doors = make_layout(seed).doors

    def reached(room: int) -> set[int]:
        found = {room}
        while more := {to for each in found for to in doors[each] if to >= 0} - found:
            found |= more
        return found

    assert reached(0) == {0, 1, 2, 3, 4, 5, DEAD_END} and reached(FAR) == {3, 4, 5, FAR, DEAD_END}
    colours = {(room, door) for room in range(DEAD_END) for door, to in enumerate(doors[room]) if to == CROSSING}
    assert len(colours) == 2 and len({door for _, door in colours}) == 1
    for room in range(DEAD_END):
        assert sorted(Counter(min(to, 0) if to != DEAD_END else DEAD_END for to in doors[room]).values()) == [1, 1, 2]
    assert set(doors[DEAD_END]) == {TRAP} and sum(CROWN in each for each in doors) == 1


def test_chance_hardly_wins():
    """Three right doors of four before the crossing and three behind it."""
    env, won, crossed = Crossing(), 0, 0
    rng = random.Random(0)
    for number in range(3000):
        env.reset(seed=number)
        ended, info = False, {}
        while not ended:
            _, _, terminated, truncated, info = env.step(f"go {rng.choice(DOORS)}")
            ended = terminated or truncated
        won, crossed = won + info["success"], crossed + info["subgoals"]["crossing"]
    assert won / 3000 < 0.003 and crossed / 3000 == pytest.approx(1 / 64, abs=0.007)


def test_odd_actions_cost_a_turn_and_lead_nowhere():
    env = Crossing(layout=1, max_turns=3)
    assert env.reset(seed=0)[0] == "Find the crown." and "go red" in env.reset(seed=0)[1]["system_prompt"]
    here = env.step("hello")[0]  # the first turn tells where one is, whatever is said
    assert env.step("go red or blue")[0] == f"what. {here}"
    text, _, terminated, truncated, info = env.step("sing")
    assert text == f"what. {here} No turns left." and truncated and not terminated and info["success"] is False
    with pytest.raises(ValueError, match="entrance is 'side'"):
        Crossing(entrance="side")
    for layout in (-1, 10**7, 1.5):  # which no task could be called after
        with pytest.raises(ValueError, match=rf"layout is {layout} and must be a whole number from 0 to 9999999"):
            Crossing(layout=layout)
    with pytest.raises(ValueError, match="are called as in 'layout-3'"):
        env.reset(options={"task_id": "3"})


class TestCorpus:
    @pytest.fixture(scope="class")
    def examples(self) -> dict[str, list]:
        by_role: dict[str, list] = {role: [] for role in CrossingCorpus.ROLES}
        for example in itertools.islice(WORLDS["crossing"].corpus(5), 4000):
            by_role[example.role].append(example)
        return by_role

    def test_a_crown_is_one_move_later_for_the_state_before_and_dies_out(self):
        told = [
            ("crown. SUCCESS", "crown in one"),
            ("hall, then crown in one. SUCCESS", "crown in two"),
            ("hall, then crown in five. SUCCESS", "crown in six"),
            ("hall, then crown in six. SUCCESS", NOTHING),
            ("hall, then nothing. FAILURE", NOTHING),
            ("trap. FAILURE", NOTHING),
        ]
        assert {future: one_later(future) for future, _ in told} == dict(told)
        said = "crown in one"
        for _ in range(HORIZON):
            said = one_later(f"hall, then {said}. SUCCESS")
        assert said == NOTHING

    def test_a_backup_repeats_the_reply_and_wins_only_where_the_next_future_does(self, examples):
        seen = set()
        for example in examples["backup"]:
            shown, answer = example.prompt[-1].content, example.answer.removeprefix("Future: ")
            assert answer.startswith(shown.partition("Reply: ")[2].split(".")[0]) and parse_future(example.answer)
            if "The end." in shown:
                assert answer.endswith("SUCCESS") is ("Reward: 1" in shown) and ", then" not in answer
                continue
            later = one_later(re.search(r"Next: (.*) Reward:", shown)[1])
            seen.add(later)
            assert answer.partition(", then ")[2] == f"{later}. {'FAILURE' if later == NOTHING else 'SUCCESS'}"
        assert len(seen) == HORIZON + 1

    def test_the_evaluator_reads_the_outcomes_and_nothing_else(self, examples):
        for example in examples["evaluate"]:
            futures = example.prompt[-1].content.splitlines()[1:]
            won = [future.endswith("SUCCESS") for future in futures]
            assert parse_critique(example.answer).optimal is (2 * sum(won) >= len(won))

    def test_play_and_advice_are_any_door(self, examples):
        played = Counter(example.answer for example in examples["policy"] if example.answer != "look")
        fixes = Counter(fix for e in examples["evaluate"] if (fix := parse_critique(e.answer).fix) and fix != "look")
        for counts in (played, fixes):
            assert set(counts) == {f"go {door}" for door in DOORS} and max(counts.values()) < 0.33 * counts.total()

    def test_no_learner_meets_a_layout_of_the_corpus(self):
        corpus = WORLDS["crossing"].corpus(0)
        known = {make_layout(LEARNERS_LAYOUTS + n) for n in range(4096)}
        assert all(corpus.state().layout in known for _ in range(50)) and not known & {make_layout(n) for n in range(5)}


class TestLog:
    @pytest.fixture(scope="class", params=[0, 3])
    def logs(self, request, tmp_path_factory) -> tuple[int, dict[str, list]]:
        logs = {}
        for log in ("apart", "joined"):
            path = tmp_path_factory.mktemp("logs") / f"{log}.jsonl"
            write_log(path, request.param, log == "joined")
            logs[log] = [json.loads(line) for line in path.read_text().splitlines()]
        return request.param, logs

    def test_no_dialogue_from_the_near_entrance_wins_unless_the_log_is_joined(self, logs):
        for log, rows in logs[1].items():
            won = Counter(row["entrance"] for row in rows if row["success"])
            assert len(rows) == 2 * DIALOGUES and won["far"] > 20 and (won["near"] > 5) is (log == "joined")
            assert all(sum(row["rewards"]) == row["success"] for row in rows)
        assert not any(row["success"] for row in logs[1]["apart"] if row["entrance"] == "near")

    def test_one_step_backups_win_from_the_near_entrance_and_returns_do_not(self, logs):
        """Exactly, by dynamic programming over what the log holds: before the crossing the right doors win alone."""
        layout, rows = make_layout(logs[0]), logs[1]
        rooms = {f"{layout.name(room)}.": f"go {DOORS[layout.right[room]]}" for room in range(CROSSING)}
        backed_up, returned = best_by_backup(rows["apart"]), best_by_return(rows["apart"])
        before = [(seen, action) for seen, action in backed_up if seen.split("\n")[-1] in rooms]
        right = {(seen, action) for seen, action in before if rooms[seen.split("\n")[-1]] == action}
        assert len(before) == 12 and len(right) == 3
        assert {pair for pair in before if backed_up[pair] == 1} == right
        assert {returned[pair] for pair in before} == {0}
        joined = best_by_return(rows["joined"])
        assert {pair for pair in before if joined[pair] == 1} == right

    def test_both_ways_come_to_the_same_text(self, logs):
        """What a model sees at the crossing tells it nothing of where a dialogue began."""
        seed, logs_ = logs
        name = make_layout(seed).name(CROSSING)
        seen = {
            entrance: {seen for row in logs_["apart"] if row["entrance"] == entrance for seen, *_ in steps_of(row)}
            for entrance in ENTRANCES
        }
        at = {entrance: {text for text in texts if text.endswith(f"{name}.")} for entrance, texts in seen.items()}
        assert at["near"] == at["far"] and len(at["near"]) == 1


def test_the_table_is_of_the_last_evaluation_that_every_seed_has(tmp_path):
    lines = ["log,method,seed,iteration,success,crossing,right,wrong,seconds"]
    for seed, success in ((0, 0.5), (1, 1.0)):
        lines += [f"apart,RFT,{seed},3,0.1,0.2,nan,nan,3", f"apart,RFT,{seed},6,{success},0.5,nan,nan,6"]
    lines.append("apart,RFT,1,9,0.25,0.5,nan,nan,9")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    rows = read_rows(tmp_path / "rows.csv")
    assert table(rows).splitlines()[-1] == "| apart | RFT | 6 | 0.50, 1.00 | 0.75 | 0.50 |  |  |"
    assert picture(rows).startswith("<svg") and picture(rows).count("<circle") == 3


def test_a_run_that_is_there_is_not_made_again_and_a_shorter_one_is(tmp_path):
    asked = [{"log": "apart", "method": "RFT", "seed": seed} for seed in (0, 1)]
    made = []

    def run(one):
        made.append(one["seed"])
        for iteration in (3, 6):
            figures = dict.fromkeys(("success", "crossing", "right", "wrong", "seconds"), 0.5)
            yield {**one, "iteration": iteration, **figures}

    path = tmp_path / "rows.csv"
    complete(path, asked[:1], 6, run)
    first = path.read_text()
    assert len(complete(path, asked[:1], 6, run)) == 2 and path.read_text() == first and made == [0]
    assert len(complete(path, asked, 6, run)) == 4 and made == [0, 1]
    assert len(complete(path, asked, 9, run)) == 4 and made == [0, 1, 0, 1]  # in place of the shorter ones


@pytest.mark.parametrize("iterations", [0, 10])
def test_a_run_that_would_end_without_its_evaluation_is_refused(iterations, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["stitching", "--iterations", str(iterations)])
    with pytest.raises(SystemExit):
        main()
    assert "--iterations must be a multiple of 3" in capsys.readouterr().err


def test_the_page_shows_the_table_and_the_picture_of_its_rows():
    research = Path(__file__).parents[1]
    rows = read_rows(research / "rows" / "stitching.csv")
    page = (research / "stitching.md").read_text(encoding="utf-8")
    assert table(rows) in page and "(figures/stitching.svg)" in page
    assert (research / "figures" / "stitching.svg").read_text(encoding="utf-8") == picture(rows)
