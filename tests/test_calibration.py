"""Predicted against realised outcomes: scikit-learn's figures, closed forms, and what cannot be said of a set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, roc_auc_score

from rllib_nlac.diagnostics.calibration import auc, brier, by_size, comparison, figures, reliability, wilson

# Shares of k futures: few values, so ties are the rule.
SHARES = st.sampled_from([i / 4 for i in range(5)])
CHANCES = st.one_of(SHARES, st.floats(0, 1))


def sets(chances=CHANCES):
    pairs = st.lists(st.tuples(chances, st.booleans()), min_size=1, max_size=60)
    return pairs.map(lambda rows: (np.array([p for p, _ in rows], float), np.array([c for _, c in rows], bool)))


class TestAgainstScikitLearn:
    @given(sets())
    def test_the_area_under_the_curve(self, both):
        predicted, came = both
        if len(set(came.tolist())) < 2:
            assert math.isnan(auc(predicted, came))
        else:
            assert auc(predicted, came) == pytest.approx(roc_auc_score(came, predicted), abs=1e-9)

    @given(sets())
    def test_the_brier_score_also_of_one_class(self, both):
        predicted, came = both
        assert brier(predicted, came) == pytest.approx(brier_score_loss(came, predicted, pos_label=True), abs=1e-9)

    @given(sets(), st.integers(1, 15))
    def test_the_reliability_and_the_calibration_error(self, both, bins):
        predicted, came = both
        curve = reliability(predicted, came, bins)
        shares, means = calibration_curve(came.astype(int), predicted, n_bins=bins, pos_label=1)
        np.testing.assert_allclose(curve.came, shares, atol=1e-9)
        np.testing.assert_allclose(curve.predicted, means, atol=1e-9)
        assert sum(curve.count) == len(came)
        # The textbook's sum over bins, from scikit-learn's curve and counts of our own.
        edges = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], predicted)
        counts = [int((edges == place).sum()) for place in sorted(set(edges.tolist()))]
        expected = sum(n / len(came) * abs(a - b) for n, a, b in zip(counts, shares, means, strict=True))
        assert curve.error == pytest.approx(expected, abs=1e-9)


class TestClosedForms:
    @given(sets(SHARES))
    def test_the_area_is_the_mean_over_all_pairs(self, both):
        predicted, came = both
        pairs = [(p > q) + (p == q) / 2 for p in predicted[came] for q in predicted[~came]]
        assert auc(predicted, came) == pytest.approx(np.mean(pairs) if pairs else math.nan, nan_ok=True)

    @given(sets())
    def test_who_predicts_the_opposite_has_the_rest_of_the_area(self, both):
        predicted, came = both
        assert auc(-predicted, came) == pytest.approx(auc(predicted, ~came), nan_ok=True, abs=1e-9)

    def test_nothing_is_said_of_nothing_and_no_order_of_one_class(self):
        none = figures(np.array([]), np.array([]))
        assert none["num_states"] == 0 and none["one_class"] == 1
        assert all(math.isnan(none[key]) for key in none if key not in ("num_states", "one_class"))
        lost = figures(np.array([0.25, 0.75]), np.array([False, False]))
        assert math.isnan(lost["auc"]) and lost["one_class"] == 1
        assert lost["brier"] == pytest.approx((0.0625 + 0.5625) / 2) and lost["ece"] == pytest.approx(0.5)
        assert lost["brier_of_base_rate"] == 0 and lost["success"] == 0 and lost["predicted_success"] == 0.5

    def test_a_perfect_critic_and_one_that_says_the_mean(self):
        came = np.array([True, False, False, True])
        perfect, mean = figures(came.astype(float), came), figures(np.full(4, 0.5), came)
        assert (perfect["auc"], perfect["brier"], perfect["ece"]) == (1.0, 0.0, 0.0)
        assert (mean["auc"], mean["brier"], mean["ece"]) == (0.5, 0.25, 0.0) and mean["brier"] == mean["brier_of_base_rate"]

    @given(st.lists(st.integers(0, 5000), max_size=50))
    def test_sizes_are_divided_by_doubling_bins(self, sizes):
        parts = by_size(sizes)
        for name, own in parts.items():
            low, _, high = name.partition("_to_")
            assert [int(low) <= size <= int(high or low) for size in sizes] == own.tolist()
        assert sum((own.astype(int) for own in parts.values()), np.zeros(len(sizes), int)).tolist() == [1] * len(sizes)

    def test_wilsons_interval(self):
        assert wilson(0.7, 10) == pytest.approx((0.3968, 0.8922), abs=1e-4)  # any textbook's value for 7 of 10
        assert all(map(math.isnan, wilson(math.nan, 0)))


class TestRefinement:
    def test_wins_losses_and_ties(self):
        values = comparison(np.array([0.0, 0.5, 1.0, 0.25]), np.array([0.5, 1.0, 0.5, 0.25]))
        assert (values["num_states"], values["num_decided"], values["win_rate"]) == (4, 3, pytest.approx(2 / 3))
        assert (values["win_low"], values["win_high"]) == wilson(2 / 3, 3)
        assert values["gain"] == pytest.approx(0.5 / 4) == values["success_of_refined"] - values["success_of_action"]
        half = 1.959964 * np.std([0.5, 0.5, -0.5, 0.0], ddof=1) / 2
        assert (values["gain_low"], values["gain_high"]) == pytest.approx((0.125 - half, 0.125 + half))

    def test_where_all_is_alike_nothing_was_won(self):
        """Ties are no half wins: an interval around them would narrow by states that say nothing."""
        values = comparison(np.ones(50), np.ones(50))
        assert math.isnan(values["win_rate"]) and values["num_decided"] == 0 and values["gain"] == 0
        assert math.isnan(comparison(np.array([]), np.array([]))["gain"])

    def test_the_interval_covers_the_truth(self):
        rng = np.random.default_rng(0)
        covered = 0
        for _ in range(500):
            a, b = rng.binomial(4, 0.4, 60) / 4, rng.binomial(4, 0.6, 60) / 4
            values = comparison(a, b)
            covered += values["gain_low"] <= 0.2 <= values["gain_high"]
        assert 0.92 <= covered / 500 <= 0.98
