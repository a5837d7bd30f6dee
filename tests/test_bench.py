"""The table of ``make bench``: what it says of figures and failures, and that it asks benchmarks for what they take."""

from __future__ import annotations

import importlib
import math
import sys

import pytest

from benchmarks import bench, connections, figures
from benchmarks.bench import BENCHMARKS, Benchmark, Outcome, main, run, table
from benchmarks.figures import Figure, Goal, hand_over, read

ENGINE = Benchmark("engine", ("--rounds", "3"))
FIGURES = (
    Figure("a ratio", 0.834, "", 0.9, at_least=True),
    Figure("a size", 0.54, "MB", 5.0, at_least=False),
    Figure("a speed", 5385.2, "steps/s"),
)


def cells(text: str) -> list[list[str]]:
    """The table's rows, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize(
    ("value", "at_least", "reached"),
    [(0.89, True, False), (0.9, True, True), (0.91, True, True), (0.89, False, True), (0.9, False, True), (0.91, False, False)],
)
def test_a_goal_is_reached_from_its_side(value, at_least, reached):
    assert Figure("", value, "", 0.9, at_least).is_reached is reached


def test_what_is_no_number_reaches_no_goal_and_without_a_goal_nothing_is_reached():
    assert not Figure("", math.nan, "", 1.0, at_least=True).is_reached
    assert not Figure("", math.nan, "", 1.0, at_least=False).is_reached
    assert Figure("", 1.0).is_reached is None


def test_the_table_names_goals_that_are_reached_and_missed_and_the_command_once():
    assert cells(table({ENGINE: Outcome(FIGURES, 31.2)})) == [
        ["a ratio", "0.834", "≥ 0.9", "no", "31", "`python -m benchmarks.engine --rounds 3`"],
        ["a size", "0.54 MB", "≤ 5 MB", "yes", "", ""],
        ["a speed", "5,385 steps/s", "-", "-", "", ""],
    ]


def test_a_failure_stands_below_what_was_measured_before():
    sync = Benchmark("sync")
    rows = cells(table({ENGINE: Outcome(FIGURES[:1], 3.0, "exit code 3"), sync: Outcome((), 7.0, "exit code 1")}))
    assert [row[0] for row in rows] == ["a ratio", "**engine failed**: exit code 3", "**sync failed**: exit code 1"]
    assert rows[1][3:] == ["no", "", ""] and rows[2][3:] == ["no", "7", "`python -m benchmarks.sync`"]


def test_figures_come_back_as_they_were_handed_over(tmp_path):
    file = tmp_path / "figures.jsonl"
    assert read(file) == ()
    hand_over(file, *FIGURES[:2])
    hand_over(file, FIGURES[2])
    assert read(file) == FIGURES
    hand_over(None, FIGURES[2])
    assert read(file) == FIGURES


def test_the_others_go_on_when_one_fails(monkeypatch, capsys):
    asked = []

    def failing(command):
        asked.append(command[2])
        return Outcome((), 1.0, "exit code 3", "the last words") if "engine" in command[2] else Outcome(FIGURES[1:], 1.0)

    monkeypatch.setattr(bench, "run", failing)
    assert main([]) == 1
    assert asked == [f"benchmarks.{benchmark.name}" for benchmark in BENCHMARKS]
    out, err = capsys.readouterr()
    assert "engine failed: exit code 3. Its last lines:\nthe last words\n" in err and err.count("failed") == 1
    assert len(cells(out)) == 2 * (len(BENCHMARKS) - 1) + 1
    assert out.splitlines()[0].split()[1:3] == ["cores,", "load"]


def test_a_missed_goal_is_no_failure_and_only_those_named_are_run(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(bench, "run", lambda command: asked.append(command) or Outcome(FIGURES, 1.0))
    assert main(["--only", "learner", "engine"]) == 0
    assert [command[1:] for command in asked] == [
        ["-m", "benchmarks.engine"],
        ["-m", "benchmarks.learner", "--budgets", "2048"],
    ]
    with pytest.raises(SystemExit):
        main(["--only", "engines"])
    assert "invalid choice: 'engines'" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_each_benchmark_takes_the_options_that_it_is_given(benchmark, tmp_path):
    module = importlib.import_module(f"benchmarks.{benchmark.name}")
    usual = vars(module.options().parse_args([]))
    asked = vars(module.options().parse_args([*benchmark.options, "--figures", str(tmp_path / "figures.jsonl")]))
    assert usual["figures"] is None and asked["figures"] == tmp_path / "figures.jsonl"
    changed = {key for key in usual if usual[key] != asked[key]} - {"figures"}
    assert {f"--{key}" for key in changed} == {word for word in benchmark.options if word.startswith("--")}


def test_every_goal_is_held_against_a_figure_of_a_benchmark_of_the_table():
    modules = [importlib.import_module(f"benchmarks.{benchmark.name}") for benchmark in BENCHMARKS]
    goals = {name for name, value in vars(figures).items() if isinstance(value, Goal)}
    assert goals and not [name for name in goals if not any(hasattr(module, name) for module in modules)]
    learner = importlib.import_module("benchmarks.learner")
    (given,) = [benchmark for benchmark in BENCHMARKS if benchmark.name == "learner"]
    assert learner.BUDGET in learner.options().parse_args(given.options).budgets


@pytest.mark.process
def test_a_benchmark_in_a_process_of_its_own(capsys):
    hands_over = 'import sys; open(sys.argv[2], \'w\').write(\'{"name": "a", "value": 1.5}\\n\'); '
    good = run([sys.executable, "-c", hands_over + "print('text')"])
    assert (good.figures, good.failure) == ((Figure("a", 1.5),), "")
    assert capsys.readouterr().err == "text\n"
    bad = run([sys.executable, "-c", hands_over + "[print(n) for n in range(50)]; sys.exit('no more')"])
    assert (bad.figures, bad.failure) == ((Figure("a", 1.5),), "exit code 1")
    assert bad.last_lines.splitlines() == [*map(str, range(31, 50)), "no more"]
    assert run([sys.executable, "-c", ""]).failure == "it handed over no figures"
    late = run([sys.executable, "-c", "import time; print('begun'); time.sleep(60)"], limit=1.0)
    assert late.failure == "did not end within 1 s" and late.last_lines == "begun" and late.seconds < 20


@pytest.mark.process
def test_each_way_to_connect_an_environment_plays_all_of_its_turns(capsys):
    """Fails where an episode is lost or ends early: its times would be those of something else."""
    connections.main(["--turns", "3", "--repetitions", "1", "--at-once", "1", "2"])
    rows = [line.rsplit(maxsplit=5) for line in capsys.readouterr().out.splitlines()[1:]]
    names = ["plain text", "native tool call", "MCP tool", "OpenEnv step", "harness"]
    assert [(name, at_once) for name, at_once, *_ in rows] == [(name, count) for name in names for count in ("1", "2")]
    assert all(0 < float(median) <= float(late) for _, _, median, late, *_ in rows)
