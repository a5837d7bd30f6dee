"""One process of a group: ``python channel_process.py PICKLED``, an ``Errand`` in hexadecimal digits; says how rounds end."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Errand:
    """What a process does.

    Attributes:
        rank: Its number.
        plan: How the tensors travel.
        invitations: Of each round.
        signals: Sent by the process to itself before a broadcast, by round and number of the broadcast.
    """

    rank: int
    plan: Any
    invitations: list
    signals: dict[tuple[int, int], signal.Signals] = field(default_factory=dict)


def main() -> None:
    sys.argv[0] = "rllib"  # so that the package imports no more than is asked for
    import torch

    from rllib_nlac.engine.channel import Channel, ChannelError
    from rllib_nlac.engine.shared import checksum

    errand: Errand = pickle.loads(bytes.fromhex(sys.argv[1]))
    channel = None
    for invitation in errand.invitations:
        try:
            channel = channel or Channel(invitation, errand.rank)
            channel.enter(invitation)
            received = number = 0
            for bucket in errand.plan.buckets:
                memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
                for piece in bucket.pieces(memory):
                    if (invitation.round, number) in errand.signals:
                        os.kill(os.getpid(), errand.signals[invitation.round, number])
                    channel.broadcast(piece)
                    number += 1
                received += checksum(bucket.tensors(memory).values())
            print(f"received {received}", flush=True)
        except ChannelError as error:
            print(f"fault: {error}", flush=True)
            channel.close()
            return


if __name__ == "__main__":
    main()
