"""Natural Language Actor-Critic: ``NLACConfig`` says what to do, and ``NLAC.training_step`` does it, one call a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.metrics import TransitionWriter, log_replay, log_stages, stage
from rllib_nlac.algorithm.replay import ReplayAlgorithm, ReplayConfig
from rllib_nlac.algorithm.roles import RolesConfig
from rllib_nlac.language.settings import StageSettings
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence
from rllib_nlac.learner.losses import priorities
from rllib_nlac.replay.buffer import ReplaySample
from rllib_nlac.types import BellmanTarget, Refinement


class NLACConfig(ReplayConfig, RolesConfig):
    """Configures Natural Language Actor-Critic.

    .. testcode::

        from rllib_nlac import NLACConfig

        config = (
            NLACConfig()
            .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
            .language(language_model="tiny", prompts="compact", max_action_tokens=12)
            .training(lr=1e-3, episodes_per_iteration=64)
        )
        algorithm = config.build_algo()
        print(algorithm.train()["env_runners"]["success_rate"])
    """

    RANGES = {
        "num_futures": ranges.COUNT,
        "num_next_actions": ranges.COUNT,
        "num_refinements": ranges.WHOLE_NOT_NEGATIVE,
        "fresh_actions": ranges.FLAG,
        "verify_refinements": ranges.FLAG,
        "rejected_weight": ranges.SHARE,
        "judged_fraction": ranges.Range(0, 1, above=True),
        "num_policy_epochs": ranges.Range(0, whole=True, optional=True),
        "self_imitation": ranges.FLAG,
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or NLAC)
        self.num_futures = 1
        self.num_next_actions = 1
        self.num_refinements = 1
        self.critic_input = "predicted"
        self.fresh_actions = False
        self.verify_refinements = False
        self.rejected_weight = 0.0
        self.judged_fraction = 1.0
        self.num_policy_epochs: int | None = None
        self.self_imitation = False

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        num_futures: int | None = NotProvided,
        num_next_actions: int | None = NotProvided,
        num_refinements: int | None = NotProvided,
        critic_input: str | None = NotProvided,
        fresh_actions: bool | None = NotProvided,
        verify_refinements: bool | None = NotProvided,
        rejected_weight: float | None = NotProvided,
        judged_fraction: float | None = NotProvided,
        num_policy_epochs: int | None = NotProvided,
        self_imitation: bool | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets NLAC's own hyper-parameters.

        ``train_batch_size_per_learner`` counts the transitions sampled per iteration, ``minibatch_size`` those of one
        gradient step, and ``num_epochs`` how often each target and refinement is trained on: gradient steps cost little beside
        the generation of what they learn from.

        Args:
            num_futures: k, futures that the evaluator sees for each action.
            num_next_actions: So many actions a' of the policy's are considered in s', and the backup follows the first whose
                predicted future the evaluator approves of: with 1 the target describes the policy as it is, with more the one
                that it is about to become. Costs so many futures and critiques for each target.
            num_refinements: m, rounds of critique and refinement; with 0 the policy imitates what the critic accepts.
            critic_input: What the evaluator reads. "predicted" futures, as in the paper; "backed_up": of the stored action its
                Bellman target, which knows what really came, and of a refined one what is predicted, so that what an episode
                has shown is imitated before the critic has learned it. "permuted" or "constant" futures are ablations.
            fresh_actions: Whether the current policy's own action in s is judged and refined, instead of the stored one. Costs
                one more wave of generation.
            verify_refinements: Whether a refined action is judged, too, and learned only with verdict yes. For models whose
                advice is weak.
            rejected_weight: With ``verify_refinements``, how much an action that was rejected counts in the policy's loss,
                beside the others of its minibatch; where all are rejected they count in full. 0 leaves the policy as it is
                where the critic knows nothing good, 1 is not to verify at all; a little of it keeps the policy trying the
                advice there.
            judged_fraction: Share of the sampled transitions whose actions are judged and refined; the others teach the critic
                alone, which costs a third of the generation or less. Below 1 the replay priorities are those of the critic.
            num_policy_epochs: In so many of the ``num_epochs`` passes, the last ones, the policy is trained, too; None is all.
                A critic has facts to learn, which takes more passes than to imitate an action.
            self_imitation: Whether the action of an episode that ended in success is imitated, whatever its critique says,
                where the evaluator's futures predict failure: self-imitation learning (arXiv 1806.05635), which imitates what
                returned more than its value. For a critic that foresees the next steps better than the outcome.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @property
    def stage_settings(self) -> StageSettings:
        return replace(
            super().stage_settings, num_futures=self.num_futures, num_next_actions=self.num_next_actions,
            num_refinements=self.num_refinements,
            critic_input=self.critic_input, fresh_actions=self.fresh_actions, verify_refinements=self.verify_refinements,
            rejected_weight=self.rejected_weight, judged_fraction=self.judged_fraction, self_imitation=self.self_imitation,
        )  # fmt: skip

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check(
            self.num_policy_epochs is None or 0 <= self.num_policy_epochs <= self.num_epochs,
            "num_policy_epochs", f"must be between 0 and num_epochs, which is {self.num_epochs}",
        )  # fmt: skip
        self._check_choice("critic_input", "predicted", "backed_up", "permuted", "constant")
        self._check(
            self.critic_input != "backed_up" or not self.fresh_actions,
            "critic_input", "needs the stored actions, of which the targets speak: set fresh_actions to false",
        )  # fmt: skip
        self._check(
            not self.self_imitation or not self.fresh_actions,
            "self_imitation", "imitates stored actions: set fresh_actions to false",
        )  # fmt: skip


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
        with stage(self.metrics, "waves", "asking the critic"):
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
        with stage(self.metrics, "replay", "keeping the priorities"):
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
