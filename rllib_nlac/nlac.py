"""NLAC as an RLlib algorithm. ``training_step`` is the algorithm, one call a stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    REPLAY_BUFFER_ADD_DATA_TIMER,
    REPLAY_BUFFER_SAMPLE_TIMER,
    REPLAY_BUFFER_UPDATE_PRIOS_TIMER,
    TIMERS,
)

from rllib_nlac.algorithm import LanguageAlgorithm
from rllib_nlac.checkpoint import VerifiedFolder
from rllib_nlac.config import LOGGED, NLACConfig
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence
from rllib_nlac.learner.losses import priorities
from rllib_nlac.metrics import TransitionWriter, log_replay, log_stages
from rllib_nlac.replay.buffer import ReplaySample, TextReplayBuffer
from rllib_nlac.types import BellmanTarget, Refinement

LANGUAGE_STAGES_TIMER = "language_stages_timer"
REPLAY_BUFFER = "replay_buffer"  # its folder in a checkpoint


class ReplayAlgorithm(LanguageAlgorithm):
    """Off-policy: keeps text episodes in a prioritised buffer and draws transitions."""

    @override(Algorithm)
    def _create_local_replay_buffer_if_necessary(self, config: Any) -> TextReplayBuffer:
        """Ours, where RLlib would look for a buffer class in ``replay_buffer_config``."""
        settings = config.replay_settings
        return TextReplayBuffer(
            env=str(config.env),
            capacity=settings["capacity"],
            max_bytes=settings["max_bytes"],
            alpha=settings["alpha"],
            seed=config.seed or 0,
        )

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        super().setup(config)
        if self.offline_data is not None:
            prompts = load_prompts(self.config.prompts, str(self.config.env))
            self.local_replay_buffer.add(self.offline_data.episodes(self.chat, prompts))

    @property
    def is_learning_offline(self) -> bool:
        """Whether this iteration rests on logged dialogues alone."""
        if self.config.env == LOGGED:
            return True
        return self.iteration < (self.config.offline_iterations or 0)

    def replay(self) -> ReplaySample | None:
        """Collects, keeps and draws; None until enough was collected."""
        if self.is_learning_offline:
            return self._draw()
        episodes = self.collect()
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_ADD_DATA_TIMER)):
            self.local_replay_buffer.add(episodes)
        if self.env_steps_sampled() < self.config.num_steps_sampled_before_learning_starts:
            return None
        return self._draw()

    def _draw(self) -> ReplaySample:
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_SAMPLE_TIMER)):
            return self.local_replay_buffer.sample_transitions(
                self.config.total_train_batch_size, self._beta(), self.config.n_step
            )

    def prioritise(self, sample: ReplaySample, values: np.ndarray) -> None:
        """Gives the transitions of a sample their priorities; one that is NaN leaves a transition's as it is."""
        known = np.flatnonzero(~np.isnan(values))
        self.local_replay_buffer.update_priorities_of([sample.nodes[i] for i in known], values[known])

    def _beta(self) -> float:
        """β rises linearly from its first value to 1."""
        settings = self.config.replay_settings
        share = min(self.env_steps_sampled() / max(settings["beta_final_timesteps"], 1), 1.0)
        return settings["beta"] + (1.0 - settings["beta"]) * share

    @override(LanguageAlgorithm)
    def save_parts(self, folder: Path) -> None:
        super().save_parts(folder)
        if self.config.store_buffer_in_checkpoints:
            self.local_replay_buffer.save(folder / REPLAY_BUFFER)

    @override(LanguageAlgorithm)
    def load_parts(self, verified: VerifiedFolder) -> None:
        super().load_parts(verified)
        if (folder := verified.folder / REPLAY_BUFFER).is_dir():
            self.local_replay_buffer.load(folder, verified.open)


class NLAC(ReplayAlgorithm):
    """Natural Language Actor-Critic (arXiv 2512.04601)."""

    stages_class: type[LanguageStages] = LanguageStages

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> NLACConfig:
        return NLACConfig()

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        super().setup(config)
        self.stages = self.make_stages(self.stages_class)
        self.writer = TransitionWriter(self.logdir)

    @override(LanguageAlgorithm)
    def training_step(self) -> None:
        # 1, 2, 3. Environments and engine make episodes; replay keeps them and draws transitions.
        sample = self.replay()
        if sample is None:
            return

        # 4, 5, 6. Backup, critique and refinement, in three waves of generation.
        with self.metrics.log_time((TIMERS, LANGUAGE_STAGES_TIMER)):
            targets, refinements, report = self.stages.run(sample.transitions, target_version=self.weight_version)
        log_stages(self.metrics, report, targets, refinements)
        self.heed_stages(report)
        self.writer.write(self.iteration, targets, refinements)

        # 7. The two losses, one gradient step a minibatch; what they say of each transition becomes its priority.
        sequences = self.sequences_of(sample, targets, refinements)
        self.heed_lessons(sequences)
        if not sequences:
            return
        losses = self.learn(sequences, count=len(sample.transitions))
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_UPDATE_PRIOS_TIMER)):
            of_policy = self.policy_losses(losses[POLICY], refinements)
            self.prioritise(sample, priorities(losses[CRITIC], of_policy))
        log_replay(self.metrics, self.local_replay_buffer, sample, self.weight_version)

        # 8. The new weights go to every engine.
        self.sync_weights()

    def policy_losses(self, losses: np.ndarray, refinements: Sequence[Refinement]) -> np.ndarray:
        """L2 as the priorities take it: 0 where the policy has nothing to learn, NaN where that is not known.

        Args:
            losses: L2 of the transitions that the policy was trained on, NaN elsewhere; shape (N,).
            refinements: Of the same transitions.

        Returns:
            Shape (N,). Where only a part of the batch is judged all are NaN: else what happened to be judged would be drawn
            more often.
        """
        if self.config.judged_fraction < 1:
            return np.full(len(losses), np.nan)
        nothing = np.array([r.generation is None and not r.is_unknown for r in refinements], bool)
        return np.where(nothing, 0.0, losses)

    def sequences_of(
        self, sample: ReplaySample, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]
    ) -> list[TrainingSequence]:
        """At most one critic and one policy sequence per transition and epoch, importance-weighted; see ``num_policy_epochs``.

        Each loss is the mean over its sequences of a minibatch, weighted as the refinements say, times its coefficient.
        """
        sequences: list[TrainingSequence] = []
        size, count, epochs = self.config.minibatch_size, len(targets), self.config.num_epochs
        critic_only = epochs - (epochs if self.config.num_policy_epochs is None else self.config.num_policy_epochs)
        orders = [range(count), *(self.rng.permutation(count).tolist() for _ in range(epochs - 1))]
        steps = [(epoch, order[start : start + size]) for epoch, order in enumerate(orders) for start in range(0, count, size)]
        for minibatch, (epoch, members) in enumerate(steps):
            critic = [(i, g) for i in members if (g := targets[i].generation) and self.config.critic_loss_coeff]
            policy = [(i, g) for i in members if (g := refinements[i].generation) and self.config.policy_loss_coeff]
            policy = policy if epoch >= critic_only else []
            total = sum(refinements[item].weight for item, _ in policy)
            for item, answer in critic:
                ids = self.stages.predict_ids(sample.transitions[item])
                weight = self.config.critic_loss_coeff * float(sample.weights[item]) / len(critic)
                origin = f"transition {sample.transitions[item].id}"
                sequences.append(TrainingSequence(ids, answer.token_ids, CRITIC, item, minibatch, weight, origin=origin))
            for item, answer in policy:
                # The prompt is the one that the engine saw when it sampled the stored action.
                ids = sample.transitions[item].generation.prompt_ids
                weight = self.config.policy_loss_coeff * float(sample.weights[item]) * refinements[item].weight / total
                origin = f"transition {sample.transitions[item].id}"
                sequences.append(TrainingSequence(ids, answer.token_ids, POLICY, item, minibatch, weight, origin=origin))
        return sequences

    @override(LanguageAlgorithm)
    def own_state(self) -> dict[str, Any]:
        """Also the stages' random state."""
        return {**super().own_state(), "stages_rng": self.stages.rng.bit_generator.state}

    @override(LanguageAlgorithm)
    def set_own_state(self, state: dict[str, Any]) -> None:
        super().set_own_state(state)
        self.stages.rng.bit_generator.state = state["stages_rng"]
        self.stages.forget_targets()

    @override(LanguageAlgorithm)
    def cleanup(self) -> None:
        if getattr(self, "writer", None) is not None:
            self.writer.close()
        super().cleanup()
