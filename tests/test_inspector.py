"""What a run records, and what ``rllib inspect`` reads of it and writes, without a browser."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import episode, make_run, result, transition, write_iteration, write_lines

from rllib_nlac.command.inspect import inspect
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.diagnostics import record as record_module
from rllib_nlac.diagnostics.record import (
    EVALUATION,
    ITERATION,
    Learned,
    Record,
    RecordSettings,
    Said,
    age,
    author,
    plain,
    transition_lines,
)
from rllib_nlac.inspector.bundle import Texts, bundle, columns, thinned
from rllib_nlac.inspector.page import packed, render
from rllib_nlac.inspector.run import STOPPED, curves_of, read_run, trial_of
from rllib_nlac.types import BellmanTarget, Critique, Future, Generation, Message, Refinement, Transition, Weights


def record(folder: Path, said: list | None = None, **settings) -> Record:
    return Record(folder, RecordSettings(**settings), (said if said is not None else []).append)


def numbers(folder: Path, kind: str = ITERATION) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in (folder / "transitions").glob(f"{kind}_*.jsonl"))


def pair(number: int, won: bool = True) -> tuple[BellmanTarget, Refinement]:
    generation = Generation((1, 2), (3, 4), np.array([-0.5, np.nan]), True, 3, Weights.POLICY)
    t = Transition(
        *(number, "Env", (Message("user", "s"),), "a", generation, "o", 1.0, True, False, won, 1.0),
        episode="e",
        turn=2,
        task_seed=7,
    )
    future = Future("well", True)
    target = BellmanTarget(t, generation, future, None, None, (1,))
    return target, Refinement(
        t, (future, Future("badly", False)), Critique("c", False, "r", "f"), "b", generation, False, "refined"
    )


class TestRecord:
    def test_a_batch_is_recorded_with_all_that_is_known(self):
        targets, refinements = zip(pair(1), pair(2), pair(1), strict=True)
        learned = Learned(
            *(np.array(values) for values in ([0.1, np.inf, 9], [np.nan, 0.2, 9], [0.3, np.nan, 9], [1.0, 0.5, 9]))
        )
        by = {"future": Weights.POLICY, "critique": Weights.INITIAL, "target": Weights.TARGET}
        said = Said(targets, refinements, by, {1: [("future", "noise")]}, {}, 7)
        first, second = transition_lines(5, said, learned, 8)
        assert (first["id"], first["turn"], first["age"], first["predicted"]) == (1, 2, 4, 0.5)
        assert first["by"] == {
            **{key: ["policy", 3] for key in ("action", "target", "refinement")},
            "future": ["policy", 7],
            "critique": ["initial", 0],
        }
        assert first["unparsed"] == [{"role": "future", "text": "noise"}] and second["unparsed"] == []
        assert (first["critic_loss"], first["policy_loss"], first["stopped"]) == (0.1, None, False)
        assert (second["critic_loss"], second["priority"], second["stopped"]) == (None, None, True)
        assert len(transition_lines(5, said, None, 1)) == 1
        del by["target"]  # as where the package puts targets together
        assert transition_lines(5, said, None, 1)[0]["by"]["target"] == ["package", 0]

    def test_files_are_whole_and_written_anew_after_a_restart(self, tmp_path):
        for text in ("lost", "kept"):
            record(tmp_path).write(ITERATION, 3, [{"text": text}])
        (file,) = (tmp_path / "transitions").iterdir()
        assert json.loads(file.read_text()) == {"text": "kept"}

    def test_it_thins_out_and_spans_the_run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(record_module, "MAX_BYTES", 2000)
        own = record(tmp_path)
        for iteration in range(1, 101):
            if own.takes(iteration):
                own.write(ITERATION, iteration, [{"text": "x" * 150}])
            if iteration % 10 == 0:
                own.write(EVALUATION, iteration, [{"text": "x" * 50}])
        files = list((tmp_path / "transitions").iterdir())
        assert 1000 < sum(file.stat().st_size for file in files) <= 2000
        kept = numbers(tmp_path)
        assert len({b - a for a, b in pairwise(kept)}) == 1 and kept[0] <= 32 and kept[-1] >= 84
        assert numbers(tmp_path, EVALUATION)[-1] == 100
        # Another process goes on with the same stride.
        assert record(tmp_path)._stride == own._stride > 1

    def test_zero_records_nothing(self, tmp_path):
        own = record(tmp_path, transitions=0)
        own.write_run({})
        assert not own.takes(1) and list(tmp_path.iterdir()) == []

    def test_numbers_that_json_lacks_and_strange_values_are_written_all_the_same(self, tmp_path):
        strange = {
            "nan": float("nan"),
            "array": np.array([1.0, np.inf]),
            "flag": np.True_,
            "text": "\ud800 \u202e",
            "thing": Path("x"),
            1: (2,),
        }
        record(tmp_path).write(ITERATION, 1, [strange])
        line = json.loads((tmp_path / "transitions" / "iteration_00000001.jsonl").read_text())
        assert line == {"nan": None, "array": [1.0, None], "flag": True, "text": "\ud800 \u202e", "thing": "x", "1": [2]}

    def test_the_evaluations_that_are_left_span_the_run(self, tmp_path, monkeypatch):
        """Fails where early ones are halved again and again, so that in the end only late ones are left."""
        monkeypatch.setattr(record_module, "MAX_BYTES", 20_000)
        made = record(tmp_path)
        for iteration in range(2, 402, 2):
            made.write(EVALUATION, iteration, [{"text": "x" * 500}])
        kept = [int(path.stem.rpartition("_")[2]) for path in sorted((tmp_path / "transitions").glob("evaluation_*"))]
        gaps = [b - a for a, b in pairwise(kept)]
        assert kept[0] == 2 and kept[-1] == 400 and len(kept) > 20 and max(gaps) <= 4 * 400 / len(kept)

    def test_a_logged_action_was_written_by_nobody_here(self):
        played, logged = (replace(pair(1)[0].transition, task_seed=seed) for seed in (7, None))
        assert (author(played), age(played, 9)) == (["policy", 3], 6)
        assert (author(logged), age(logged, 9)) == (["input", 0], None)

    @settings(max_examples=50)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_whatever_is_made_plain_is_strict_json(self, value):
        assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)

    def test_a_config_names_what_is_wrong(self, config):
        with pytest.raises(ValueError, match=r"config\.record\['tokens'\] is -1 and must not be negative"):
            config.reporting(record={"tokens": -1}).validate()
        with pytest.raises(ValueError, match=r"config\.record: .*transitons.*transitions"):
            config.reporting(record={"transitons": 1}).validate()


class TestReading:
    def test_a_run(self, tmp_path):
        run = read_run(make_run(tmp_path / "run"))
        kinds = [line["kind"] for line in run.lines]
        assert (kinds.count("transition"), kinds.count("state"), kinds.count("prediction"), len(run.episodes)) == (40, 4, 8, 6)
        assert run.iterations == [1, 2, 3, 4] and run.curves["env_runners/success_rate"] == [0.1, 0.2, 0.3, 0.4]
        assert run.curves["evaluation/env_runners/success_rate"] == [None, 0.2, None, 0.4]
        assert "learners/default_policy/policy_loss" not in run.curves  # NaN all along
        assert run.notices == [(2, "most answers do not parse")] and [each["iteration"] for each in run.evaluations] == [2, 4]

    @pytest.mark.parametrize(("iterations", "interval"), [(2001, 4), (5999, 3), (6000, 1)])
    def test_of_a_long_run_evaluations_stay(self, iterations, interval):
        """Fails where rows are thinned out whatever they tell: an interval that fits badly would lose all evaluations."""
        due = [number % interval == 0 for number in range(1, iterations + 1)]
        iterations, curves = curves_of(
            [result(number, is_due) | {"config": {"evaluation_interval": interval}} for number, is_due in enumerate(due, 1)]
        )
        kept = sum(value is not None for value in curves["evaluation/env_runners/success_rate"])
        assert min(sum(due), 2000) >= kept >= min(sum(due), 1000)
        assert len(iterations) <= 4000 and iterations[-1] == len(due)

    def test_what_a_run_had_come_to_before_it_went_on_from_an_earlier_checkpoint_is_left_out(self, tmp_path):
        folder = make_run(tmp_path / "run")
        write_lines(folder / "result.json", [result(number, number % 2 == 0) for number in (1, 2, 3, 4, 2)])
        seen = {each["iteration"] for each in [*read_run(folder).lines, *read_run(folder).episodes]}
        run = read_run(folder)
        assert run.iterations == [1, 2] and [each["iteration"] for each in run.evaluations] == [2] and seen == {1, 2}
        write_iteration(folder, 3)  # of the iteration that is under way
        assert {each["iteration"] for each in read_run(folder).lines} == {1, 2, 3}

    def test_evaluations_that_found_the_same_are_several(self, tmp_path):
        """As of a method that wins nothing. Fails where figures alone tell one from the next."""
        folder, config = make_run(tmp_path / "run"), {"config": {"evaluation_interval": 2}}
        rows = [result(2, True) | {"training_iteration": number} | config for number in (2, 3, 4, 5, 6)]
        write_lines(folder / "result.json", rows)
        assert [each["iteration"] for each in read_run(folder).evaluations] == [2, 4, 6]

    def test_what_a_resumed_run_repeats_counts_once_and_the_later_one(self, tmp_path):
        """Tune appends to its results. Fails where rows count and not iterations: the page sums seconds and stopped steps."""
        folder = make_run(tmp_path / "run")
        rows = [result(number, number == 2) for number in (1, 2, 3, 2, 3, 4)]
        for place, row in enumerate(rows):
            row["env_runners"]["success_rate"] = place / 10
            row["learners"]["default_policy"]["num_stopped_steps"] = 1
        write_lines(folder / "result.json", rows)
        run = read_run(folder)
        assert run.iterations == [1, 2, 3, 4] and run.curves["env_runners/success_rate"] == [0, 0.3, 0.4, 0.5]
        assert run.sums[STOPPED] == 4 and run.sums["seconds/play"] == 4
        assert [each["iteration"] for each in run.evaluations] == [2] and len(run.notices) == 1 and run.unread == 0

    def test_sums_are_those_of_all_results(self, tmp_path):
        """Fails where they are taken over the rows of the curves: a third of the seconds, and no step that was stopped."""
        folder = make_run(tmp_path / "run")
        rows = [{"training_iteration": i, "seconds": {"play": 1.0, "waves": math.nan}} for i in range(1, 4002)]
        rows[999] |= {"learners": {"default_policy": {"num_stopped_steps": 1, "loss": 2.0}}, "secondsly": 1, "learn": 1}
        write_lines(folder / "result.json", rows)
        (own,) = bundle([read_run(folder)])["runs"]
        assert own["sums"] == {STOPPED: 1, "seconds/play": 4001} and len(own["iterations"]) <= 2000

    @pytest.mark.parametrize("number", [0, -1, True, 1.5, "2", 10**10, 10**400, float("nan"), None])
    def test_results_of_what_is_no_iteration_are_left_out_and_counted(self, tmp_path, number):
        folder = make_run(tmp_path / "run")
        write_lines(folder / "result.json", [result(1, False), result(2, False) | {"training_iteration": number}])
        run = read_run(folder)
        assert run.iterations == [1] and run.unread == 1

    def test_whole_numbers_that_a_browser_would_round_are_rounded_here(self, tmp_path):
        folder = make_run(tmp_path / "run")
        values = (2**53 - 1, 10**20 + 1, -(10**20) - 1, 10**400)
        write_lines(folder / "result.json", [result(i, False) | {"time_total_s": v} for i, v in enumerate(values, start=1)])
        found = read_run(folder).curves["time_total_s"]
        assert found == [2**53 - 1, 1e20, -1e20, None] and list(map(type, found)) == [int, float, float, type(None)]

    def test_an_evaluation_that_the_next_iterations_tell_again_is_one(self, tmp_path):
        folder = make_run(tmp_path / "run")
        again = result(2, True) | {"training_iteration": 3}
        nothing = {"training_iteration": 4, "evaluation": {"env_runners": {"success_rate": float("nan")}}}
        write_lines(folder / "result.json", [result(1, False), result(2, True), again, nothing])
        run = read_run(folder)
        assert [each["iteration"] for each in run.evaluations] == [2]
        assert run.curves["evaluation/env_runners/success_rate"] == [None, 0.2, None, None]

    def test_what_is_no_line_of_a_record_is_left_out_and_counted(self, tmp_path):
        folder = make_run(tmp_path / "run")
        file = folder / "transitions" / "iteration_00000001.jsonl"
        file.write_bytes(
            file.read_bytes() + b'not json\n[1]\n"text"\n{"kind": "other"}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"kind": "trans'
        )
        run = read_run(folder)
        assert run.unread == 6 and sum(line["kind"] == "transition" for line in run.lines) == 40

    @pytest.mark.parametrize(
        "value",
        [
            None,
            5,
            "text",
            [],
            [1],
            [None],
            ["a"],
            {"a": 1},
            {"text": 5, "success": "no"},
            [{"role": 1, "content": None}],
            [{"role": "user"}],
            [{"role": ["user"], "content": "x"}],
            [float("nan")],
            float("inf"),
            10**400,
        ],
    )
    def test_wrong_values_in_any_field_do_no_harm(self, tmp_path, value):
        line = transition(1, 0)
        lines = [line | {name: value} for name in line if name != "kind"] + [{"kind": "transition"}, {"kind": "state"}]
        table = columns(lines, Texts())
        assert {len(column) for column in table.values()} == {len(lines)}
        json.dumps(table, allow_nan=False)

        folder, line = make_run(tmp_path / "run"), episode(2, 0)
        lines = [line | {name: value} for name in line if name != "kind"] + [{"kind": "episode"}, line]
        write_lines(folder / "transitions" / "evaluation_00000002.jsonl", lines)
        facts = json.loads((folder / "transitions" / "run.json").read_text())
        (folder / "transitions" / "run.json").write_text(json.dumps(dict.fromkeys(facts, value)))
        run = read_run(folder)
        assert run.unread + len(run.episodes) == len(lines) + 3 and run.unread >= 1
        json.dumps(bundle([run]), allow_nan=False)

    @pytest.mark.parametrize(
        "field",
        [
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": ["user"], "content": "Guess."}]},
            {"messages": "abc"},
            {"messages": [None]},
            {"iteration": "x"},
            {"iteration": None},
            {"rewards": ["a"]},
            {"rewards": 5},
        ],
        ids=str,
    )
    def test_what_is_no_episode_is_left_out_and_counted(self, tmp_path, field):
        folder = make_run(tmp_path / "run")
        write_lines(folder / "transitions" / "evaluation_00000002.jsonl", [episode(2, 0) | field, episode(2, 1)])
        run = read_run(folder)
        assert run.unread == 1 and [each["task"] for each in run.episodes] == [1, 0, 1, 2]

    def test_an_episode_with_rewards_that_json_lacks_or_without_any_is_shown(self, tmp_path):
        folder = make_run(tmp_path / "run")
        odd = episode(2, 0, rewards=[float("nan"), 1.0], task_seed=float("inf"))
        lines = [odd, episode(2, 1, rewards=[]), episode(2, 2, rewards=[], messages=[])]
        write_lines(folder / "transitions" / "evaluation_00000002.jsonl", lines)
        (own,) = bundle([read_run(folder)])["runs"]
        assert [each["rewards"] for each in own["episodes"][:3]] == [[0, 1.0], [], []]
        assert own["episodes"][0]["task_seed"] is None and own["episodes"][2]["messages"] == []
        json.dumps(own, allow_nan=False)

    def test_a_trial_is_found_and_several_are_named(self, tmp_path):
        run = make_run(tmp_path / "experiment" / "trial_1")
        assert trial_of(tmp_path / "experiment") == trial_of(run) == run
        make_run(tmp_path / "experiment" / "trial_2")
        with pytest.raises(ValueError, match=r"has 2 trials: give one of them, such as .*trial_2"):
            trial_of(tmp_path / "experiment")
        with pytest.raises(FileNotFoundError, match=r"neither result\.json nor transitions/ is there"):
            trial_of(run / "transitions")

    def test_too_many_transitions_thin_out_evenly(self):
        lines = [transition(iteration, number) for iteration in range(1, 6) for number in range(10 if iteration < 5 else 2)]
        kept = thinned(lines, 22)
        assert [sum(line["iteration"] == i for line in kept) for i in range(1, 6)] == [5, 5, 5, 5, 2]
        assert len(thinned(lines, 3)) <= 3 and thinned(lines, 1000) is lines
        buffer = [transition(0, number) for number in range(1000)]  # all of one iteration, the oldest first
        assert [line["id"] // 1_000_000 for line in thinned(buffer, 10)] == list(range(0, 1000, 100))

    def test_texts_are_kept_once_and_come_back(self, tmp_path):
        data = bundle([read_run(make_run(tmp_path / "run"))])
        assert len(set(data["texts"])) == len(data["texts"])
        rows, texts = data["runs"][0]["rows"], data["texts"]
        line = transition(1, 4, 1)
        place = next(i for i, (a, b) in enumerate(zip(rows["iteration"], rows["id"], strict=True)) if (a, b) == (1, line["id"]))
        assert texts[rows["action"][place]] == line["action"] and texts[rows["critique"][place][0]] == line["critique"]["text"]
        assert [texts[i] for i in rows["state"][place][1::2]] == [each["content"] for each in line["state"]]


class TestPage:
    def test_it_holds_the_data_and_nothing_from_elsewhere(self, tmp_path):
        data = bundle([read_run(make_run(tmp_path / "run", more=(transition(99, 0, action="</script><b>"),)))])
        page = render(packed(data), '"><script>alert(1)</script> {{DATA}}').decode()
        assert page.count("<script") == page.count("</script>") == 2 and "<b>" not in page
        assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", page)
        encoded = re.search(r'id="data">([^<]*)<', page)[1]
        assert json.loads(gzip.decompress(base64.b64decode(encoded))) == json.loads(json.dumps(data))
        assert "default-src 'none'" in page and "connect-src 'none'" in page and "unsafe" not in page

    def test_what_utf8_cannot_hold_does_no_harm_anywhere(self, tmp_path):
        folder = make_run(tmp_path / "run")
        write_lines(folder / "result.json", [result(1, True) | {"notices": "odd \ud800", "seconds": {"play\ud800": 1.0}}])
        data = packed(bundle([read_run(folder)]))
        assert "odd ?" in gzip.decompress(data).decode() and b"odd ?" in render(data, "odd \ud800")

    def test_equal_runs_give_equal_pages(self, tmp_path):
        folder = make_run(tmp_path / "run")
        page = packed(bundle([read_run(folder)]))
        assert page == packed(bundle([read_run(folder)])) and page[4:8] == bytes(4)  # where gzip writes the time


class TestCommand:
    def test_it_writes_the_page_of_two_runs_and_says_where(self, tmp_path, capsys):
        folder = make_run(tmp_path / "run")
        inspect([folder, folder], tmp_path / "page.html", False, 100, Terminal())
        assert (tmp_path / "page.html").stat().st_size > 50_000 and "40 transitions recorded" in capsys.readouterr().out
        begun = {**result(1, False), "before_training": result(2, True)["evaluation"]}
        write_lines(folder / "result.json", [begun, result(2, True)])
        inspect([folder], tmp_path / "page.html", False, 100, Terminal())
        assert "2 iterations" in capsys.readouterr().out  # the evaluation before training is none
        with pytest.raises(ValueError, match=r"cannot write .*Give another --output"):
            inspect([folder], tmp_path / "page.html" / "x", False, 100, Terminal())

    def test_without_a_name_it_takes_those_of_the_runs(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        runs = [make_run(tmp_path / "runs" / name) for name in ("one", "other")]
        inspect(runs, None, False, 100, Terminal())
        assert [path.name for path in tmp_path.glob("*.html")] == ["one-and-other.html"]


@pytest.fixture()
def small(config):
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=24, minibatch_size=12, tau=0.5)
    config.evaluation(evaluation_interval=2, evaluation_duration=8, evaluation_critic={"states": 6})
    config.reporting(record={"transitions": 16, "tokens": 4, "episodes": 3})
    config.num_envs_per_env_runner = 8
    return config


def test_a_real_run_records_itself_and_goes_on_where_it_cannot(small, tmp_path, ray_session, lent_engine):
    algorithm = small.build_algo()
    try:
        results = [algorithm.train() for _ in range(2)]
        run = read_run(algorithm.recorder.record.folder.parent)
        every = [line for line in run.lines if line["kind"] == "transition"]
        assert {line["iteration"]: sum(line["iteration"] == each["iteration"] for each in every) for line in every} == {
            1: 16,
            2: 16,
        }
        assert run.unread == 0 and {line["number"] for line in run.lines if line["kind"] == "state"} == {1, 2, 3}
        predictions = Counter(line["iteration"] for line in run.lines if line["kind"] == "prediction")
        assert predictions == {0: 6, 2: 6} and Counter(each["iteration"] for each in run.episodes) == {0: 3, 2: 3}
        assert run.facts["env_config"]["max_turns"] == 6 and run.facts["config"]["lr"] == [0.001, 1e-06]
        assert all(line["priority"] > 0 and line["task_seed"] is not None and line["importance"] <= 1 for line in every)
        strips = [(line, name, strip) for line in every for name, strip in (line["tokens"] or {}).items()]
        assert len({(line["iteration"], line["id"]) for line, *_ in strips}) == 8
        for line, name, strip in strips:
            assert len(strip["text"]) == len(strip["policy"]) == len(strip["target"])
            if name == "action" and line["age"] == 0:  # played by the very weights that are asked
                assert strip["played"] == pytest.approx(strip["policy"], abs=1e-3)
            if line["iteration"] == 1:  # θ̄ begins as θ
                assert strip["target"] == pytest.approx(strip["policy"], abs=1e-3)
            else:
                assert strip["target"] != strip["policy"]
            text = line[name]["text"] if name == "target" else line[name]
            assert "".join(strip["text"]).partition("<|end|>")[0].removeprefix("Future:").strip() == text.strip()
        assert results[-1]["seconds"]["record"] > 0

        (tmp_path / "file").write_text("in the way")
        folder, algorithm.recorder.record.folder = algorithm.recorder.record.folder, tmp_path / "file" / "transitions"
        said = [algorithm.train().get("notices", "") for _ in range(2)]
        assert said[0].count("the record for rllib inspect has a gap") == 1 and "has a gap" not in said[1]
        algorithm.recorder.record.folder = folder
        algorithm.train()
        assert numbers(folder.parent) == [1, 2, 5]

        checkpoint = Path(algorithm.save_to_path(folder.parent / "checkpoint_000001"))
        assert trial_of(checkpoint) == folder.parent
    finally:
        algorithm.stop()
