"""Gradient steps that were stopped because a loss or a gradient was not finite: what the log says, and when a run must end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence

MAX_IN_A_ROW = 3
logger = logging.getLogger(__name__)
ROLES = {CRITIC: "critic", POLICY: "policy"}


@dataclass(frozen=True)
class StoppedStep:
    """A gradient step that no learner has made.

    Attributes:
        minibatch: Its number within the batch.
        norm: Norm of the gradient; infinite or NaN.
        broken: Names of the sequences whose own loss is not finite, with that loss.
        others: Names of the other sequences.
    """

    minibatch: int
    norm: float
    broken: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        cause = f"losses that are not finite: {'; '.join(self.broken)}" if self.broken else "every loss by itself is finite"
        beside = f"; also in it: {'; '.join(self.others)}" if self.others else ""
        return f"minibatch {self.minibatch} has a gradient of norm {self.norm}, and {cause}{beside}"


class StoppedSteps:
    """Follows a run's gradient steps.

    Attributes:
        in_a_row: How many of the latest were stopped, one after the other.
        last: The latest that was.
        num_in_batch: How many of the latest batch were.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last: StoppedStep | None = None
        self.num_in_batch = 0

    @property
    def too_many(self) -> bool:
        """Whether too many were stopped in a row for it to be one bad batch."""
        return self.in_a_row >= MAX_IN_A_ROW

    @property
    def notice(self) -> str | None:
        """What to say to a person; None where all steps of the latest batch were made."""
        return f"an update was stopped: {str(self.last)[:300]} (the log has it all)" if self.num_in_batch else None

    def note(self, sequences: Sequence[TrainingSequence], table: np.ndarray) -> None:
        """Takes the steps of one batch and logs those that were stopped; ends early where there are too many.

        Args:
            sequences: What was trained on.
            table: A row of item, role, minibatch, loss and norm of the minibatch's gradient for each sequence, shape (N, 5).
        """
        self.num_in_batch = 0
        for step in _steps(sequences, table):
            if step is None:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self.num_in_batch += 1
            self.last = step
            logger.warning("an update was stopped; weights, target, priorities and engines keep what they had: %s", step)
            if self.too_many:
                return


def _steps(sequences: Sequence[TrainingSequence], table: np.ndarray) -> Iterator[StoppedStep | None]:
    """The steps of a batch in their order, None for one that was made."""
    for minibatch in np.unique(table[:, 2]):
        rows = table[table[:, 2] == minibatch]
        if math.isfinite(norm := float(rows[0, 4])):
            yield None
            continue
        broken = {(int(item), int(role)): loss for item, role, _, loss, _ in rows if not math.isfinite(loss)}
        members = [s for s in sequences if s.minibatch == minibatch and s.item >= 0]
        named = {f"{s.origin} ({ROLES[s.role]})": broken.get((s.item, s.role), 0.0) for s in members}
        yield StoppedStep(
            int(minibatch),
            norm,
            tuple(f"{name}, loss {loss}" for name, loss in named.items() if not math.isfinite(loss)),
            tuple(name for name, loss in named.items() if math.isfinite(loss)),
        )
