"""NLAC as an RLlib algorithm. ``training_step`` is the algorithm, one call a stage."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    REPLAY_BUFFER_ADD_DATA_TIMER,
    REPLAY_BUFFER_SAMPLE_TIMER,
    REPLAY_BUFFER_UPDATE_PRIOS_TIMER,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.tune.execution.placement_groups import PlacementGroupFactory

from rllib_nlac.config import NLACConfig
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, shard_evenly, to_multi_agent_batch
from rllib_nlac.learner.learner import SEQUENCE_LOSSES
from rllib_nlac.learner.losses import priorities
from rllib_nlac.metrics import TransitionWriter, log_replay, log_stages, log_sync, logprob_gap
from rllib_nlac.replay.buffer import ReplaySample, TextReplayBuffer
from rllib_nlac.sampling.chat import Chat
from rllib_nlac.sampling.engines import make_engine
from rllib_nlac.sync.sync import push_weights
from rllib_nlac.types import BellmanTarget, Refinement

LANGUAGE_STAGES_TIMER = "language_stages_timer"
STATE = "nlac"  # key of our part of a checkpoint


class NLAC(Algorithm):
    """Natural Language Actor-Critic (arXiv 2512.04601)."""

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> NLACConfig:
        return NLACConfig()

    @override(Algorithm)
    def setup(self, config: NLACConfig) -> None:
        super().setup(config)
        seed = self.config.seed or 0
        self.chat = Chat.from_pretrained(self.config.model_path, self.config.max_context)
        self.engine = make_engine(self.config, self.chat)
        engine = self.engine
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                group.foreach_env_runner(lambda runner: runner.attach(engine))
        prompts_for = functools.cache(lambda env: load_prompts(self.config.prompts, env))
        self.stages = LanguageStages(self.engine, self.chat, prompts_for, self.config.stage_settings, seed)
        self.weight_version = 0
        self.writer = TransitionWriter(self.logdir)
        self._sync_weights()

    @override(Algorithm)
    def _create_local_replay_buffer_if_necessary(self, config: NLACConfig) -> TextReplayBuffer:
        """Ours, where RLlib would look for a buffer class in ``replay_buffer_config``."""
        settings = config.replay_settings
        return TextReplayBuffer(
            env=str(config.env),
            capacity=settings["capacity"],
            max_bytes=settings["max_bytes"],
            alpha=settings["alpha"],
            seed=config.seed or 0,
        )

    @override(Algorithm)
    def training_step(self) -> None:
        # 1, 2. Environments and engine make episodes.
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            episodes, results = synchronous_parallel_sample(
                worker_set=self.env_runner_group, sample_timeout_s=self.config.sample_timeout_s,
                _uses_new_env_runners=True, _return_metrics=True,
            )  # fmt: skip
        self.metrics.aggregate(results, key=ENV_RUNNER_RESULTS)
        self.metrics.log_value("logprob_gap", logprob_gap(self.learner_group, episodes, self.weight_version), window=1)

        # 3. Replay keeps them and draws transitions.
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_ADD_DATA_TIMER)):
            self.local_replay_buffer.add(episodes)
        if self._env_steps_sampled() < self.config.num_steps_sampled_before_learning_starts:
            return
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_SAMPLE_TIMER)):
            sample = self.local_replay_buffer.sample_transitions(self.config.total_train_batch_size, self._beta())

        # 4, 5, 6. Backup, critique and refinement, in three waves of generation.
        with self.metrics.log_time((TIMERS, LANGUAGE_STAGES_TIMER)):
            targets, refinements, report = self.stages.run(sample.transitions, target_version=self.weight_version)
        log_stages(self.metrics, report, targets, refinements)
        self.writer.write(self.iteration, targets, refinements)

        # 7. The two losses, one gradient step a minibatch.
        sequences = self.training_sequences(sample, targets, refinements)
        if not sequences:
            return  # nothing parsed; the counts say what
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            results = self.learner_group.update(
                batch=to_multi_agent_batch(
                    shard_evenly(sequences, max(self.config.num_learners, 1)), env_steps=len(sample.transitions)
                ),
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._env_steps_sampled()},
            )
        losses = self._take_losses(results, len(sample.transitions))
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_UPDATE_PRIOS_TIMER)):
            self.local_replay_buffer.update_priorities_of(sample.nodes, priorities(losses[CRITIC], losses[POLICY]))
        log_replay(self.metrics, self.local_replay_buffer, sample, self.weight_version)

        # 8. The new weights go to every engine.
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self._sync_weights()

    def training_sequences(
        self, sample: ReplaySample, targets: list[BellmanTarget], refinements: list[Refinement]
    ) -> list[TrainingSequence]:
        """What the learner trains on: at most one critic and one policy sequence per transition.

        Each loss is the mean over its sequences of a minibatch, importance weights applied.
        """
        sequences: list[TrainingSequence] = []
        size = self.config.minibatch_size
        for minibatch, start in enumerate(range(0, len(targets), size)):
            members = range(start, min(start + size, len(targets)))
            critic = [(i, g) for i in members if (g := targets[i].generation) and self.config.critic_loss_coeff]
            policy = [(i, g) for i in members if (g := refinements[i].generation) and self.config.policy_loss_coeff]
            for item, answer in critic:
                t = sample.transitions[item]
                prompt = self.stages.prompts_for(t.env).predict_messages(t.state, t.action)
                weight = float(sample.weights[item]) / len(critic)
                ids = self.chat.prompt_ids(prompt)
                sequences.append(TrainingSequence(ids, answer.token_ids, CRITIC, item, minibatch, weight))
            for item, answer in policy:
                # The prompt is the one that the engine saw when it sampled the stored action.
                ids = sample.transitions[item].generation.prompt_ids
                weight = float(sample.weights[item]) / len(policy)
                sequences.append(TrainingSequence(ids, answer.token_ids, POLICY, item, minibatch, weight))
        return sequences

    def _sync_weights(self) -> None:
        self.weight_version += 1
        log_sync(self.metrics, push_weights(self.learner_group, self.engine, self.weight_version))

    def _env_steps_sampled(self) -> int:
        return int(self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0))

    def _beta(self) -> float:
        """β rises linearly from its first value to 1."""
        settings = self.config.replay_settings
        share = min(self._env_steps_sampled() / max(settings["beta_final_timesteps"], 1), 1.0)
        return settings["beta"] + (1.0 - settings["beta"]) * share

    @staticmethod
    def _take_losses(results: list[dict[str, Any]], count: int) -> dict[int, np.ndarray]:
        """Takes the per-sequence losses out of the learners' results; NaN where an item had no such sequence."""
        losses = {CRITIC: np.full(count, np.nan), POLICY: np.full(count, np.nan)}
        for result in results:
            for table in result[DEFAULT_MODULE_ID].pop(SEQUENCE_LOSSES).peek():
                for item, role, loss in np.asarray(table):
                    if item >= 0:
                        losses[int(role)][int(item)] = loss
        return losses

    @override(Algorithm)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state and ours: the buffer with its priorities, the stages' random state, the version of the weights."""
        state = super().get_state(*args, **kwargs)
        state[STATE] = {
            "weight_version": self.weight_version,
            "stages_rng": self.stages.rng.bit_generator.state,
            "replay_buffer": self.local_replay_buffer.get_state() if self.config.store_buffer_in_checkpoints else None,
        }
        return state

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if STATE in state:
            own = state[STATE]
            self.weight_version = own["weight_version"]
            self.stages.rng.bit_generator.state = own["stages_rng"]
            if own["replay_buffer"] is not None:
                self.local_replay_buffer.set_state(own["replay_buffer"])

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().restore_from_path(path, *args, **kwargs)
        # The engines still serve the weights that they were started with.
        self.weight_version -= 1
        self._sync_weights()

    @classmethod
    @override(Algorithm)
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """RLlib's request and a bundle for each engine actor."""
        request = super().default_resource_request(config)
        resolved = cls.get_default_config().update_from_dict(config)
        engines = [{"CPU": 1, "GPU": resolved.num_gpus_per_engine}] * resolved.num_engines
        return PlacementGroupFactory([*request.bundles, *engines], strategy=request.strategy)

    @override(Algorithm)
    def cleanup(self) -> None:
        if getattr(self, "engine", None) is not None:
            self.engine.stop()
        if getattr(self, "writer", None) is not None:
            self.writer.close()
        super().cleanup()
