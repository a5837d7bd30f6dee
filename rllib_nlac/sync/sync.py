"""Stage 8: new weights reach every engine in one batched, timed and verified step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_nlac.engine.protocol import Engine, EngineError
from rllib_nlac.engine.shared import SharedState, checksum, require_finite
from rllib_nlac.learner.group import index_of, on_every_learner
from rllib_nlac.types import Weights


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes:
        version: The version that the engines serve from now on.
        seconds: From the learner's export to the last engine's confirmation.
        num_bytes: Bytes of both weight sets.
    """

    version: int
    seconds: float
    num_bytes: int


def push_weights(learner_group: LearnerGroup, engine: Engine, version: int) -> SyncReport:
    """Copies θ and, where there is one, θ̄ from the learner to every engine, each set in one message.

    Raises:
        EngineError: An engine did not take the weights: its checksum of what it received differs from the learner's.
        NotFiniteError: Weights are not finite; nothing was sent.
    """
    started = time.perf_counter()
    states = export_weights(learner_group)
    for which, state in states.items():
        require_finite(state, f"the {which} weights that version {version} would have")
    # The policy's come last, so that they are what serves next without another swap.
    order = sorted(states, key=lambda weights: weights is Weights.POLICY)
    num_bytes = sum(_push(engine, which, version, states[which]) for which in order)
    return SyncReport(version, time.perf_counter() - started, num_bytes)


def push_initial_weights(learner_group: LearnerGroup, engine: Engine) -> None:
    """Gives every engine a copy of θ to keep, before anything is learned; once in a run, as version 0.

    Raises:
        EngineError: As ``push_weights``.
    """
    state = {name: tensor.clone() for name, tensor in export_weights(learner_group)[Weights.POLICY].items()}
    _push(engine, Weights.INITIAL, 0, state)


def _push(engine: Engine, which: Weights, version: int, state: dict[str, Any]) -> int:
    """Sends one set and returns its bytes."""
    sent, received = checksum(state.values()), engine.set_weights(which, version, state)
    if sent != received:
        raise EngineError(
            f"sync of version {version}: the engine's {which} weights have the checksum {received}, the learner's "
            f"{sent}; a transfer broke, or the engine runs another model than config.language_model"
        )
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def export_weights(learner_group: LearnerGroup) -> dict[Weights, dict[str, Any]]:
    """θ and θ̄ from the first learner; every learner takes part, because ZeRO 3 gathers shards from all of them."""
    return next(state for state in on_every_learner(learner_group, _export_from_first) if state is not None)


def _export_from_first(learner: Any) -> dict[Weights, dict[str, Any]] | None:
    states = learner.export_weights()
    return {which: SharedState(state) for which, state in states.items()} if index_of(learner) == 0 else None
