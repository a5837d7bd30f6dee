"""What ``engine/channel.py`` takes from below torch's process groups. A failure here says what broke with a new torch."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

STUBS = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
LIMIT = timedelta(seconds=30)


def test_a_store_serves_at_a_port_of_the_systems_choice_and_its_waits_end():
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    other = distributed.TCPStore("127.0.0.1", store.port, wait_for_workers=False, timeout=LIMIT)
    assert not store.check(["key"])
    with pytest.raises(RuntimeError):
        other.wait(["key"], LIMIT / 300)
    other.set("key", b"value")
    assert store.check(["key"]) and store.get("key") == b"value"


def test_gloo_takes_a_device_and_a_limit_and_is_no_part_of_the_default_group():
    default = distributed.group.WORLD  # another test may have left one
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    alone = distributed.ProcessGroupGloo(distributed.PrefixStore("alone", store), 0, 1, options)
    numbers = torch.arange(4)
    how = distributed.BroadcastOptions()
    how.rootRank, how.timeout = 0, LIMIT
    alone.broadcast([numbers], how).wait(LIMIT)
    alone.abort()
    assert numbers.tolist() == [0, 1, 2, 3] and distributed.group.WORLD is default


def test_nccls_group_is_made_and_ended_in_the_same_way():
    """Without a GPU by what torch declares; its environment variable is read where a group is made."""
    declared = STUBS.read_text()
    nccl = declared[declared.index("class ProcessGroupNCCL(Backend)") :]
    assert "class Options(Backend.Options)" in nccl and "def abort(self)" in nccl.partition("\nclass ")[0]
    for name in ("store: Store", "rank: int", "size: int", "options: Options"):
        assert name in nccl.partition("def _group_start")[0]
    assert "TORCH_NCCL_BLOCKING_WAIT" in inspect.getsource(distributed.distributed_c10d)
