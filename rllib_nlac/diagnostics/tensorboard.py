"""What a run writes into its trial's folder beside Tune's curves: transitions in words, and how numbers are distributed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rllib_nlac.diagnostics.examples import Examples
from rllib_nlac.diagnostics.in_words import state_parts, transition_parts
from rllib_nlac.inputs.foreign import fenced_parts
from rllib_nlac.types import BellmanTarget, Refinement

logger = logging.getLogger(__name__)


class TransitionWriter:
    """Writes one transition an iteration as TensorBoard text, next to the curves that Tune writes; and three for the report.

    A file that cannot be written ends the recording, with a warning, and not the run.

    Args:
        logdir: The trial's folder.
    """

    def __init__(self, logdir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._logdir = logdir
        self._writer: Any = None
        self._examples = Examples(Path(logdir))
        with self._tolerant():
            self._writer = SummaryWriter(logdir, filename_suffix=".transitions")

    def write(self, iteration: int, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]) -> None:
        """Takes the batch's first transition whose action was refined, or else its first."""
        if self._writer is None:
            return
        changed = (i for i, r in enumerate(refinements) if r.critique and r.action and not r.kept)
        place = next(changed, 0)
        with self._tolerant():
            self._writer.add_text("transition", fenced_parts(transition_parts(targets[place], refinements[place])), iteration)
            self._writer.flush()
            self._examples.keep(iteration, targets, refinements)

    def write_state(self, name: str, iteration: int, refinement: Refinement) -> None:
        """One of the states that every evaluation asks the critic about, by its name."""
        if self._writer is None:
            return
        with self._tolerant():
            self._writer.add_text(f"evaluation/{name}", fenced_parts(state_parts(refinement)), iteration)
            self._writer.flush()

    def write_histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """How numbers are distributed, by their names; of none and of what is not finite nothing is written."""
        if self._writer is None:
            return
        with self._tolerant():
            for name, numbers in values.items():
                if (finite := numbers[np.isfinite(numbers)]).size:
                    self._writer.add_histogram(name, finite, iteration)
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            with self._tolerant():
                self._writer.close()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            logger.warning("no more transitions are recorded: cannot write to %s: %s", self._logdir, error)
