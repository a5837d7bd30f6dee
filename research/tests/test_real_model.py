"""The cells of research/real_model.py: what they run, and what is read of them."""

from __future__ import annotations

import json

import pytest
import yaml

from research.compare_plan import HERE
from research.real_model import KINDS, METHODS, TASKS, WARM_UP, Cell, commands, row_of, table
from research.rows import read
from rllib_nlac.command.experiment import load_experiments

KINDS_OF_CELL = (WARM_UP, *METHODS, "NLAC_Hindsight")
CELLS = [cell for task in TASKS for kind in KINDS_OF_CELL if (cell := Cell(task, kind, 2)).example.is_file()]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_is_its_example_with_another_seed(cell, tmp_path, monkeypatch):
    monkeypatch.setattr("rllib_nlac.command.experiment.resolve", lambda experiment, where: experiment)  # needs the warm-up
    (tmp_path / "cell.yaml").write_text(yaml.safe_dump(cell.experiment))
    (mine,), (example,) = load_experiments(tmp_path / "cell.yaml"), load_experiments(cell.example)
    seed = 0 if cell.method == WARM_UP else 2
    run = cell.method if cell.method == "NLAC_Hindsight" else example.run
    assert mine.config == {**example.config, "seed": seed} and (mine.run, mine.stop) == (run, example.stop)


def test_a_warm_up_writes_the_conversations_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("rllib_nlac.command.experiment.resolve", lambda experiment, where: experiment)
    for task in TASKS:
        *experts, train = commands(Cell(task, WARM_UP, 0), tmp_path)
        (experiment,) = load_experiments(Cell(task, WARM_UP, 0).example)
        read_files = experiment.config["input_"]
        assert [expert[:3] for expert in experts] == [["env", "expert", experiment.config["env"]]] * len(experts)
        written = [expert[expert.index("--out") + 1] for expert in experts]
        assert written == (read_files if isinstance(read_files, list) else [read_files])
        for expert in experts:
            assert yaml.safe_load(expert[expert.index("--config") + 1]) == experiment.config["env_config"]
        assert train[:2] == ["train", "file"]
    assert len(commands(Cell(TASKS[0], "nlac", 1), tmp_path)) == 1


def ended(folder, name: str, *successes: float | None, done: bool = True) -> None:
    """A run that has ended, or was interrupted, with the success before training first."""
    trial = folder / name / "trial"
    (trial / "checkpoint_000000").mkdir(parents=True)
    before, *after = successes
    lines = [
        {
            "training_iteration": number,
            "time_total_s": 60.0 * number,
            "env_runners": {"num_episodes_lifetime": 64 * number},
            "tokens": {"policy": 100, "evaluation": 7},
            "config": {"evaluation_interval": 1},
            **({"evaluation": {"env_runners": {"success_rate": success}}} if success is not None else {}),
        }
        for number, success in enumerate(after, start=1)
    ]
    if before is not None:
        lines[0]["before_training"] = {"env_runners": {"success_rate": before}}
    lines[-1]["done"] = done
    (trial / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_row_has_success_before_and_after_and_the_tokens_of_training(tmp_path):
    cell = Cell("guess_number", "nlac", 1)
    assert cell.results(tmp_path) == [] and "--resume" not in commands(cell, tmp_path)[0]
    ended(tmp_path / "interrupted", cell.name, 0.25, 0.5, done=False)
    assert cell.results(tmp_path / "interrupted") == [] and "--resume" in commands(cell, tmp_path / "interrupted")[0]
    ended(tmp_path, cell.name, 0.25, 0.5, 0.75)
    row = row_of(cell, cell.results(tmp_path))
    assert (row["before"], row["success"], row["episodes"], row["minutes"]) == (0.25, 0.75, 128, 2.0)
    assert row["generated_tokens"] == 200
    other = row | {"seed": 0, "success": 0.25}
    line = table([row, other]).splitlines()[-1]
    assert line == "| guess_number | nlac | 128 | 0.250 | 0.500 (0.250, 0.750) | 200 | - | 2 |"


def test_a_run_without_an_evaluation_before_training_is_refused(tmp_path):
    cell = Cell("guess_number", "nlac", 1)
    ended(tmp_path, cell.name, None, 0.5)
    with pytest.raises(ValueError, match="hold no evaluation before and after training"):
        row_of(cell, cell.results(tmp_path))


def test_the_pages_table_is_that_of_the_rows():
    page = (HERE.parent / "docs" / "results.md").read_text()
    for line in table(read(HERE / "rows" / "real_model.csv", KINDS)).splitlines()[2:]:
        _, method, episodes, _, success, tokens, kl, minutes = (field.strip() for field in line.strip("|").split("|"))
        known = [success.split(" ")[0], success.partition(" ")[2], tokens, minutes, *([kl] if kl != "-" else [])]
        rows = [row for row in page.splitlines() if f"| {episodes} |" in row and all(value in row for value in known)]
        assert rows, f"no row of {method} has {known}"
