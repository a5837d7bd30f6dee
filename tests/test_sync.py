"""The sync is verified: an engine that did not take the weights is an error, not a stale rollout."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_nlac.engine.protocol import EngineError, HandOver, LocalEngine
from rllib_nlac.engine.shared import NotFiniteError, SharedState, checksum
from rllib_nlac.sync import sync
from rllib_nlac.sync.sync import push_initial_weights, push_weights
from rllib_nlac.types import Weights

STATE = {Weights.POLICY: {"w": torch.ones(4)}, Weights.TARGET: {"w": torch.full((4,), 2.0)}}


class LocalLearners:
    is_local = True

    class _learner:
        _learner_index = 0

        @staticmethod
        def export_weights(copies=True, on_device=False, of=tuple(STATE)):
            return {which: {name: t.clone() if copies else t for name, t in STATE[which].items()} for which in of}


class Engine(LocalEngine):
    def __init__(self, lost: int = 0):
        self.lost, self.taken = lost, []

    def set_weights(self, weights, version, state):
        self.taken.append((weights, version))
        return checksum(state.values()) - self.lost


def test_both_sets_reach_the_engine_and_the_policys_serve_next():
    engine, started = Engine(), time.perf_counter()
    report = push_weights(LocalLearners(), engine, 3)
    assert engine.taken == [(Weights.TARGET, 3), (Weights.POLICY, 3)]
    assert report.version == 3 and report.num_bytes == 32 and 0 < report.seconds <= time.perf_counter() - started


def test_what_no_engine_answers_with_is_not_sent():
    engine = Engine()
    report = push_weights(LocalLearners(), engine, 3, of=(Weights.POLICY,))
    assert engine.taken == [(Weights.POLICY, 3)] and report.num_bytes == 16


class TestManyLearners:
    """Every learner exports, as ZeRO 3 needs it, and the first one's state is what counts."""

    def group(self, count: int, states):
        return [SimpleNamespace(_learner_index=i, export_weights=lambda i=i, **how: states(i)) for i in range(count)]

    def test_only_the_first_hands_its_state_over(self, monkeypatch):
        learners = self.group(3, lambda i: {Weights.POLICY: {"w": torch.full((2,), float(i))}})
        monkeypatch.setattr(sync, "on_every_learner", lambda group, function: [function(each) for each in learners])
        state = sync.export_weights(None)
        assert state[Weights.POLICY]["w"].tolist() == [0.0, 0.0] and isinstance(state[Weights.POLICY], SharedState)
        assert sync._export_from_first(learners[1]) is None

    def test_without_target_weights_the_policys_alone_are_pushed(self, monkeypatch):
        learners = self.group(1, lambda i: {Weights.POLICY: {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2)}})
        monkeypatch.setattr(sync, "on_every_learner", lambda group, function: [function(each) for each in learners])
        engine = Engine()
        report = push_weights(SimpleNamespace(is_local=True), engine, 9)
        assert engine.taken == [(Weights.POLICY, 9)] and report.num_bytes == 3 * 2 + 2 * 4


def test_a_lost_element_is_an_error():
    with pytest.raises(EngineError, match=r"sync of version 3: the engine's target weights have the checksum \d+, the "):
        push_weights(LocalLearners(), Engine(lost=1), 3)


@pytest.mark.parametrize(
    ("which", "of"), [(which, of) for of in ((Weights.POLICY, Weights.TARGET), (Weights.POLICY,)) for which in of]
)
def test_weights_that_are_not_finite_are_named_and_not_sent(which, of):
    class Learners(LocalLearners):
        class _learner(LocalLearners._learner):
            @staticmethod
            def export_weights(copies=True, on_device=False, of=tuple(STATE)):
                states = LocalLearners._learner.export_weights(copies, on_device, of)
                states[which]["head"] = torch.tensor([1.0, float("nan")])
                return states

    engine = Engine()
    with pytest.raises(
        NotFiniteError, match=rf"the {which} weights that version 3 would have are not finite in 1 of 2 .* in head"
    ):
        push_weights(Learners(), engine, 3, of=of)
    assert engine.taken == []


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


@pytest.mark.parametrize(("how", "lent"), [(HandOver.COPIES, False), (HandOver.LENDS, True)])
def test_an_engine_that_makes_its_own_copies_is_lent_the_learners_tensors(how, lent):
    asked = []

    class Learners(LocalLearners):
        class _learner(LocalLearners._learner):
            @staticmethod
            def export_weights(copies=True, on_device=False, of=tuple(STATE)):
                asked.append((copies, on_device))
                return LocalLearners._learner.export_weights(copies, on_device, of)

    class Takes(Engine):
        takes = how

        def set_weights(self, weights, version, state):
            assert (state["w"].data_ptr() == STATE[weights]["w"].data_ptr()) is lent
            return super().set_weights(weights, version, state)

    engine = Takes()
    push_weights(Learners(), engine, 3)
    # Left where they are: a way through the host's memory would take most of the time.
    assert engine.taken == [(Weights.TARGET, 3), (Weights.POLICY, 3)] and asked == [(not lent, lent)]


@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(1, 7))
def test_the_checksum_knows_every_bit_and_nothing_of_the_layout(seed, dtype, rows):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(8, 6, generator=generator).to(dtype)
    expected = checksum([whole])
    assert checksum([whole[:rows], whole[rows:]]) == expected  # of a learner's two matrices the engine makes one
    assert checksum([whole[:, :2], whole[:, 2:]]) == expected  # and divides it between its workers
    assert checksum([torch.cat([whole, torch.zeros(3, 6, dtype=dtype)])]) == expected
    damaged = whole.clone()
    bits = damaged.view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[rows, seed % 6] ^= 1 << (seed % 15)
    assert checksum([damaged]) != expected


def test_a_shared_state_is_read_where_it_lies(ray_session):
    """Each bit arrives, and none is copied: whoever asks again is given the same memory."""
    weights = {
        "matrix": torch.randn(512, 512).to(torch.bfloat16),
        "turned": torch.randn(64, 512).T,
        "number": torch.tensor(2.5, dtype=torch.float16),
    }
    rest = {"step": 3, "moments": {0: [torch.randn(64, 64), None]}, "array": np.arange(4096)}
    reference = ray.put(SharedState(weights=weights, rest=rest))
    first, again = ray.get(reference), ray.get(reference)
    assert first["weights"].keys() == weights.keys()
    for name, tensor in weights.items():
        read = first["weights"][name]
        assert read.dtype is tensor.dtype and torch.equal(read, tensor)
        assert read.data_ptr() == again["weights"][name].data_ptr()
    assert first["rest"]["step"] == 3 and np.array_equal(first["rest"]["array"], rest["array"])
    moment, nothing = first["rest"]["moments"][0]
    assert torch.equal(moment, rest["moments"][0][0]) and nothing is None


def test_a_shared_state_crosses_a_pipe_too():
    state = SharedState(weight=torch.randn(600, 600))
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        assert torch.equal(pickle.loads(pickle.dumps(state, protocol))["weight"], state["weight"])
