"""Waves that run ahead: a batch is asked about, by the weights of before, while the batch before it is learned from."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rllib_nlac.activity import activity
from rllib_nlac.checkpoints.checkpoint import VerifiedFolder
from rllib_nlac.language.report import StageReport
from rllib_nlac.replay.buffer import ReplaySample
from rllib_nlac.types import BellmanTarget, Refinement

NEXT_BATCH = "next_batch.pkl"  # its file in a checkpoint


@dataclass(frozen=True)
class CriticisedBatch:
    """Transitions with what the critic said of them.

    Attributes:
        sample: The transitions.
        targets: The Bellman target of each.
        refinements: The refined action of each.
        report: What the waves cost and lost.
        seconds: That they took.
        version: Of the weights that answered.
    """

    sample: ReplaySample
    targets: Sequence[BellmanTarget]
    refinements: Sequence[Refinement]
    report: StageReport
    seconds: float
    version: int


class WavesAhead:
    """Asks about a batch in a thread of its own. Engine, chat and the stages' random state are that thread's until ``finish``.

    Args:
        ask: Runs the waves of transitions.

    Attributes:
        ready: What is learned from next; None where nothing has been asked about yet.
    """

    def __init__(self, ask: Callable[[ReplaySample], CriticisedBatch]) -> None:
        self._ask = ask
        self._asking: Future[CriticisedBatch] | None = None
        self.ready: CriticisedBatch | None = None

    def begin(self, sample: ReplaySample) -> None:
        """Begins to ask about transitions."""
        self._asking = asking = Future[CriticisedBatch]()

        def work() -> None:
            try:
                with activity.silent():
                    asking.set_result(self._ask(sample))
            except BaseException as error:
                asking.set_exception(error)

        threading.Thread(target=work, name="waves", daemon=True).start()

    def finish(self) -> CriticisedBatch | None:
        """Waits for the waves that were begun. Their batch is then ``ready``, and returned; None where none were.

        Whoever is interrupted here, as by Ctrl-C, may call it again.

        Raises:
            Exception: What ended the waves, an ``EngineError`` for example.
        """
        if self._asking is None:
            return None
        try:
            self.ready = self._asking.result()
        except Exception:
            self._asking = self.ready = None
            raise
        self._asking = None
        return self.ready

    def drop(self) -> None:
        """Waits for the waves that were begun, and forgets them and what was ready."""
        if self._asking is not None:
            self._asking.exception()
        self._asking = self.ready = None

    def save(self, folder: Path) -> None:
        """Writes what is ready; nothing may be under way."""
        if self.ready is not None:
            with (folder / NEXT_BATCH).open("wb") as file:
                pickle.dump(self.ready, file)

    def load(self, verified: VerifiedFolder) -> None:
        """Takes what ``save`` wrote, and nothing where it wrote nothing."""
        self.drop()
        file = verified.folder / NEXT_BATCH
        if file.is_file():
            with verified.open(file) as opened:
                self.ready = pickle.load(opened)
