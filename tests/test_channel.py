"""Broadcasts in a group of our own: every bit arrives, and whoever is lost or late ends in an error within the limit."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from channel_process import Errand
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from rllib_nlac.engine import buckets
from rllib_nlac.engine.buckets import Plan
from rllib_nlac.engine.channel import Channel, ChannelError, Gathering, Sender
from rllib_nlac.engine.shared import checksum, same_bits

HOST, CPU = "127.0.0.1", torch.device("cpu")
LIMIT_S = 8.0
PROCESS = Path(__file__).parent / "channel_process.py"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def state(seed: int, count: int = 6, size: int = 300) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(size + i, 3, generator=generator).to(DTYPES[i % 4]) for i in range(count)}


class TestBuckets:
    @given(st.integers(0, 2**20), st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=8), st.booleans())
    def test_what_is_unpacked_is_what_was_packed(self, seed, sizes, turned):
        torch.manual_seed(seed)
        given = {f"w{i}": torch.randn(size, 3).to(dtype) for i, (size, dtype) in enumerate(sizes)}
        given |= {"number": torch.tensor(2.5)}
        if turned:
            given = {name: tensor.T for name, tensor in given.items()}
        plan = Plan.of(given, bucket_bytes=200)
        found = {}
        for bucket in plan.buckets:
            assert bucket.num_bytes <= 200 or len(bucket.places) == 1
            memory = torch.full((plan.largest + 7,), 255, dtype=torch.uint8)
            bucket.pack(given, memory)
            assert sum(map(len, bucket.pieces(memory))) == bucket.num_bytes
            found |= bucket.tensors(memory)
        assert list(found) == list(given) == list(plan.places)
        assert all(found[name].shape == tensor.shape and same_bits(found[name], tensor) for name, tensor in given.items())

    def test_no_broadcast_is_larger_than_a_bucket(self, monkeypatch):
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
        plan = Plan.of({"small": torch.ones(2), "large": torch.ones(50)}, bucket_bytes=64)
        pieces = [
            len(piece) for bucket in plan.buckets for piece in bucket.pieces(torch.empty(plan.largest, dtype=torch.uint8))
        ]
        assert pieces == [16, 64, 64, 64, 16] and plan.largest > buckets.BUCKET_BYTES


class Group:
    """Receivers in processes of their own, and the learner's end here."""

    def __init__(self, plan: Plan, signals: dict[int, dict], rounds: int = 1) -> None:
        self.gathering = Gathering(HOST, 3, "gloo", LIMIT_S)
        self.invitations = [self.gathering.invite(patience_s=120) for _ in range(rounds)]
        self.gathering._round = 0
        self.processes = [
            subprocess.Popen(
                [sys.executable, PROCESS, pickle.dumps(Errand(rank, plan, self.invitations, signals.get(rank, {}))).hex()],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank in (1, 2)
        ]

    def begin(self, round: int) -> None:
        self.gathering._round = round
        until = time.monotonic() + 120
        while not self.gathering.all_there():
            assert time.monotonic() < until, "the receivers did not come"
            time.sleep(0.01)
        self.gathering.begin()

    def said(self) -> list[str]:
        return [process.communicate(timeout=60)[0] for process in self.processes]


@pytest.fixture()
def group():
    groups = []

    def make(*arguments, **keys) -> Group:
        groups.append(Group(*arguments, **keys))
        return groups[-1]

    yield make
    for each in groups:
        for process in each.processes:
            process.kill()
            process.wait()


@pytest.mark.process
class TestProcesses:
    def test_every_bit_reaches_every_process_round_after_round(self, group):
        """One group serves for all rounds, and torch's default group is nobody's business."""
        default, states = distributed.group.WORLD, [state(1), state(2)]
        plan = Plan.of(states[0], bucket_bytes=4000)
        assert len(plan.buckets) > 2
        made, sender = group(plan, {}, rounds=2), Sender()
        for round, each in enumerate(states):
            made.begin(round)
            sender.send(each, plan, made.invitations[round], CPU)
        expected = "".join(f"received {checksum(each.values())}\n" for each in states)
        assert made.said() == [expected, expected]
        assert distributed.group.WORLD is default
        sender.close()

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
    def test_a_process_lost_in_the_middle_ends_it_for_all_within_the_limit(self, group, how):
        """Tensors of a megabyte, so that the system's buffers do not take them for one that does not read them."""
        large = state(1, count=8, size=400_000)
        plan = Plan.of(large, bucket_bytes=1)
        made, sender = group(plan, {1: {(0, 3): how}}), Sender()
        made.begin(0)
        started = time.monotonic()
        with pytest.raises(ChannelError, match="a broadcast failed"):
            sender.send(large, plan, made.invitations[0], CPU)
        assert time.monotonic() - started < LIMIT_S + 5
        if how is signal.SIGSTOP:
            made.processes[0].kill()
        lost, other = made.said()
        assert not lost and other.startswith("fault: a broadcast failed") and "received" not in other
        assert time.monotonic() - started < 2 * LIMIT_S + 10
        with pytest.raises(ChannelError, match="has started since the group was formed"):
            sender.send(large, plan, made.gathering.invite(1), CPU)  # in this group nothing is sent any more


def receive(invitation, rank: int, numbers: torch.Tensor, errors: list) -> threading.Thread:
    def run() -> None:
        try:
            channel = Channel(invitation, rank)
            channel.enter(invitation)
            channel.broadcast(numbers)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class TestOneProcess:
    """The ends of a group may be in one, too."""

    def test_nobody_begins_before_all_are_there(self):
        gathering, numbers, errors = Gathering(HOST, 3, "gloo", LIMIT_S), torch.zeros(2, 4), []
        invitation = gathering.invite(30)
        first = receive(invitation, 1, numbers[0], errors)
        time.sleep(0.3)
        assert not gathering.all_there() and first.is_alive()
        second = receive(invitation, 2, numbers[1], errors)
        while not gathering.all_there():
            time.sleep(0.01)
        assert first.is_alive() and second.is_alive()
        gathering.begin()
        Sender().send({"w": torch.arange(4.0)}, Plan.of({"w": torch.zeros(4)}), invitation, CPU)
        first.join(10), second.join(10)
        assert not errors and numbers.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]

    @pytest.mark.parametrize(
        ("end", "match"),
        [(lambda gathering: gathering.call_off(), "was called off"), (lambda gathering: None, "waited for in vain")],
        ids=["called off", "patience"],
    )
    def test_whoever_waits_is_sent_home_or_goes(self, end, match):
        gathering, errors = Gathering(HOST, 3, "gloo", LIMIT_S), []
        waiting = receive(gathering.invite(2), 1, torch.zeros(4), errors)
        while not gathering._store.check(["0/1"]):
            time.sleep(0.01)
        end(gathering)
        waiting.join(10)
        assert not waiting.is_alive() and isinstance(errors[0], ChannelError)
        with pytest.raises(ChannelError, match=match):
            raise errors[0]

    def test_a_group_that_does_not_form_ends_in_an_error(self):
        """As where an engine is killed after it was there."""
        gathering = Gathering(HOST, 3, "gloo", 1.0)
        started = time.monotonic()
        with pytest.raises(ChannelError, match="forming the group"):
            Sender().send({"w": torch.zeros(4)}, Plan.of({"w": torch.zeros(4)}), gathering.invite(5), CPU)
        assert time.monotonic() - started < 8

    def test_a_store_that_is_gone_is_an_error(self):
        gathering = Gathering(HOST, 2, "gloo", 1.0)
        invitation = gathering.invite(5)
        del gathering
        with pytest.raises(ChannelError, match="reaching the group's store"):
            Channel(invitation, 1)
