"""RLlib's learners, each in the bundle that its trial reserved for it.

RLlib names the bundles of its EnvRunners and none for its learners: they would take the GPUs of an engine's bundle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.train._internal import backend_executor
from ray.train._internal.worker_group import WorkerGroup

_one_at_a_time = threading.Lock()


@contextmanager
def learners_in(bundles: Sequence[int]) -> Iterator[None]:
    """While it lasts, a group of learners that RLlib starts takes these bundles of the current placement group.

    Args:
        bundles: An index for each learner; -1 is any.
    """

    if all(index < 0 for index in bundles):  # any will do, and nobody waits for another group's start
        yield
        return

    class Placed(WorkerGroup):
        _remote_cls: Any

        def add_workers(self, num_workers: int) -> None:
            remote, left = self._remote_cls, iter(bundles)

            class Named:
                @staticmethod
                def options(**options: Any) -> Any:
                    return remote.options(**options, placement_group_bundle_index=next(left))

            self._remote_cls = Named
            try:
                super().add_workers(num_workers)
            finally:
                self._remote_cls = remote

    with _one_at_a_time:
        original = backend_executor.WorkerGroup
        backend_executor.WorkerGroup = Placed
        try:
            yield
        finally:
            backend_executor.WorkerGroup = original
