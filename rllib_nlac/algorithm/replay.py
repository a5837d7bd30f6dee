"""Off-policy learning: what algorithms that keep episodes in a prioritised buffer configure and do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.logs import LOGGED, check_logs, played_env, take_logs
from rllib_nlac.checkpoints.checkpoint import CheckpointError
from rllib_nlac.diagnostics.metrics import timed
from rllib_nlac.replay.buffer import ReplaySample, TextReplayBuffer
from rllib_nlac.replay.dialogues import DialogueData

REPLAY_BUFFER = "replay_buffer"  # its folder in a checkpoint


@dataclass(frozen=True)
class ReplaySettings:
    """How transitions are kept and drawn; each field is a key of ``replay_buffer_config``.

    Attributes:
        capacity: The most transitions.
        max_bytes: The most memory, in bytes of texts and token ids.
        alpha: How much priorities count when transitions are drawn; 0 draws uniformly.
        beta: How much importance weights correct for that, at the start.
        beta_final: And at the end.
        beta_final_timesteps: Environment steps from the start to the end. Learning from logs alone makes none.
        success_share: At least this share of the draws is from episodes that succeeded, as soon as there are any; which of
            their turns, priorities decide. For tasks that are hardly ever won at first. 0: priorities alone.
        in_checkpoints: Whether checkpoints hold the buffer, with its priorities.
    """

    capacity: int = 50_000
    max_bytes: int = 4 << 30
    alpha: float = 0.6
    beta: float = 0.4
    beta_final: float = 1.0
    beta_final_timesteps: int = 100_000
    success_share: float = 0.0
    in_checkpoints: bool = True


class ReplayConfig(LanguageAlgorithmConfig):
    """Off-policy learning from prioritised replay. A mixin, like ``LanguageConfig``."""

    learns_from_logs = True
    input_: Any  # RLlib's
    RANGES = {
        "n_step": ranges.COUNT,
        "offline_iterations": ranges.Range(0, whole=True, optional=True),
    }
    NESTED_RANGES = {
        "replay_buffer_config": {
            "capacity": ranges.COUNT,
            "max_bytes": ranges.POSITIVE,
            "alpha": ranges.NOT_NEGATIVE,
            "beta": ranges.SHARE,
            "beta_final": ranges.SHARE,
            "beta_final_timesteps": ranges.NOT_NEGATIVE,
            "success_share": ranges.SHARE,
            "in_checkpoints": ranges.FLAG,
        }
    }
    SETTINGS = {"replay_buffer_config": ReplaySettings}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.replay_buffer_config: dict[str, Any] = {}
        self.n_step = 1
        self.env: Any
        # offline_data(...)
        self.offline_data_class = DialogueData
        self.offline_iterations: int | None = None

    @override(AlgorithmConfig)
    def offline_data(self, *, offline_iterations: int | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets logged dialogues; of RLlib's own keys ``input_`` is taken: files, patterns or folders of JSONL or parquet.

        They go into the replay buffer before the first iteration. Without an environment all of training rests on them.

        Args:
            offline_iterations: Number of first iterations that learn from the logs alone; None is 0 with an
                environment.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().offline_data(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        replay_buffer_config: dict[str, Any] | None = NotProvided,
        n_step: int | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets replay. An iteration draws ``train_batch_size_per_learner`` transitions for each learner.

        Args:
            replay_buffer_config: The fields of ``ReplaySettings``, such as ``alpha: 0`` for uniform replay.
            n_step: Number of stored steps that a target rests on before it bootstraps. The longest possible episode's length
                makes it Monte Carlo. Nothing corrects for the stored actions in these steps.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @property
    def played_env(self) -> str:
        """The environment that episodes are of."""
        return played_env(self)

    @property
    def replay_settings(self) -> ReplaySettings:
        """How transitions are kept and drawn."""
        return ReplaySettings(**self.replay_buffer_config)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        take_logs(self, "dialogues")
        super().validate()
        check_logs(self, alone=self.env == LOGGED)
        self._check(
            self.minibatch_size <= self.total_train_batch_size,
            "minibatch_size",
            f"must not exceed the batch, train_batch_size_per_learner times the learners, {self.total_train_batch_size}",
        )
        self._check(self.offline_iterations is None or self.is_offline, "offline_iterations", "needs input_, the dialogues")
        self._check(
            not self.min_sample_timesteps_per_iteration or not (self.env == LOGGED or self.offline_iterations),
            "min_sample_timesteps_per_iteration",
            "is never reached while logged dialogues alone are learned from: leave it out",
        )
        self._check(
            self.in_evaluation or not self.evaluation_interval or self.played_env != LOGGED,
            "evaluation_interval",
            "needs evaluation_config: {env: NAME}, for logged dialogues cannot be played",
        )


class ReplayAlgorithm(LanguageAlgorithm):
    """Off-policy: keeps text episodes in a prioritised buffer and draws transitions."""

    local_replay_buffer: TextReplayBuffer
    num_logged = 0  # episodes of logged dialogues
    named_logs: str | None = None  # which dialogues ``input_`` names, by their fingerprint

    @override(Algorithm)
    def _create_local_replay_buffer_if_necessary(self, config: Any) -> TextReplayBuffer:
        """Ours, where RLlib would look for a buffer class in ``replay_buffer_config``."""
        settings = config.replay_settings
        return TextReplayBuffer(
            env=config.played_env,
            capacity=settings.capacity,
            max_bytes=settings.max_bytes,
            alpha=settings.alpha,
            success_share=settings.success_share,
            seed=config.seed or 0,
        )

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        super().setup(config)
        self._keep_logs()

    def _keep_logs(self) -> None:
        """Puts logged dialogues into the empty buffer, where there are any."""
        if self.offline_data is not None:
            prompts = self.config.prompts_for(self.config.played_env)
            self.local_replay_buffer.add(self.offline_data.episodes(self.chat, prompts))
            self.notices.update("logs", self.offline_data.notice)
            self.local_replay_buffer.logs = self.named_logs = self.offline_data.fingerprint
            self.num_logged = self.local_replay_buffer.num_added
            if gone := self.local_replay_buffer.num_evicted:
                settings, kept = self.config.replay_settings, self.local_replay_buffer.get_num_episodes()
                raise ValueError(
                    f"the logged dialogues do not fit the replay buffer: of {gone + kept} only the last {kept} did. Raise "
                    f"replay_buffer_config's capacity, {settings.capacity} turns, or max_bytes, {settings.max_bytes}"
                )

    @override(LanguageAlgorithm)
    def step(self) -> dict[str, Any]:
        """As RLlib's.

        Raises:
            CheckpointError: The buffer is a checkpoint's, and was not filled with what ``input_`` names.
        """
        if self.named_logs not in (None, self.local_replay_buffer.logs):
            raise CheckpointError(
                "config.input_ names other dialogues than those that the checkpoint's replay buffer was filled with, and a "
                "restored buffer goes on as it was. Set input_ as it was, or leave it out in a run with an environment; to "
                "learn from new dialogues, export the model (rllib export) and begin a run with it"
            )
        return super().step()

    @property
    def is_learning_offline(self) -> bool:
        """Whether this iteration rests on logged dialogues alone."""
        if self.config.env == LOGGED:
            return True
        return self.iteration < (self.config.offline_iterations or 0)

    @override(LanguageAlgorithm)
    def collect(self) -> list[SingleAgentEpisode]:
        """One iteration's episodes; none while logged dialogues are all that is learned from."""
        return [] if self.is_learning_offline else super().collect()

    def replay(self, episodes: Sequence[SingleAgentEpisode]) -> ReplaySample:
        """Keeps episodes and draws transitions."""
        if episodes:
            with timed(self.metrics, "replay", "keeping the episodes"):
                self.local_replay_buffer.add(episodes)
        return self.draw()

    def draw(self) -> ReplaySample:
        """A batch of transitions."""
        with timed(self.metrics, "replay", "drawing transitions"):
            return self.local_replay_buffer.sample_transitions(
                self.config.total_train_batch_size, self._beta(), self.config.n_step
            )

    def prioritise(self, sample: ReplaySample, values: np.ndarray) -> None:
        """Gives the transitions of a sample their priorities; one that is NaN leaves a transition's as it is.

        Transitions that have made room for others since they were drawn have none any more.
        """
        known = np.flatnonzero(~np.isnan(values) & self.local_replay_buffer.holds(sample))
        self.local_replay_buffer.update_priorities_of([sample.nodes[i] for i in known], values[known])

    def _beta(self) -> float:
        """β moves linearly from its first value to its last."""
        settings = self.config.replay_settings
        share = min(self.env_steps_sampled() / max(settings.beta_final_timesteps, 1), 1.0)
        return settings.beta + (settings.beta_final - settings.beta) * share

    @override(LanguageAlgorithm)
    def save_parts(self, folder: Path) -> None:
        super().save_parts(folder)
        if self.config.replay_settings.in_checkpoints:
            self.local_replay_buffer.save(folder / REPLAY_BUFFER)

    @override(LanguageAlgorithm)
    def load_parts(self, folder: Path) -> None:
        super().load_parts(folder)
        if (folder / REPLAY_BUFFER).is_dir():
            self.local_replay_buffer.load(folder / REPLAY_BUFFER)
        elif self.local_replay_buffer.num_added > self.num_logged:  # what was played since is to be played again
            self.local_replay_buffer = self._create_local_replay_buffer_if_necessary(self.config)
            self._keep_logs()
