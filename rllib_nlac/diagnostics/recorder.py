"""What a run leaves for a reader beside its results: the record, and the same transitions as text in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.diagnostics.metrics import timed
from rllib_nlac.diagnostics.record import (
    EVALUATION,
    ITERATION,
    Learned,
    Line,
    Record,
    Said,
    future,
    moment,
    plain,
    token_texts,
    transition_lines,
)
from rllib_nlac.diagnostics.tensorboard import Summaries
from rllib_nlac.episode import episode_success, known_task_seed, task_of
from rllib_nlac.language.prediction import predicted_success
from rllib_nlac.language.report import StageReport
from rllib_nlac.replay.buffer import ReplaySample
from rllib_nlac.replay.dialogues import as_row
from rllib_nlac.types import BellmanTarget, Future, Refinement, Transition, Weights
from rllib_nlac.version import __version__

# What a configuration holds that tells a reader nothing.
UNTOLD = ("env", "env_config", "simple_optimizer", "policies", "logger_config")
TokenLogprobs = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Mapping[Weights, Sequence[np.ndarray]]]


@dataclass(frozen=True)
class CriticisedBatch:
    """Transitions with what the critic said of them.

    Attributes:
        sample: The transitions.
        targets: The Bellman target of each.
        refinements: The refined action of each.
        report: What the waves cost and lost.
        version: Version of the weights that answered.
    """

    sample: ReplaySample
    targets: Sequence[BellmanTarget]
    refinements: Sequence[Refinement]
    report: StageReport
    version: int


class Recorder:
    """Writes what an algorithm with a critic in words does.

    Args:
        algorithm: The algorithm, with ``config``, ``stages``, ``chat``, ``metrics`` and ``notices``.
        token_logprobs: What each set of weights says of the tokens of answers, by their prompts.

    Attributes:
        record: Files that the report and ``rllib inspect`` read.
    """

    def __init__(self, algorithm: Any, token_logprobs: TokenLogprobs) -> None:
        self._algorithm, self._token_logprobs = algorithm, token_logprobs
        self._settings = algorithm.config.record_settings
        self._begun: tuple[CriticisedBatch, dict[int, Any]] | None = None
        self._summaries = Summaries(algorithm.logdir)
        self.record = Record(_folder_of(algorithm), self._settings, partial(algorithm.notices.update, "record"))
        self.record.write_run(_facts_of(algorithm))

    def begin(self, batch: CriticisedBatch) -> None:
        """Takes what the critic said of a batch, before it is learned from."""
        self._begun = None
        if self.record.takes(self._algorithm.iteration + 1):
            with timed(self._algorithm.metrics, "record", "recording"):
                self._begun = batch, self._token_strips(batch.targets, batch.refinements)

    def end(self, learned: Learned | None) -> None:
        """Writes the batch, with what training said of it; None where nothing was learned."""
        if self._begun is None:
            return
        (batch, strips), self._begun = self._begun, None
        iteration, answered_by = self._algorithm.iteration + 1, self._algorithm.stages.answered_by
        with timed(self._algorithm.metrics, "record", "recording"):
            said = Said(batch.targets, batch.refinements, answered_by, batch.report.raw, strips, batch.version)
            lines = transition_lines(iteration, said, learned, self._settings.transitions)
            self.record.write(ITERATION, iteration, lines)
            self._summaries.write_transition(iteration, lines)

    def _token_strips(
        self, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]
    ) -> dict[int, dict[str, dict[str, Any]]]:
        """What the weights that are about to learn say of each token of a few transitions, by the place in the batch."""
        texts = token_texts(targets, refinements, min(self._settings.tokens, self._settings.transitions))
        if not texts:
            return {}
        said = self._token_logprobs([prompt for _, _, prompt, _ in texts], [g.token_ids for *_, g in texts])
        decode = self._algorithm.chat.tokenizer.decode
        strips: dict[int, dict[str, dict[str, Any]]] = {}
        for number, (place, name, _, g) in enumerate(texts):
            strip: dict[str, Any] = {"text": [decode([token]) for token in g.token_ids]}
            if name == "action" and len(g.logprobs) == len(g.token_ids):
                strip["played"] = np.round(g.logprobs, 4)
            strip |= {weights.value: np.round(own[number], 4) for weights, own in said.items()}
            strips.setdefault(place, {})[name] = strip
        return strips

    def evaluation(
        self,
        iteration: int,
        episodes: Sequence[SingleAgentEpisode],
        asked: Sequence[tuple[Transition, Sequence[Future]]],
        fixed: Sequence[Line],
    ) -> None:
        """Writes what an evaluation found.

        Args:
            iteration: Number of the iteration; 0 before training.
            episodes: Episodes of the evaluation.
            asked: Turns of them with the futures that the critic predicted.
            fixed: What it says of the states that every evaluation asks about.
        """
        if not self._settings.transitions:
            return
        version = self._algorithm.weight_version
        common = {"iteration": iteration, "version": version}
        answered_by = self._algorithm.stages.answered_by
        who = {role: [w.value, 0 if w is Weights.INITIAL else version] for role, w in answered_by.items()}
        lines: list[Line] = [
            {"kind": "state", "number": number, **common, **line, "by": who} for number, line in enumerate(fixed, start=1)
        ]
        lines += [
            {
                "kind": "prediction",
                **common,
                **moment(t),
                "age": version - t.generation.weight_version,
                "futures": [future(each) for each in futures],
                "predicted": predicted_success(futures),
            }
            for t, futures in asked[: self._settings.transitions]
        ]
        lines += [
            {
                "kind": "episode",
                **common,
                "episode": episode.id_,
                "task": task_of(episode),
                "task_seed": known_task_seed(episode),
                **as_row(episode),
                "success": episode_success(episode),
                "stop_reason": episode.get_infos(-1).get("stop_reason"),
            }
            for episode in episodes[: self._settings.episodes]
        ]
        self.record.write(EVALUATION, iteration, lines)

    def close(self) -> None:
        """Closes TensorBoard's file."""
        self._summaries.close()


def _folder_of(algorithm: Any) -> Path:
    """The trial's folder where that is a local one: what lies elsewhere reaches it only now and then."""
    storage = algorithm._storage
    if storage is not None and isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        return Path(storage.trial_fs_path)
    return Path(algorithm.logdir)


def _facts_of(algorithm: Any) -> dict[str, Any]:
    config = algorithm.config
    own, usual = _told(config), _told(type(algorithm).get_default_config())
    return {
        "algorithm": type(algorithm).__name__,
        "env": str(config.env),
        "env_config": config.env_config,
        "language_model": config.language_model,
        "version": __version__,
        "config": {key: [value, usual.get(key)] for key, value in own.items() if value != usual.get(key)},
    }


def _told(config: Any) -> dict[str, Any]:
    """A configuration as a reader understands it: its own attributes as JSON says them, without classes and functions."""
    kinds = (bool, int, float, str, list, tuple, dict)
    shown = {key: value for key, value in vars(config).items() if not key.startswith("_") and key not in UNTOLD}
    return {key: plain(value) for key, value in shown.items() if value is None or isinstance(value, kinds)}
