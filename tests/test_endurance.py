"""The benchmark of long runs: its rows, its table, what a command does that was cut short, and one real run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import endurance
from benchmarks.endurance import EPISODES, EXAMPLES, FOUND, KINDS, METHODS, complete, config_of, main, read_rows, table, trained
from rllib_nlac.command.experiment import load_experiments


def made(method: str, seed: int, updates: int, success: float = 0.5) -> list[dict]:
    found = dict.fromkeys(FOUND, 0.25) | {"success": success, "loss": 0.75, "generated_tokens": 1000.0, "seconds": 60.0}
    return [{"method": method, "seed": seed, "update": update, **found} for update in range(50, updates + 1, 50)]


def test_a_run_is_made_once_and_one_that_was_shorter_again(tmp_path):
    path, played = tmp_path / "new" / "rows.csv", []

    def play(*asked):
        played.append(asked)
        return made(*asked)

    wanted = [("NLAC", 0), ("RFT", 0)]
    assert len(complete(path, wanted, 100, play)) == 4 and complete(path, wanted, 100, play) == read_rows(path)
    assert played == [("NLAC", 0, 100), ("RFT", 0, 100)]
    longer = complete(path, wanted[:1], 150, play)
    assert [(row["method"], row["update"]) for row in longer] == [("RFT", 50), ("RFT", 100)] + [
        ("NLAC", update) for update in (50, 100, 150)
    ]
    with path.open("a") as file:
        file.write("RFT,1,100,0.5,0")  # killed while it wrote
    assert len(read_rows(path)) == 5


def test_the_table_has_the_mean_of_the_seeds_and_what_was_forgotten_beyond_the_bases_own_loss():
    rows = [row for seed, success in ((0, 0.25), (1, 0.5)) for row in made("NLAC", seed, 200, success)]
    lines = table(rows).splitlines()[2:]
    assert lines[0] == "| NLAC | 50 | 0.250, 0.500 | 0.375 | 0.25 | 0.25 | 0.25 | 0.50 | 1,000 | 60 |"
    assert [line.split("|")[2].strip() for line in lines] == ["50", "100", "200"]


@pytest.mark.parametrize("method", METHODS)
def test_methods_differ_from_their_examples_in_size_and_in_what_is_measured_alone(method):
    config = config_of(method, seed=3)
    config.validate()
    assert (config.episodes_per_iteration, config.seed, config.language_model) == (EPISODES, 3, "tiny")
    assert config.kl_to_base_coeff == 0 and config.rehearsal["fraction"] == 0  # measured, and in no loss
    assert config.lr == {"NLAC": 0.001, "SDPO": 0.0003, "RFT": 0.001}[method]
    (example,) = load_experiments(EXAMPLES / f"{METHODS[method]}.yaml")
    changed = {key for key, value in example.config.items() if getattr(config, key) != value}
    sizes = {"episodes_per_iteration", "num_envs_per_env_runner", "evaluation_interval", "evaluation_duration", "seed"}
    assert changed == sizes | ({"train_batch_size_per_learner"} if method == "NLAC" else set())


def test_the_command_asks_for_every_method_of_a_seed_before_the_next(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(endurance, "complete", lambda path, wanted, updates: asked.extend(wanted) or made("RFT", 0, updates))
    monkeypatch.setattr("sys.argv", ["endurance", "--seeds", "0", "7", "--out", str(tmp_path / "rows.csv")])
    main()
    assert asked == [(method, seed) for seed in (0, 7) for method in METHODS]
    assert "| RFT | 500 | 0.500 |" in capsys.readouterr().out


@pytest.mark.parametrize("updates", [0, 20, 75])
def test_updates_that_end_without_an_evaluation_are_refused(updates, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["endurance", "--updates", str(updates)])
    with pytest.raises(SystemExit):
        main()
    assert "--updates must be a multiple of 50" in capsys.readouterr().err


def test_a_real_run(ray_session, lent_engine):
    config = config_of("RFT", seed=0).evaluation(evaluation_interval=2, evaluation_duration=16)
    rows = trained(config, updates=4)
    assert [row["update"] for row in rows] == [2, 4]
    for row in rows:
        assert set(row) == set(KINDS) - {"method", "seed"} and all(map(math.isfinite, row.values()))
    assert rows[1]["generated_tokens"] > rows[0]["generated_tokens"] > 4 * EPISODES
    assert rows[1]["seconds"] > rows[0]["seconds"] > 0 and rows[0]["kl_to_base"] > 0


def test_the_page_shows_the_table_of_its_rows():
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "former_models.md").read_text(encoding="utf-8")
    assert table(read_rows(docs / "rows" / "endurance.csv")) in page
