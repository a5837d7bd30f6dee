"""How well predicted outcomes agree with what came: area under the ROC curve, Brier score, calibration error, reliability.

What cannot be said of a set is NaN: all of an empty one, and the area under the curve where all outcomes are alike.
Scikit-learn's figures are the same, and the tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

Z = 1.959964  # the normal distribution's quantile of 97.5 %
NUM_BINS = 10


def auc(predicted: np.ndarray, came: np.ndarray) -> float:
    """The chance that a success was predicted higher than a failure, ties counted half.

    Args:
        predicted: Shape (N,).
        came: Whether it was a success; shape (N,).

    Returns:
        NaN where there are only successes, or only failures.
    """
    came = np.asarray(came, bool)
    successes = int(came.sum())
    failures = len(came) - successes
    if not successes or not failures:
        return math.nan
    ranks = rankdata(predicted)  # ties share the middle one
    return float((ranks[came].sum() - successes * (successes + 1) / 2) / (successes * failures))


def brier(predicted: np.ndarray, came: np.ndarray) -> float:
    """Mean squared difference of the predicted chance and the outcome, 1 or 0; 0 is perfect.

    Args:
        predicted: Chances, within 0 and 1; shape (N,).
        came: Shape (N,).
    """
    return float(np.mean((predicted - np.asarray(came, float)) ** 2)) if len(came) else math.nan


@dataclass(frozen=True)
class Reliability:
    """What came where so much was predicted, by bins of equal width; empty bins are left out.

    Attributes:
        predicted: Mean prediction of each bin.
        came: Share of successes.
        count: Number of predictions.
    """

    predicted: list[float]
    came: list[float]
    count: list[int]

    @property
    def error(self) -> float:
        """The expected calibration error: mean distance of prediction and outcome over the bins, by their sizes."""
        if not self.count:
            return math.nan
        distances = np.abs(np.array(self.predicted) - np.array(self.came))
        return float(np.average(distances, weights=self.count))


def reliability(predicted: np.ndarray, came: np.ndarray, bins: int = NUM_BINS) -> Reliability:
    """Predictions and outcomes by bins of equal width, each with its upper end, and the first with 0 too.

    Args:
        predicted: Chances, within 0 and 1; shape (N,).
        came: Shape (N,).
        bins: How many.
    """
    predicted, came = np.asarray(predicted, float), np.asarray(came, float)
    places = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], predicted)
    found = [places == place for place in np.unique(places)]
    return Reliability(
        predicted=[float(predicted[own].mean()) for own in found],
        came=[float(came[own].mean()) for own in found],
        count=[int(own.sum()) for own in found],
    )


def figures(predicted: np.ndarray, came: np.ndarray) -> dict[str, float]:
    """All figures of one set of predictions, as they stand in the results.

    Args:
        predicted: Chances, within 0 and 1; shape (N,).
        came: Shape (N,).
    """
    predicted, came = np.asarray(predicted, float), np.asarray(came, bool)
    empty = not len(came)
    return {
        "num_states": float(len(came)),
        "auc": auc(predicted, came),
        "brier": brier(predicted, came),
        "brier_of_base_rate": math.nan if empty else float(came.mean() * (1 - came.mean())),
        "ece": reliability(predicted, came).error,
        "predicted_success": math.nan if empty else float(predicted.mean()),
        "success": math.nan if empty else float(came.mean()),
        "one_class": float(len(set(came.tolist())) < 2),
        # Of the difference between the two means, for whoever asks whether it is more than chance.
        "bias_error": float((predicted - came).std(ddof=1) / math.sqrt(len(came))) if len(came) > 1 else math.nan,
    }


def by_size(sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Places by size, in bins that double, so that there are few however large sizes get.

    Args:
        sizes: Not negative, as turns or ages.

    Returns:
        By name, as "0", "1", "2_to_3", "4_to_7", ...: whether each place belongs to it, shape (len(sizes),).
    """
    levels = np.array([int(size).bit_length() for size in sizes], int)
    names = {0: "0", 1: "1", **{level: f"{1 << (level - 1)}_to_{(1 << level) - 1}" for level in range(2, 64)}}
    return {names[level]: levels == level for level in np.unique(levels).tolist()}


def wilson(share: float, size: float) -> tuple[float, float]:
    """The 95 % Wilson interval of a share of ``size`` independent ones; NaN of none."""
    if not size:
        return math.nan, math.nan
    middle, half = share + Z**2 / (2 * size), Z * math.sqrt(share * (1 - share) / size + Z**2 / (4 * size**2))
    low, high = (middle - half) / (1 + Z**2 / size), (middle + half) / (1 + Z**2 / size)
    return max(low, 0.0), min(high, 1.0)


def comparison(of_action: np.ndarray, of_refined: np.ndarray) -> dict[str, float]:
    """What refinement is worth: success after the action and after the refined one, of the same states.

    Args:
        of_action: Share of the continuations of each state's action that succeed; shape (N,).
        of_refined: The same of its refined action; shape (N,).

    Returns:
        ``win_rate``: of the states where the two differ, the share where the refined action did better, with its Wilson
        interval; ``gain``: the mean difference, with an interval of 1.96 standard errors. States are the unit, so they should
        be of different episodes.
    """
    gains = np.asarray(of_refined, float) - np.asarray(of_action, float)
    wins, losses, count = int((gains > 0).sum()), int((gains < 0).sum()), len(gains)
    rate = wins / (wins + losses) if wins + losses else math.nan
    low, high = wilson(rate, wins + losses)
    gain = float(gains.mean()) if count else math.nan
    half = Z * float(gains.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return {
        "num_states": float(count),
        "num_decided": float(wins + losses),
        "win_rate": rate,
        "win_low": low,
        "win_high": high,
        "success_of_action": float(np.mean(of_action)) if count else math.nan,
        "success_of_refined": float(np.mean(of_refined)) if count else math.nan,
        "gain": gain,
        "gain_low": gain - half,
        "gain_high": gain + half,
    }
