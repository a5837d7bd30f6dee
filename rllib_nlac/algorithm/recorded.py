"""Algorithms that leave a record of what their critic thought: what is configured, and what is written when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.fs
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.examination import ExaminationConfig
from rllib_nlac.algorithm.examined import ExaminedAlgorithm
from rllib_nlac.diagnostics.metrics import stage
from rllib_nlac.diagnostics.record import (
    EVALUATION,
    ITERATION,
    Learned,
    Record,
    RecordSettings,
    Said,
    future,
    moment,
    opinion,
    plain,
    token_texts,
    transition_lines,
)
from rllib_nlac.episode import episode_success, known_task_seed, task_of
from rllib_nlac.language.prediction import predicted_success
from rllib_nlac.language.report import StageReport
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.replay.buffer import ReplaySample
from rllib_nlac.replay.dialogues import as_row
from rllib_nlac.types import BellmanTarget, Future, Refinement, Transition, Weights
from rllib_nlac.version import __version__

# What a configuration holds that tells a reader nothing.
UNTOLD = ("env", "env_config", "simple_optimizer", "policies", "logger_config")


class RecordedConfig(ExaminationConfig):
    """What is recorded of a run. A mixin, like ``LanguageConfig``."""

    NESTED_RANGES = {
        "record": {
            "transitions": ranges.WHOLE_NOT_NEGATIVE,
            "tokens": ranges.WHOLE_NOT_NEGATIVE,
            "episodes": ranges.WHOLE_NOT_NEGATIVE,
            "max_bytes": ranges.POSITIVE,
        }
    }

    SETTINGS = {"record": RecordSettings}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.record: dict[str, Any] = {}

    @override(AlgorithmConfig)
    def reporting(self, *, record: dict[str, Any] | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets what ``rllib inspect`` will have to read; RLlib's own keys are taken too.

        Args:
            record: The fields of ``RecordSettings`` (transitions, tokens, episodes, max_bytes).

        Returns:
            This updated config.
        """
        arguments = locals()
        super().reporting(**kwargs)
        return self._set(arguments)

    @property
    def record_settings(self) -> RecordSettings:
        """How much is recorded."""
        return RecordSettings(**self.record)


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


class RecordedAlgorithm(ExaminedAlgorithm):
    """A mixin between an examined algorithm and its training step."""

    record: Record
    _begun: tuple[CriticisedBatch, dict[int, Any]] | None = None

    def open_record(self) -> None:
        """Begins the record, or goes on with it."""
        self.record = Record(self._record_folder(), self.config.record_settings, partial(self.notices.heed, "record"))
        default = type(self).get_default_config()
        own, usual = _told(self.config), _told(default)
        changed = {key: [value, usual.get(key)] for key, value in own.items() if value != usual.get(key)}
        self.record.write_run(
            {
                "algorithm": type(self).__name__,
                "env": str(self.config.env),
                "env_config": self.config.env_config,
                "language_model": self.config.language_model,
                "version": __version__,
                "config": changed,
            }
        )

    def _record_folder(self) -> Path:
        """The trial's folder where that is a local one: what lies elsewhere reaches it only now and then."""
        storage = self._storage
        if storage is not None and isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
            return Path(storage.trial_fs_path)
        return Path(self.logdir)

    def begin_record(self, batch: CriticisedBatch) -> None:
        """Takes what the critic said of a batch, before it is learned from."""
        self._begun = None
        if self.record.takes(self.iteration + 1):
            with stage(self.metrics, "record", "recording"):
                strips = self._token_strips(batch.targets, batch.refinements)
            self._begun = batch, strips

    def end_record(self, learned: Learned | None) -> None:
        """Writes the batch, with what training said of it; None where nothing was learned."""
        if self._begun is None:
            return
        (batch, strips), self._begun = self._begun, None
        iteration, count = self.iteration + 1, self.config.record_settings.transitions
        with stage(self.metrics, "record", "recording"):
            said = Said(batch.targets, batch.refinements, self.stages.answered_by, batch.report.raw, strips, batch.version)
            self.record.write(ITERATION, iteration, transition_lines(iteration, said, learned, count))

    def _token_strips(
        self, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]
    ) -> dict[int, dict[str, dict[str, Any]]]:
        """What the weights that are about to learn say of each token of a few transitions, by the place in the batch."""
        settings = self.config.record_settings
        texts = token_texts(targets, refinements, min(settings.tokens, settings.transitions))
        if not texts:
            return {}
        prompts, ids = [prompt for _, _, prompt, _ in texts], [g.token_ids for *_, g in texts]
        said = self._with_learners(
            lambda: on_every_learner(self.learner_group, lambda learner: learner.token_logprobs(prompts, ids))
        )[0]
        strips: dict[int, dict[str, dict[str, Any]]] = {}
        for number, (place, name, _, g) in enumerate(texts):
            strip: dict[str, Any] = {"text": [self.chat.tokenizer.decode([token]) for token in g.token_ids]}
            if name == "action" and len(g.logprobs) == len(g.token_ids):
                strip["played"] = np.round(g.logprobs, 4)
            strip |= {weights.value: np.round(own[number], 4) for weights, own in said.items()}
            strips.setdefault(place, {})[name] = strip
        return strips

    @override(ExaminedAlgorithm)
    def examined(
        self,
        episodes: Sequence[SingleAgentEpisode],
        asked: Sequence[tuple[Transition, Sequence[Future]]],
        fixed: Sequence[Refinement],
    ) -> None:
        settings = self.config.record_settings
        if not settings.transitions:
            return
        iteration, version = self.evaluated_iteration, self.weight_version
        common = {"iteration": iteration, "version": version}
        who = {role: [w.value, 0 if w is Weights.INITIAL else version] for role, w in self.stages.answered_by.items()}
        lines: list[dict[str, Any]] = [
            {"kind": "state", "number": number, **common, **moment(each.transition), **opinion(each), "by": who}
            for number, each in enumerate(fixed, start=1)
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
            for t, futures in asked[: settings.transitions]
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
            for episode in episodes[: settings.episodes]
        ]
        self.record.write(EVALUATION, iteration, lines)


def _told(config: Any) -> dict[str, Any]:
    """A configuration as a reader understands it: its own attributes as JSON says them, without classes and functions."""
    kinds = (bool, int, float, str, list, tuple, dict)
    shown = {key: value for key, value in vars(config).items() if not key.startswith("_") and key not in UNTOLD}
    return {key: plain(value) for key, value in shown.items() if value is None or isinstance(value, kinds)}
