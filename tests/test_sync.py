"""The sync is verified: an engine that did not take the weights is an error, not a stale rollout."""

from __future__ import annotations

import pytest
import torch

from rllib_nlac.sampling.engine import EngineError
from rllib_nlac.sync.sync import push_initial_weights, push_weights
from rllib_nlac.types import Weights

STATE = {Weights.POLICY: {"w": torch.ones(4)}, Weights.TARGET: {"w": torch.full((4,), 2.0)}}


class LocalLearners:
    is_local = True

    class _learner:
        _learner_index = 0

        @staticmethod
        def export_weights():
            return STATE


class Engine:
    def __init__(self, lost: float = 0.0):
        self.lost, self.taken = lost, []

    def set_weights(self, weights, version, state):
        self.taken.append((weights, version))
        return float(state["w"].sum()) - self.lost


def test_both_sets_reach_the_engine_and_the_policys_serve_next():
    engine = Engine()
    report = push_weights(LocalLearners(), engine, 3)
    assert engine.taken == [(Weights.TARGET, 3), (Weights.POLICY, 3)]
    assert report.version == 3 and report.num_bytes == 32 and report.seconds > 0


def test_a_lost_element_is_an_error():
    with pytest.raises(EngineError, match=r"sync of version 3: the engine's target weights have the checksum 7\.0"):
        push_weights(LocalLearners(), Engine(lost=1.0), 3)


def test_the_initial_weights_are_a_copy_that_learning_does_not_reach():
    kept = {}

    class Keeps(Engine):
        def set_weights(self, weights, version, state):
            kept[weights, version] = state
            return super().set_weights(weights, version, state)

    push_initial_weights(LocalLearners(), Keeps())
    ((key, state),) = kept.items()
    assert key == (Weights.INITIAL, 0) and torch.equal(state["w"], torch.ones(4))
    assert state["w"].data_ptr() != STATE[Weights.POLICY]["w"].data_ptr()
