"""Bundles of resources: which fit the nodes of a cluster, which of a trial's a process is to take, and whose a GPU is.

Tune reserves for a trial a group of bundles, one for each of its processes: its own, EnvRunners, evaluation EnvRunners,
learners and engines, in this order. A process that names none of them takes what it needs from any, also from one that was
reserved for another, which then waits for ever.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group_table

Bundle = Mapping[str, float]  # amounts by resource

MOST_TRIES = 20_000  # of arrangements, before one that was not found counts as possible
_EPSILON = 1e-6


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Attributes:
        name: What a person calls it.
        resources: All that it has, in use or not.
        id: Ray's.
    """

    name: str
    resources: Bundle
    id: str = field(default="", compare=False)


def is_of_ray() -> bool:
    """Whether Ray started this process, for an actor or a task: a script is none, nor is the ``rllib`` command."""
    return ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE


def has_gpu() -> bool:
    """Whether this process may use a GPU: there is one, and if Ray started it, Ray gave it one.

    Ray lets a process that asked for none see all of them, unless RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO is 1.
    """
    return torch.cuda.is_available() and (not is_of_ray() or bool(ray.get_gpu_ids()))


@functools.cache
def computes_in_bfloat16() -> bool:
    """Whether this machine's processor multiplies in bfloat16, which is two to four times as fast as float32 there."""
    try:
        flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return False
    return bool(flags) and not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags[0].split())


@contextmanager
def alone_on_shared_gpu() -> Iterator[None]:
    """Where Ray gave this process a part of a GPU, waits until no other is in here on the same GPU and machine.

    vLLM measures what it takes by how much memory is free before and after, whoever took it.
    """
    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0) if is_of_ray() else 0
    if not 0 < share < 1:
        yield
        return
    (gpu,) = ray.get_gpu_ids()
    with Path(tempfile.gettempdir(), f"rllib_nlac_{os.getuid()}_gpu_{gpu}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def nodes_of_cluster() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})", row["Resources"], row["NodeID"])
        for row in ray.nodes()
        if row["Alive"]
    ]


def fits(bundle: Bundle, room: Bundle) -> bool:
    """Whether a bundle finds place."""
    return all(room.get(name, 0) >= amount - _EPSILON for name, amount in bundle.items())


def fit_together(bundles: Sequence[Bundle], nodes: Sequence[Bundle], strategy: str = "PACK") -> bool:
    """Whether the nodes hold all bundles at once, each bundle on one node.

    Args:
        bundles: What is wanted.
        nodes: What each node has.
        strategy: Ray's: STRICT_PACK wants all on one node, STRICT_SPREAD each on its own, and the others want nothing.
    """
    if strategy == "STRICT_PACK":
        bundles = [total(bundles)]
    largest_first = sorted(bundles, key=lambda bundle: (bundle.get("GPU", 0), len(bundle), bundle.get("CPU", 0)), reverse=True)
    rooms: list[Bundle | None] = list(nodes)  # None takes no more
    tries = MOST_TRIES

    def places(bundle: Bundle) -> Iterator[tuple[int, Bundle]]:
        """The rooms in which a bundle finds place, those that are alike once."""
        tried: list[Bundle] = []
        for i, room in enumerate(list(rooms)):
            if room is not None and room not in tried and fits(bundle, room):
                tried.append(room)
                yield i, room

    left: list[Iterator[tuple[int, Bundle]]] = []  # the places that each bundle has not been tried in
    taken: list[tuple[int, Bundle]] = []  # where each bundle is, and what was free there before
    while len(taken) < len(largest_first):
        bundle = largest_first[len(taken)]
        if len(left) == len(taken):
            left.append(places(bundle))
        place = next(left[-1], None)
        if place is None:
            left.pop()
            if not taken:
                return False
            i, room = taken.pop()
            rooms[i] = room
            continue
        if tries <= 0:
            return True
        tries -= 1
        taken.append(place)
        rooms[place[0]] = None if strategy == "STRICT_SPREAD" else _without(place[1], bundle)
    return True


def total(bundles: Iterable[Bundle]) -> dict[str, float]:
    """The sum of all."""
    summed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            summed[name] = summed.get(name, 0) + amount
    return summed


def shown(bundle: Bundle) -> str:
    """As a person reads it, "4 CPUs, 1 GPU"; of what every node has only these two."""
    counted = [f"{bundle[name]:g} {name}{'s' * (bundle[name] != 1)}" for name in ("CPU", "GPU") if bundle.get(name)]
    own = [name for name, amount in bundle.items() if amount and name not in ("CPU", "GPU") and not _is_rays_own(name)]
    return ", ".join([*counted, *(f"{bundle[name]:g} {name}" for name in sorted(own))]) or "nothing"


def reserved(count: int, behind: int, need: Bundle) -> list[int]:
    """The bundles of this process's own placement group that were reserved for processes of one kind.

    They are counted from the end, since Tune drops a first bundle that is empty.

    Args:
        count: Number of the processes.
        behind: Number of bundles that follow theirs.
        need: What each takes.

    Returns:
        An index for each process; -1, which is any of them, where there is no such group or it was not made for this.
    """
    # Asking for the group would start a Ray of its own where there is none.
    group = ray.util.get_current_placement_group() if count and ray.is_initialized() else None
    if group is None:
        return [-1] * count
    bundles = placement_group_table(group)["bundles"]
    first = len(bundles) - behind - count
    indices = list(range(first, first + count))
    if first < 0 or not all(fits(need, bundles[index]) for index in indices):
        return [-1] * count
    return indices


def _without(room: Mapping[str, float], bundle: Bundle) -> dict[str, float]:
    return {name: amount - bundle.get(name, 0) for name, amount in room.items()}


def _is_rays_own(name: str) -> bool:
    return name in ("memory", "object_store_memory") or name.startswith(("node:", "accelerator_type:"))
