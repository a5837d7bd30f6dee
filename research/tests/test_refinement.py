"""What refinement is worth: several runs taken together, and the table of the rows that are kept."""

from __future__ import annotations

import math

import numpy as np
import pytest

from research.compare_plan import HERE
from research.refinement import read_rows, table, together
from rllib_nlac.diagnostics.calibration import comparison


def test_several_runs_together_are_as_one_with_all_their_turns():
    """The benchmark pools figures; from the turns themselves the same comes."""
    rng = np.random.default_rng(1)
    runs = [(rng.binomial(2, p, n) / 2, rng.binomial(2, q, n) / 2) for p, q, n in ((0.3, 0.4, 30), (0.8, 0.5, 50), (0, 0.1, 9))]
    whole = comparison(*(np.concatenate(side) for side in zip(*runs, strict=True)))
    pooled = together([comparison(*run) for run in runs])
    assert pooled == pytest.approx({name: whole[name] for name in pooled}, abs=1e-12)


def test_a_run_in_which_nothing_was_decided_adds_its_turns_alone():
    lost = comparison(np.zeros(40), np.zeros(40))
    some = comparison(np.array([0.0, 1.0, 0.0, 0.5]), np.array([1.0, 0.5, 1.0, 0.5]))
    pooled = together([lost, some, comparison(np.array([]), np.array([]))])
    assert (pooled["num_states"], pooled["num_decided"], pooled["win_rate"]) == (44, 3, pytest.approx(2 / 3))
    assert pooled["gain"] == pytest.approx(1.5 / 44)
    row = {"critic": "frozen", "episodes": 64, "success": 0.0, "auc": math.nan}
    lines = table([{**row, "seed": seed, **each} for seed, each in enumerate((lost, some))]).splitlines()
    assert lines[2].startswith("| frozen | 64 | 0.00, 0.00 | 44 | 3 | 0.67 (0.21 to 0.94) | nan, 0.67 | +0.034 (")
    assert lines[3].startswith("| frozen | all |") and len(lines) == 4


def test_the_page_shows_the_table_of_its_rows():
    page = (HERE.parent / "docs" / "ablations.md").read_text(encoding="utf-8")
    assert table(read_rows(HERE / "rows" / "refinement.csv")) in page
