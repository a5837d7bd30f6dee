"""A group of processes of our own, in which the first learner's tensors reach the workers of all engines by broadcast.

torch's default group is left alone: DeepSpeed and vLLM have one each in the same processes. torch's store and backends are used
below it, which are private seams, touched here alone and pinned by ``tests/compatibility``. Every step has a limit of time.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from rllib_nlac.engine.buckets import Plan
from rllib_nlac.limits import TookTooLong, within

GLOO, NCCL = "gloo", "nccl"
MARGIN_S = 5.0  # beyond its own limit, before a step that does not keep it is left behind
_GO, _OFF = b"go", b"off"


class ChannelError(RuntimeError):
    """A broadcast, or the group for it, did not come about; what it would have brought has to come another way."""


@dataclass(frozen=True)
class Invitation:
    """All that a process must know to take part in a group's next broadcast.

    Attributes:
        group: The group's name, which no other group has.
        host: Where the group's store is.
        port: Of the store.
        size: Number of processes; the learner's is number 0.
        backend: "gloo" on CPUs, "nccl" where each process has a GPU of its own.
        timeout_s: Limit of each step: to reach the store, to form the group, to broadcast one tensor.
        round: Counts the group's broadcasts of a whole weight set, from 0, in which it is formed.
        patience_s: So long a process waits until all others are there, too; an engine answers first what it has begun.
    """

    group: str
    host: str
    port: int
    size: int
    backend: str
    timeout_s: float
    round: int
    patience_s: float

    def device(self, own: torch.device) -> torch.device:
        """Where tensors must be that are broadcast, in a process that computes on a device of its own."""
        return torch.device("cpu") if self.backend == GLOO else own


class Gathering:
    """Calls a group together, and says when it may begin; in the process that coordinates.

    Args:
        host: This machine's address, by which the others reach it.
        size: Number of processes.
        backend: "gloo" or "nccl".
        timeout_s: Limit of each step.
    """

    def __init__(self, host: str, size: int, backend: str, timeout_s: float) -> None:
        self._host, self._size, self._backend, self._timeout_s = host, size, backend, timeout_s
        self._name, self._round = uuid.uuid4().hex, -1
        limit = timedelta(seconds=timeout_s)
        self._store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)

    def invite(self, patience_s: float) -> Invitation:
        """What all processes are given for the next broadcast."""
        self._round += 1
        where = (self._name, self._host, self._store.port)
        return Invitation(*where, self._size, self._backend, self._timeout_s, self._round, patience_s)

    def all_there(self) -> bool:
        """Whether every process but the learner's waits for this round to begin."""
        return self._store.check([_there(self._round, rank) for rank in range(1, self._size)])

    def begin(self) -> None:
        """Lets them go on to the broadcast."""
        self._store.set(_word(self._round), _GO)

    def call_off(self) -> None:
        """Sends home those that wait, or have not come yet."""
        self._store.set(_word(self._round), _OFF)


class Channel:
    """One process's end of a group.

    Args:
        invitation: Its first.
        rank: This process's number; the learner's is 0.

    Raises:
        ChannelError: The group was formed before, without this process, or was not formed within the limit of time.
    """

    def __init__(self, invitation: Invitation, rank: int) -> None:
        if invitation.round:
            raise ChannelError("this process has started since the group was formed")
        self.group, self._rank = invitation.group, rank
        self._timeout = timedelta(seconds=invitation.timeout_s)
        self._backend: Any = None

        def reach() -> Any:
            return distributed.TCPStore(invitation.host, invitation.port, wait_for_workers=False, timeout=self._timeout)

        self._store = self._within("reaching the group's store", reach)

    def enter(self, invitation: Invitation) -> None:
        """Waits until all processes are ready for a round; in the first one they form the group then.

        Raises:
            ChannelError: The round was called off, or the limit of time is over.
        """
        if self._rank:
            word = _word(invitation.round)
            try:
                self._store.set(_there(invitation.round, self._rank), b"")
                self._store.wait([word], timedelta(seconds=invitation.patience_s))
                is_called_off = self._store.get(word) != _GO
            except RuntimeError as error:
                raise ChannelError(f"the others were waited for in vain: {_first_line(error)}") from error
            if is_called_off:
                raise ChannelError("the broadcast was called off")
        if self._backend is None:
            names = distributed.PrefixStore(invitation.group, self._store)

            def form() -> Any:
                if invitation.backend == NCCL:
                    return _nccl(names, self._rank, invitation.size, self._timeout)
                return _gloo(names, self._rank, invitation.size, self._timeout, _address_towards(invitation))

            self._backend = self._within("forming the group", form, close=_abort)

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Fills a contiguous tensor with the learner's numbers, or at the learner hands them out. All must call it.

        Raises:
            ChannelError: A process has ended or does not take part; the group is of no use any more.
        """
        if numbers.is_cuda:
            torch.cuda.synchronize(numbers.device)  # what fills or still reads it was queued by another stream

        options = distributed.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._timeout

        def run() -> None:
            with torch.cuda.device(numbers.device) if numbers.is_cuda else nullcontext():
                self._backend.broadcast([numbers], options).wait(self._timeout)

        self._within("a broadcast", run)

    def close(self) -> None:
        """Ends this process's part; the others' broadcasts fail at once."""
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None:
            ending = threading.Thread(target=_abort, args=(backend,), daemon=True)
            ending.start()
            ending.join(MARGIN_S)  # a process that ends meanwhile would do so by an abort

    def _within(self, what: str, call: Callable[[], Any], close: Callable[[Any], None] | None = None) -> Any:
        """Makes a call that may wait for other processes; what comes too late is closed."""
        seconds = self._timeout.total_seconds()
        try:
            return within(seconds + MARGIN_S, call, close)
        except TookTooLong as error:
            raise ChannelError(f"{what} took longer than {seconds:g} s") from error
        except Exception as error:
            raise ChannelError(f"{what} failed: {_first_line(error)}") from error


class Sender:
    """The learner's end of whatever group is the latest."""

    def __init__(self) -> None:
        self._channel: Channel | None = None

    def send(self, state: Mapping[str, torch.Tensor], plan: Plan, invitation: Invitation, device: torch.device) -> None:
        """Broadcasts a state, packed into one bucket at a time.

        Args:
            state: The tensors.
            plan: How they travel.
            invitation: To the broadcast.
            device: On which this process computes.

        Raises:
            ChannelError: It did not reach everybody.
        """
        try:
            if self._channel is None or self._channel.group != invitation.group:
                self.close()
                self._channel = Channel(invitation, 0)
            self._channel.enter(invitation)
            memory = torch.empty(plan.largest, dtype=torch.uint8, device=invitation.device(device))
            for bucket in plan.buckets:
                bucket.pack(state, memory)
                for piece in bucket.pieces(memory):
                    self._channel.broadcast(piece)
        except BaseException:
            self.close()  # so that the others need not wait for the limit of time
            raise

    def close(self) -> None:
        """Ends this process's part."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Else gloo takes the device of the host's name, which on some machines is the loopback's.
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Else a watchdog ends the whole process when a broadcast fails.
    with _environment(TORCH_NCCL_BLOCKING_WAIT="1"):
        return distributed.ProcessGroupNCCL(store, rank, size, options)


def _abort(backend: Any) -> None:
    backend.abort()


def _address_towards(invitation: Invitation) -> str:
    """Of this machine, in the network in which the group's store is."""
    family, kind, _, _, address = socket.getaddrinfo(invitation.host, invitation.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _there(round: int, rank: int) -> str:
    return f"{round}/{rank}"


def _word(round: int) -> str:
    return f"{round}/word"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
