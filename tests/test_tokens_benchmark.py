"""``python -m benchmarks.tokens``: its table, its settings, and one very small run."""

from __future__ import annotations

import pytest

from benchmarks import tokens
from benchmarks.tokens import WORLDS, config_of, main, spent, table


def test_all_columns_have_the_same_unit_and_the_dearest_role_comes_first():
    found = [{"future": 300, "play": 100, "evaluation": 0}, {"future": 50, "play": 100, "critique": 10}]
    assert table([{}, {"judged_fraction": 0.5}], found, 100).splitlines() == [
        "| tokens of | as it is | `judged_fraction: 0.5` |",
        "|---|---|---|",
        "| `future` | 3.0 (75%) | 0.5 (31%) |",
        "| `play` | 1.0 (25%) | 1.0 (62%) |",
        "| `critique` | 0.0 (0%) | 0.1 (6%) |",
        "| all | 4.0 | 1.6 |",
        "| of the example's | 100% | 40% |",
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_its_settings_are_valid_and_begin_with_the_examples_own(world):
    example, settings = WORLDS[world]
    assert not settings[0]
    own = config_of(example, {})
    for setting in settings[1:]:
        config = config_of(example, setting)
        config.validate()
        assert all(getattr(config, key) == value != getattr(own, key) for key, value in setting.items())
        # As many gradients are taken of texts: what is saved is generation.
        assert config.num_epochs * config.train_batch_size_per_learner == own.num_epochs * own.train_batch_size_per_learner


def test_it_prints_what_real_runs_have_spent(monkeypatch, capsys, ray_session, lent_engine):
    small = {
        "episodes_per_iteration": 8,
        "train_batch_size_per_learner": 24,
        "minibatch_size": 12,
        "num_envs_per_env_runner": 8,
    }
    monkeypatch.setattr(tokens, "WORLDS", {"quick_start": ("twenty_questions_nlac", ({}, {"judged_fraction": 0.25}))})
    monkeypatch.setattr(tokens, "config_of", lambda example, setting: config_of(example, {**small, **setting}))
    runs = []
    monkeypatch.setattr(tokens, "spent", lambda *arguments: runs.append(spent(*arguments)) or runs[-1])
    monkeypatch.setattr("sys.argv", ["tokens", "--iterations", "1", "--worlds", "quick_start"])
    main()
    whole, quarter = runs
    assert {role for role, cost in whole.items() if cost} >= {
        "play",
        "next_action",
        "next_future",
        "target",
        "future",
        "critique",
    }
    assert 0 < quarter["future"] < 0.5 * whole["future"] and quarter["play"] == whole["play"]
    assert f"| all | {sum(whole.values()) / 24:.1f} | {sum(quarter.values()) / 24:.1f} |" in capsys.readouterr().out
