"""An algorithm's state without an algorithm: for tests of one method of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


class Metrics:
    def __init__(self) -> None:
        self.logged: dict = {}

    def log_value(self, name, value, window=None, reduce=None) -> None:
        assert window == 1 or reduce == "sum"  # each iteration's own value, no running average
        self.logged[name] = value


def fake(**config) -> SimpleNamespace:
    """An algorithm's state without an algorithm."""
    defaults = {"minibatch_size": 100, "num_epochs": 1}
    return SimpleNamespace(
        config=SimpleNamespace(**{**defaults, **config}), metrics=Metrics(), rng=np.random.default_rng(0), pool=[]
    )
