"""Stage 8: new weights reach every engine in one batched, timed and verified step.

In one process the engine is handed copies, or on a GPU, where it makes its own, the learner's very tensors. Otherwise Ray's
object store carries them; between GPUs it is vLLM's weight transfer, and the store has a copy for engines that are lost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_nlac.engine.protocol import Engine, EngineError, Handed, HandOver
from rllib_nlac.engine.shared import NotFiniteError, SharedState, checksum, require_finite
from rllib_nlac.engine.weight_transfer import Delivery, Sent
from rllib_nlac.learner.group import index_of, on_every_learner, on_first_learner
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


def push_weights(
    learner_group: LearnerGroup, engine: Engine, version: int, of: Sequence[Weights] = (Weights.POLICY, Weights.TARGET)
) -> SyncReport:
    """Copies θ and, where there is one, θ̄ from the learner to every engine, each set in one message.

    Args:
        learner_group: Who has them.
        engine: Who gets them.
        version: Version of the weights.
        of: Which sets the engine answers with.

    Raises:
        EngineError: An engine did not take the weights: its checksum of what it received differs from the learner's.
        NotFiniteError: Weights are not finite; nothing was sent.
    """
    started = time.perf_counter()
    sets = _hand_over(learner_group, engine, version, of)
    # The policy's come last, so that they are what serves next without another swap.
    for which in sorted(sets, key=lambda weights: weights is Weights.POLICY):
        _push(learner_group, engine, which, version, sets[which])
    return SyncReport(version, time.perf_counter() - started, sum(handed.num_bytes for handed in sets.values()))


def push_initial_weights(learner_group: LearnerGroup, engine: Engine) -> None:
    """Gives every engine a copy of θ to keep, before anything is learned; once in a run, as version 0.

    Raises:
        EngineError: As ``push_weights``.
    """
    handed = _hand_over(learner_group, engine, 0, of=(Weights.POLICY,))[Weights.POLICY]
    _push(learner_group, engine, Weights.INITIAL, 0, handed, source=Weights.POLICY)


def export_weights(learner_group: LearnerGroup) -> dict[Weights, dict[str, Any]]:
    """Copies of θ and θ̄; every learner takes part, because ZeRO 3 gathers shards from all of them."""
    return _of_first(on_every_learner(learner_group, _export_from_first))


def _hand_over(learner_group: LearnerGroup, engine: Engine, version: int, of: Sequence[Weights]) -> dict[Weights, Handed]:
    """Has the first learner look at its weights, and do what the way to the engines begins with."""
    within = engine.takes in (HandOver.COPIES, HandOver.LENDS)  # tensors reach only an engine in the learner's own process
    how = HandOver.PUTS if within and not learner_group.is_local else engine.takes
    from_first = functools.partial(_hand_over_from_first, version=version, of=of, how=how)
    found = _of_first(on_every_learner(learner_group, from_first))
    if isinstance(found, NotFiniteError):
        raise found
    return found


def _push(
    learner_group: LearnerGroup, engine: Engine, which: Weights, version: int, handed: Handed, source: Weights | None = None
) -> None:
    """Brings one set to every engine, of the learner's set of the same name or of another one."""
    send = functools.partial(_send, learner_group, source or which)
    received = engine.take(which, version, replace(handed, send=send, lent=not learner_group.is_local))
    if handed.checksum != received:
        raise EngineError(
            f"sync of version {version}: the engine's {which} weights have the checksum {received}, the learner's "
            f"{handed.checksum}; a transfer broke, or the engine runs another model than config.language_model"
        )


def _of_first(answers: Sequence[Any]) -> Any:
    return next(answer for answer in answers if answer is not None)


def _export_from_first(learner: Any) -> dict[Weights, SharedState] | None:
    states = learner.export_weights()
    return {which: SharedState(state) for which, state in states.items()} if index_of(learner) == 0 else None


def _hand_over_from_first(
    learner: Any, version: int, of: Sequence[Weights], how: HandOver
) -> dict[Weights, Handed] | NotFiniteError | None:
    # What is put is copied by that, and what is kept is sent before the next gradient step. A GPU checks weights fast.
    copies = how is HandOver.COPIES
    states = learner.export_weights(copies=copies, on_device=not copies, of=of)
    if index_of(learner) != 0:
        return None
    try:
        for which, state in states.items():
            require_finite(state, f"the {which} weights that version {version} would have")
    except NotFiniteError as error:
        return error  # not raised: it would come as an error of Ray's
    if how is HandOver.KEEPS:
        learner.outgoing = states
    handed = {}
    for which, tensors in states.items():
        state = SharedState(tensors)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        where = None if how is HandOver.KEEPS else ray.put(state) if how is HandOver.PUTS else state
        handed[which] = Handed(where, checksum(tensors.values()), num_bytes)
    return handed


def _send(learner_group: LearnerGroup, which: Weights, delivery: Delivery | None) -> Sent:
    return on_first_learner(learner_group, functools.partial(_send_from_first, which=which, delivery=delivery))


def _send_from_first(learner: Any, which: Weights, delivery: Delivery | None) -> Sent:
    state = learner.outgoing.pop(which)
    answers: list[tuple[int, int]] = []
    fault = None
    if delivery is not None:
        try:
            answers = learner.weight_sender.send(state, delivery)
        except Exception as error:
            cause = getattr(error, "cause", None) or error  # Ray's own text of it is a whole traceback
            fault = f"{type(cause).__name__}: {cause}"
    return Sent(ray.put(SharedState(state)), answers, fault)
