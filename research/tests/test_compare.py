"""The comparison: its plan, what it reads from runs, and one real cell by its command."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise, takewhile

import numpy as np
import pytest
import yaml

from research.compare import is_done, main, report, rows_of
from research.compare_plan import HERE, Cell, Plan
from research.compare_tables import COLUMNS, evaluations, picture, read_rows, summary, table
from research.critic import named, next_progress, told_by_words
from research.rows import generated_tokens
from research.svg import Chart, Line
from research.tiny.worlds import TWENTY_QUESTIONS
from rllib_nlac.algorithm.model_defaults import SHIPPED_MODELS
from rllib_nlac.algorithms import OURS, STOCK_ON_TEXT
from rllib_nlac.command.experiment import load_experiments
from rllib_nlac.diagnostics.calibration import auc
from rllib_nlac.nlac import PRESETS
from rllib_nlac.types import Future, Generation, Message, Transition

ROWS = HERE / "rows" / "compare"


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    models = tmp_path_factory.mktemp("models")
    plan = Plan(HERE / "compare.yaml", models)
    for name, world in plan.worlds.items():
        if "build" in world:  # in place of what the command would build
            (models / name).symlink_to(TWENTY_QUESTIONS.folder)
    return plan


def test_a_model_that_a_world_builds_is_spoken_to_as_the_shipped_one(plan):
    """Fails where its folder is all that an experiment says: a folder is spoken to by the default prompts."""
    built = [world for world, place in plan.worlds.items() if "build" in place]
    assert {plan.kind(world) for world in built} == {"twenty_questions"}
    for world in built:
        for cell in plan.cells("runs", [world], [], seeds=1):
            experiment = cell.experiment
            config = {**OURS, **STOCK_ON_TEXT}[experiment["run"]].get_default_config().update_from_dict(experiment["config"])
            shipped = SHIPPED_MODELS["tiny"]
            for name in ("prompts", "max_action_tokens", "max_future_tokens", "max_critique_tokens"):
                if hasattr(config, name):
                    assert getattr(config.model_defaults, name) == getattr(shipped, name), (cell.name, name)
            assert config.model_path == str(plan.models / world)


@pytest.mark.parametrize("runs", ["runs", "quick"])
def test_every_cell_is_an_experiment_that_rllib_train_takes(plan, runs, tmp_path, ray_session):
    cells = plan.cells(runs, [], [], seeds=1)
    assert cells and len({cell.name for cell in cells}) == len(cells)
    # Of those that differ in the number of the house alone, one.
    alike = {re.sub(r'"house": \d+', "", json.dumps(cell.experiment, sort_keys=True)): cell for cell in cells}
    for cell in alike.values():
        (tmp_path / "cell.yaml").write_text(yaml.safe_dump({cell.name: cell.experiment}))
        (experiment,) = load_experiments(tmp_path / "cell.yaml")
        assert experiment.name == cell.name and experiment.config["seed"] == cell.seed


def test_methods_of_a_world_share_model_task_and_episodes(plan):
    for world in plan.worlds:
        cells = [
            cell for cell in plan.cells("runs", [world], [], seeds=1) if "evaluation_interval" in cell.experiment["config"]
        ]
        cells = [cell for cell in cells if "offline" not in cell.method]
        usual = [cell for cell in cells if "env_config" not in plan.methods[cell.method]]
        for key in ("env_config", "language_model", "history_turns", "prompts"):
            values = [json.dumps(cell.experiment["config"].get(key)) for cell in usual]
            assert len(set(values)) <= 1, (world, key)
        cells = [cell for cell in cells if "as long" not in cell.method]
        assert len({json.dumps(cell.experiment["stop"]) for cell in cells}) <= 1


def test_a_run_that_is_named_longer_is_and_nothing_else(plan):
    usual, longer = (plan.cell("some_sense", f"PPO (RLlib){name}", 0).experiment for name in ("", ", four times as long"))
    key = "env_runners/num_episodes_lifetime"
    assert longer.pop("stop")[key] == 4 * usual.pop("stop")[key] and longer == usual


@pytest.mark.parametrize("world", ["ablations", "house_4"])
def test_the_last_weights_are_evaluated_however_many_episodes_an_iteration_has(plan, world):
    """An iteration may end after so many turns.

    Fails where the table tells of weights before the last.
    """
    for method in ("PPO (RLlib)", "PPO with a reward for progress"):
        assert plan.cell(world, method, 0).experiment["config"]["evaluation_interval"] == 1, method


def test_the_main_cells_have_five_seeds_and_no_cell_has_less_than_three(plan):
    seeds: dict[tuple[str, str], int] = {}
    for cell in plan.cells("runs", [], [], None):
        seeds[cell.world, cell.method] = seeds.get((cell.world, cell.method), 0) + 1
    assert all(count >= 3 for (_, method), count in seeds.items() if method != "base model")
    for world in ("twenty_questions", "house_1"):
        assert min(seeds[world, "NLAC"], seeds[world, "PPO (RLlib)"]) >= 5


def test_the_path_from_the_paper_to_the_preset_takes_every_key_of_it_once(plan):
    steps = [plan.methods["NLAC, as in the paper"]["config"]]
    steps += [method["config"] for name, method in plan.methods.items() if name.startswith("NLAC, path ")]
    assert len(steps) == 6
    for before, after in pairwise(steps):
        changed = {key for key in after if before.get(key) != after[key]}
        assert changed and before.keys() <= after.keys() and changed.isdisjoint(set(before) - set(steps[0]))
    example = plan.cell("house_1", "NLAC", 0).experiment["config"]
    left = {key for key, value in {**PRESETS["long_horizon"], "tau": example["tau"]}.items() if steps[-1].get(key) != value}
    assert left == {"replay_buffer_config"} and steps[-1]["preset"] == "paper" and not PRESETS["paper"]


def test_every_method_gets_the_same_search(plan):
    """Baselines wherever they stand beside NLAC; NLAC's settings in the house were found by other means."""
    searched: dict[str, Counter] = {}
    for cell in plan.search_cells([], []):
        searched.setdefault(cell.world, Counter())[cell.method.partition(" #")[0]] += 1
    baselines = {"PPO (RLlib)": 6, "GRPO": 6, "RFT": 6}
    assert searched.pop("twenty_questions") == Counter({"NLAC": 6, **baselines})
    paid = {f"{name} with a reward for progress": 6 for name in ("PPO", "GRPO", "RFT")}
    assert searched == {
        "some_sense": Counter(baselines),
        "house_1": Counter({**baselines, **paid}),
        "house_1_depth_3": Counter({"RFT with a reward for progress": 6}),  # whose bound depends on the depth
        "ablations": Counter({"NLAC, hindsight": 6}),
    }
    stops = {(c.world, json.dumps(c.experiment["stop"])) for c in plan.search_cells([], [])}
    assert len(stops) == len(searched) + 1  # as many episodes for all of a world, and twenty questions was popped


def test_what_was_chosen_was_searched(plan):
    candidates = yaml.safe_load((HERE / "compare.yaml").read_text())["search"]["candidates"]
    chosen = {name: method for name, method in plan.methods.items() if "chosen" in method}
    for name, method in chosen.items():
        # Of the method itself, or of the one that it is with more episodes or another reward.
        like = {n: kinds for n, kinds in candidates.items() if plan.methods[n]["file"] == method["file"]}
        searched = like.get(name) or next(iter(like.values()))
        assert all(choice in searched[plan.kind(world)] for world, choice in method["chosen"].items()), name
    assert chosen


def test_a_choice_for_a_world_goes_before_that_for_its_kind(plan, monkeypatch):
    choices = {"twenty_questions": {"lr": 8.0}, "some_sense": {"lr": 9.0}}
    monkeypatch.setitem(plan.methods["RFT"], "chosen", choices)
    worlds = ("twenty_questions", "some_sense", "random_advice")
    assert [plan.cell(world, "RFT", 0).experiment["config"]["lr"] for world in worlds] == [8.0, 9.0, 8.0]


def test_a_candidate_does_not_depend_on_what_was_chosen(plan, monkeypatch):
    before = {cell.name: cell.experiment for cell in plan.search_cells([], ["PPO (RLlib)"])}
    monkeypatch.setitem(plan.methods["PPO (RLlib)"], "chosen", {"twenty_questions": {"lr": 9.0, "num_epochs": 99}})
    assert {cell.name: cell.experiment for cell in plan.search_cells([], ["PPO (RLlib)"])} == before
    (cell,) = plan.cells("quick", ["twenty_questions"], ["PPO (RLlib)"], seeds=1)
    assert cell.experiment["config"]["lr"] == 9.0


def result(iteration: int, episodes: int, success: float, interval: int = 2) -> dict:
    return {
        "training_iteration": iteration,
        "time_total_s": 10.0 * iteration,
        "config": {"evaluation_interval": interval},
        "env_runners": {"num_episodes_lifetime": episodes, "success_rate": success, "num_generated_tokens": 100},
        "language_stages": {"num_generated_tokens": 10},
        "evaluation": {"env_runners": {"success_rate": success / 2, "subgoals": {"chest_2": success / 2, "chest_1": success}}},
    }


def write(folder, cell: Cell, results: list[dict]) -> None:
    (folder / cell.name / "trial").mkdir(parents=True, exist_ok=True)
    (folder / cell.name / "trial" / "result.json").write_text("\n".join(map(json.dumps, results)))
    (folder / f"{cell.name}.yaml").write_text(yaml.safe_dump({cell.name: cell.experiment}))


EXPERIMENT = {"config": {"evaluation_interval": 2}, "stop": {"env_runners/num_episodes_lifetime": 128}}


def test_rows_hold_fresh_evaluations_only_and_a_resumed_iteration_once(tmp_path):
    cell = Cell("house_1", "NLAC", 0, EXPERIMENT)
    write(tmp_path, cell, [result(1, 32, 0.2), result(2, 64, 0.4), result(2, 64, 0.5), result(3, 96, 0.6)])
    rows = rows_of(cell, tmp_path)
    assert [row["evaluation"] for row in rows] == [None, 0.25, None] and rows[1]["subgoals"] == [0.5, 0.25]
    assert [row["generated_tokens"] for row in rows] == [110, 220, 330]
    assert not is_done(cell, tmp_path)
    write(tmp_path, cell, [result(4, 128, 0.6)])
    assert is_done(cell, tmp_path)
    file = tmp_path / f"{cell.name}.yaml"
    file.write_text(f"# base model {'0' * 64}\n{file.read_text()}")
    with pytest.raises(SystemExit, match="is of other weights of the base model"):
        is_done(cell, tmp_path)
    write(tmp_path, cell, [result(4, 128, 0.6)])
    with pytest.raises(SystemExit, match="is of another plan"):
        is_done(Cell("house_1", "NLAC", 0, {**EXPERIMENT, "stop": {"training_iteration": 9}}), tmp_path)


def test_all_that_was_generated_for_training_counts_whatever_asked_for_it():
    counted = {"play": 100, "candidate": 40, "second_attempts": 3}
    left_out = {"evaluation": 900, "evaluation_critic": 90}
    assert generated_tokens({**result(1, 32, 0.2), "tokens": counted | left_out}) == 143


def test_a_model_that_is_only_played_counts_by_its_own_episodes(tmp_path):
    cell = Cell("house_1", "base model", 0, {"config": {}, "stop": {"training_iteration": 1}})
    played = result(1, 512, 0.1)
    played["env_runners"]["subgoals"] = {"chest_1": 0.3}
    write(tmp_path, cell, [played])
    (row,) = rows_of(cell, tmp_path)
    assert (row["evaluation"], row["subgoals"]) == (0.1, [0.3])


def test_a_line_that_was_not_written_to_its_end_is_no_result(tmp_path):
    """A run that was killed, or that goes on. Fails where the comparison then never goes on."""
    cell = Cell("house_1", "NLAC", 0, EXPERIMENT)
    write(tmp_path, cell, [result(2, 64, 0.2)])
    with (tmp_path / cell.name / "trial" / "result.json").open("a") as file:
        file.write('\n{"training_iteration": 3, "env_run')
    assert [row["evaluation"] for row in rows_of(cell, tmp_path)] == [0.1]
    assert not is_done(cell, tmp_path)


def test_of_two_beginnings_the_later_one_counts(tmp_path):
    cell = Cell("house_1", "NLAC", 0, EXPERIMENT)
    write(tmp_path, cell, [result(2, 64, 0.2)])
    (tmp_path / cell.name / "trial").rename(tmp_path / cell.name / "zzz")  # Tune's names do not sort by time
    os.utime(tmp_path / cell.name / "zzz" / "result.json", (0, 0))
    write(tmp_path, cell, [result(2, 64, 0.8)])
    assert rows_of(cell, tmp_path)[0]["evaluation"] == 0.4


def test_the_table_says_when_each_seed_reached_the_goal_and_what_is_left_of_the_best(plan, tmp_path):
    rows = []
    runs = [("NLAC", 0.8, 0.4), ("NLAC", 1.0, 1.0), ("NLAC", 0.0, 0.0), ("RFT", 0.0, 0.0)]  # what was never won cannot be kept
    for seed, (method, early, late) in enumerate(runs):
        cell = Cell("twenty_questions", method, seed, EXPERIMENT)
        write(tmp_path, cell, [result(2, 64, 2 * early), result(4, 128, 2 * late)])
        rows += rows_of(cell, tmp_path)
    assert {seed: len(found) for seed, found in evaluations(rows, "twenty_questions", "NLAC").items()} == {0: 2, 1: 2, 2: 2}
    nlac, rft = table(rows, plan, "twenty_questions").splitlines()[-2:]
    assert nlac.startswith("| NLAC | 64, 64, - | 128 | 0.400, 1.000, 0.000 | 0.467 | 0.75 | 0.933 / 0.467 |")
    assert rft.startswith("| RFT | - | 128 | 0.000 | 0.000 | - | 0.000 / 0.000 |")


def test_attempts_stand_beside_success_and_what_was_kept_without_them_has_none(plan, tmp_path):
    rows = []
    for seed, attempts in enumerate((0.5, 0.75, None)):
        cell = Cell("twenty_questions", "NLAC" if attempts else "RFT", seed, EXPERIMENT)
        last = result(2, 64, 0.4)
        if attempts:
            last["evaluation"]["repeated"] = {"pass_at_4": attempts, "pass_at_2": 0.1}
        write(tmp_path, cell, [last])
        rows += rows_of(cell, tmp_path)
    head, _, nlac, rft = table(rows, plan, "twenty_questions").splitlines()
    assert "| kept of best | pass@4 |" in head and "| 1.00 | 0.625 |" in nlac and "| 1.00 | - |" in rft
    assert "pass@4" not in table(rows[2:], plan, "twenty_questions")


def test_the_table_of_all_worlds_holds_the_main_methods_and_the_range_of_their_seeds(plan, tmp_path, capsys):
    runs = [("house_1", "NLAC", 0, 0.8), ("house_1", "NLAC", 1, 0.4), ("house_1", "RFT", 0, 0.5), ("house_2", "NLAC", 0, 0.6)]
    runs += [("house_1", "NLAC, verify on", 0, 0.1)]  # none of the main methods
    cells = [Cell(world, method, seed, EXPERIMENT) for world, method, seed, _ in runs]
    for cell, (_, _, _, success) in zip(cells, runs, strict=True):
        write(tmp_path, cell, [result(2, 64, 0.2), result(4, 128, 2 * success)])
    begun = Cell("house_2", "RFT", 0, EXPERIMENT)  # is in no table until its run has ended
    write(tmp_path, begun, [result(2, 64, 0.2)])
    report([*cells, begun], plan, tmp_path)
    assert "Left out: 1 runs" in capsys.readouterr().out
    rows = read_rows(tmp_path / "compare.csv")
    assert rows == [row for cell in cells for row in rows_of(cell, tmp_path)]
    expected = """\
| world | episodes | NLAC | RFT |
|---|---|---|---|
| Text house 1, two locks deep | 128 | 0.600 (0.400 to 0.800) | 0.500 |
| Text house 2, two locks deep | 128 | 0.600 |  |"""
    assert summary(rows, plan) == expected and expected in (tmp_path / "compare.md").read_text()
    of = {row["world"]: row for row in rows if row["evaluation"] is not None and row["method"] == "NLAC"}
    longer = [*rows, {**of["house_2"], "episodes": 256, "seed": 1}, {**of["house_1"], "episodes": 560, "method": "RFT"}]
    assert [line.split(" | ")[1] for line in summary(longer, plan).splitlines()[2:]] == ["512", "128 to 256"]


def test_the_documents_tables_are_those_of_the_rows_that_are_kept():
    plan = Plan(HERE / "compare.yaml", HERE)
    rows = [row for path in sorted(ROWS.glob("*.csv")) for row in read_rows(path)]
    for page, former in (("comparison.md", False), ("former_models.md", True)):
        document = (HERE / page).read_text()
        own = [row for row in rows if plan.worlds[row["world"]].get("former", False) is former]
        assert summary(own, plan) in document
        for world in dict.fromkeys(row["world"] for row in own):
            assert table(own, plan, world) in document, world


def test_the_figures_of_the_results_are_those_of_the_rows_that_are_kept():
    text = (HERE.parent / "docs" / "results.md").read_text().splitlines()
    plan = Plan(HERE / "compare.yaml", HERE)
    rows = [row for path in sorted(ROWS.glob("*.csv")) for row in read_rows(path)]
    lines = summary([row for row in rows if not plan.worlds[row["world"]].get("former")], plan).splitlines()
    shown = list(takewhile(lambda line: line.startswith("|"), text[text.index(lines[0]) + 2 :]))
    assert len(shown) >= 5 and set(shown) <= set(lines)


def test_every_row_that_is_kept_can_be_run_again_by_the_command(plan):
    rows = [row for path in sorted(ROWS.glob("*.csv")) for row in read_rows(path)]
    kept = {(row["world"], row["method"]) for row in rows if not plan.worlds[row["world"]].get("former")}
    kept = {(world, method) for world, method in kept if method not in ("ERL", "RLTF-SD", "SDPO")}  # which were removed
    assert kept <= {(cell.world, cell.method) for cell in plan.select("runs", [], [], None)}


def test_the_picture_shows_the_mean_and_range_of_each_method_that_learns(plan, tmp_path):
    cells = [Cell("house_1", method, seed, EXPERIMENT) for method, seed in (("NLAC", 0), ("NLAC", 1), ("base model", 0))]
    for cell, success in zip(cells, (0.25, 0.75, 1.0), strict=True):
        write(tmp_path, cell, [result(2, 64, 0.0), result(4, 128, 2 * success)])
    shown = picture([row for cell in cells for row in rows_of(cell, tmp_path)], plan, "house_1")
    wanted = Line("NLAC", [(64.0, 0.0), (128.0, 0.5)], [(0.0, 0.0), (0.25, 0.75)])
    title = plan.worlds["house_1"]["title"]
    assert shown == Chart(title, "training episodes", "success in evaluation", [wanted], y_range=(0.0, 1.0)).svg()


def test_the_picture_of_the_results_is_of_the_rows_that_are_kept():
    methods = ("NLAC", "NLAC, critic frozen", "RFT", "GRPO")
    rows = [row for row in read_rows(ROWS / "text_house.csv") if row["method"] in methods]
    shown = picture(rows, Plan(HERE / "compare.yaml", HERE), "house_4_depth_3")
    assert shown == (HERE.parent / "docs" / "text_house_front.svg").read_text(encoding="utf-8")


def test_no_cell_is_of_a_former_world(plan):
    """Their models are not shipped."""
    former = [world for world, place in plan.worlds.items() if place.get("former")]
    assert former
    for runs in ("runs", "quick", "search"):
        with pytest.raises(ValueError, match="no run of"):
            plan.select(runs, former, [], None)


@pytest.mark.process
@pytest.mark.long
def test_one_cell_by_the_command_and_nothing_is_run_twice(tmp_path, ray_session, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray_session)
    config = {"episodes_per_iteration": 16, "evaluation_duration": 16}
    config |= {"train_batch_size_per_learner": 32, "minibatch_size": 32}
    plan = {
        "worlds": {"small": {"title": "Small", "episodes": 16, "evaluate_every": 16, "goal": 0.5, "config": config}},
        "methods": {"NLAC": {"file": "nlac"}},
        "runs": [{"worlds": ["small"], "methods": ["NLAC"], "seeds": 1}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    command = [sys.executable, "-m", "research.compare", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0 and "small" in first.stdout and ": 0." in first.stdout, first.stdout + first.stderr
    with (tmp_path / "compare.csv").open() as file:
        before, row = csv.DictReader(file)
    assert before["episodes"] == "0"  # the evaluation before training
    assert row["method"] == "NLAC" and row["episodes"] == "16" and 0 <= float(row["evaluation"]) <= 1
    assert (tmp_path / "small.png").is_file() and "| NLAC |" in (tmp_path / "compare.md").read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "1 runs, of which 1 are there already" in again.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--worlds", "hous_1"], "unknown world 'hous_1'; did you mean 'house_1'?"),
        (["--methods", "NLCA"], "unknown method 'NLCA'; did you mean 'NLAC'?"),
        (
            ["--quick", "--worlds", "random_advice"],
            "no run of 'quick' is in the world 'random_advice'; there are house_1, twenty_questions",
        ),
        (["--search", "--worlds", "house_2"], "no run of 'search' is in the world 'house_2'; did you mean 'house_1'?"),
        (["--worlds", "house_2", "--methods", "offline NLAC"], "worlds house_2 and the methods offline NLAC; there are"),
        (["--worlds"], "expected at least one argument"),
        (["--seeds", "0"], "'0' is no whole number above 0"),
        (["--report", "--worlds", "house_1"], "nothing has been run yet of the worlds house_1"),
        (["--plan", "EMPTY"], "is no plan: it has no 'worlds'"),
        (["--rows", "EMPTY"], "holds no rows of a comparison: it has no column"),
        (["--rows", "HEAD"], "holds no rows: nothing has been run yet"),
        (["--rows", "ODD"], "line 2: could not convert string to float: 'many'"),
        (["--rows", str(ROWS / "text_house.csv"), "--worlds", "some_sense"], "no row is of the worlds some_sense"),
        (["--rows", str(ROWS / "text_house.csv"), "--picture", "ANY"], "--picture shows one world: choose it with --worlds"),
        (["--picture", "ANY"], "--picture draws rows that are kept: give them with --rows"),
    ],
)
def test_what_selects_nothing_is_an_error(options, complaint, tmp_path, monkeypatch, capsys):
    head = ",".join(COLUMNS)
    odd = f"{head}\nhouse_1,NLAC,0,64,0.5,many,,1,1"
    files = {name: tmp_path / f"{name}.csv" for name in ("EMPTY", "HEAD", "ODD")}
    for path, text in zip(files.values(), ("", head, odd), strict=True):
        path.write_text(text)
    options = [str(files.get(option, option)) for option in options]
    monkeypatch.setattr(sys, "argv", ["compare", *options, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as found:
        main()
    assert found.value.code == 2 and complaint in capsys.readouterr().err


def test_words_tell_what_they_tell_of_other_episodes_and_an_episode_never_of_itself():
    def turn(seen: str, action: str) -> Transition:
        nothing = Generation((), (), np.zeros(0, np.float32), True, 0)
        return Transition(0, "TextHouse", (Message("user", seen),), action, nothing, "", 0.0, False, False, False, 0.0)

    episodes = [number for _ in range(4) for number in range(40)]
    came = np.array([number % 2 == 0 for number in episodes])
    # The order of the words tells, or the action does; a name that no other episode bears tells nothing.
    telling = [turn("red key. blue" if won else "red. blue key", "go hall") for won in came]
    assert auc(told_by_words(telling, episodes, came), came) == 1.0
    done = [turn("hall: nothing", "try red" if won else "try blue") for won in came]
    assert auc(told_by_words(done, episodes, came), came) == 1.0
    named_alone = [turn(f"room{number}", "go hall") for number in episodes]
    assert auc(told_by_words(named_alone, episodes, came), came) <= 0.5
    assert told_by_words(telling, episodes, np.ones(160, bool)).tolist() == [1.0] * 160
    all_but_one = np.array([number != 7 for number in episodes])  # without it nothing is to be learned
    assert told_by_words(telling, episodes, all_but_one).tolist() == [0.975] * 160


def test_a_future_names_the_progress_that_the_episode_then_makes():
    def steps(*replies: str) -> list[Transition]:
        nothing = Generation((), (), np.zeros(0, np.float32), True, 0)
        return [Transition(0, "TextHouse", (), "a", nothing, reply, 0.0, False, False, False, 0.0) for reply in replies]

    later = steps("hall: nothing. keys none.", "no key. hall: nothing.", "blue taken. hall: nothing. keys blue.")
    assert next_progress(later) == "blue taken later" and next_progress(later[2:]) == "blue taken"
    assert next_progress(steps(*["locked."] * 9, "oak opens: crown.")) is None
    for text, says in (
        ("hall: nothing, then blue taken in two. FAILURE", "blue taken later"),
        ("oak opens: crown. SUCCESS", "oak opens"),
        ("hall: blue key, then nothing. FAILURE", "nothing later"),
    ):
        assert named(Future(text, text.endswith("SUCCESS"))) == says
