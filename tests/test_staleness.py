"""The benchmark of running ahead: its rows, what a command does that was cut short, and one real run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import staleness
from benchmarks.staleness import ASKED, FOUND, WAYS, WORLDS, complete, config_of, main, read_rows, table, trained


def asked(way: str, seed: int, world: str = "house") -> dict:
    return {"world": world, "way": way, "seed": seed, "episodes": 64}


def found(success: float) -> dict:
    return dict.fromkeys(FOUND, 0.5) | {"success": success, "seconds": 100 * success}


def test_a_row_is_there_as_soon_as_its_run_has_ended_and_no_run_is_made_twice(tmp_path):
    path, played = tmp_path / "new" / "rows.csv", []

    def play(what):
        assert len(read_rows(path)) == len(played) % 3  # those before it
        if len(played) == 2:
            played.append(None)
            raise KeyboardInterrupt
        played.append(what)
        return found(0.25)

    wanted = [asked(way, 0) for way in WAYS[:3]]
    with pytest.raises(KeyboardInterrupt):
        complete(path, wanted, play)
    with path.open("a") as file:
        file.write("house,max_staleness=2,0,64,0.5,0")  # killed while it wrote
    rows = complete(path, wanted, lambda what: played.append(what) or found(0.75))
    assert played == [*wanted[:2], None, wanted[2]] and rows == read_rows(path)
    assert [row["success"] for row in rows] == [0.25, 0.25, 0.75]
    assert complete(path, wanted, lambda what: 1 / 0) == rows
    more = complete(path, [{**wanted[0], "episodes": 128}], lambda what: found(1.0))  # another length is another run
    assert [row["episodes"] for row in more] == [64, 64, 64, 128]


def test_the_table_has_a_line_for_each_way_with_the_mean_of_its_seeds():
    rows = [{**asked(way, seed), **found(seed / 4)} for way in ("max_staleness=0", "stage_staleness=1") for seed in (1, 3)]
    lines = table(rows).splitlines()[2:]
    assert lines[0] == "| house | `max_staleness=0` | 0.50 | 0.25, 0.75 | 0.50 | 50 | 0.5 | 50% | 50% |"
    assert len(lines) == 2 and "`stage_staleness=1`" in lines[1]
    longer = {**rows[0], **found(1.0), "episodes": 128}  # a look at shorter runs is not averaged into longer ones
    assert [line.split(" | ")[0] for line in table([*rows, longer]).splitlines()[2:]] == [
        "| house, 64 episodes",
        "| house, 64 episodes",
        "| house, 128 episodes",
    ]


def test_the_command_asks_for_the_whole_matrix_in_turn(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(staleness, "complete", lambda path, wanted: made.extend(wanted) or [{**wanted[0], **found(1.0)}])
    monkeypatch.setattr("sys.argv", ["staleness", "--seeds", "0", "7", "--out", str(tmp_path / "rows.csv")])
    main()
    assert len(made) == len(WORLDS) * len(WAYS) * 2 and all(tuple(row) == ASKED for row in made)
    assert [row["way"] for row in made[:5]] == list(WAYS) and [row["episodes"] for row in made[::10]] == [256, 512]
    assert "| quick_start | `max_staleness=0` | 1.00 |" in capsys.readouterr().out


def test_the_page_shows_the_table_of_its_rows():
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "memory_and_speed.md").read_text(encoding="utf-8")
    assert table(read_rows(docs / "rows" / "staleness.csv")) in page


@pytest.mark.parametrize("episodes", [0, 16, 100])
def test_episodes_that_are_no_whole_iterations_are_refused(episodes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["staleness", "--episodes", str(episodes)])
    with pytest.raises(SystemExit):
        main()
    assert "--episodes must be a multiple of the 32 of an iteration of quick_start" in capsys.readouterr().err


@pytest.mark.parametrize("world", WORLDS)
def test_all_ways_differ_in_one_key(world):
    configs = {way: config_of(world, way, seed=3) for way in WAYS}
    for way, config in configs.items():
        config.validate()
        key, _, value = way.partition("=")
        assert (config.max_staleness, config.stage_staleness) == (
            (int(value), 0) if key == "max_staleness" else (0, int(value))
        )
        assert (config.num_env_runners, config.num_engines, config.seed) == (1, 1, 3)
    with pytest.raises(ValueError, match="no run house, max_staleness=3"):
        config_of("house", "max_staleness=3", 0)


@pytest.mark.long
def test_a_real_run(ray_session):
    config = config_of("quick_start", "stage_staleness=1", seed=0)
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=24, minibatch_size=12)
    config.env_runners(num_envs_per_env_runner=8).evaluation(evaluation_duration=16)
    config.engines(engine_config={"cpu_kv_cache_gib": 0.25})
    row = trained(config, episodes=16)
    assert tuple(row) == FOUND and all(math.isfinite(row[name]) for name in FOUND)
    assert row["seconds"] > row["seconds_an_iteration"] > 0 and row["staleness_mean"] == 0
    assert 0 < row["idle_engine"] < 1 and 0 < row["idle_learner"] < 1
    assert row["success_low"] <= row["success"] <= row["success_high"] and 0 <= row["pass_at_4"] <= 1
