"""Means over all episodes of an iteration, whoever played them.

RLlib's loggers hand on a mean, and a mean of few episodes, as of a small share, would count as much as one of many. What is
private of RLlib here is pinned by ``tests/compatibility``.
"""

from __future__ import annotations

from typing import Any

from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.metrics.stats.mean import MeanStats


class WholeMean(MeanStats):
    """A mean that hands on all of its values, so that what is made of several is the mean over their episodes."""

    @override(MeanStats)
    def reduce(self, compile: bool = True) -> Any:
        if compile:
            return super().reduce()
        whole = self.clone()
        whole.values = list(self.values)
        self._set_values([])
        return whole


def hand_on_whole_means(metrics: MetricsLogger) -> None:
    """Makes a logger's means such ones from now on."""
    metrics.stats_cls_lookup = {**metrics.stats_cls_lookup, WholeMean.stats_cls_identifier: WholeMean}
