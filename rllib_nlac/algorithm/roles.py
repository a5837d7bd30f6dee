"""How the model's critic roles sample and what the policy learns from their words."""

from __future__ import annotations

from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.types import Weights


class RolesConfig(LanguageAlgorithmConfig):
    """How the model's critic roles sample and what the policy learns from them; shared by all that criticise in words."""

    criticises_in_words = True
    RANGES = {
        **{f"max_{key}_tokens": ranges.COUNT for key in ("future", "critique", "reasoning")},
        **{f"{key}_temperature": ranges.NOT_NEGATIVE for key in ("future", "backup", "critique", "refine")},
        "correct_reasoning": ranges.FLAG,
        "tau": ranges.Range(0, 1, why="the backup is made under the target weights, 0 freezes and 1 copies them"),
        "critic_loss_coeff": ranges.NOT_NEGATIVE,
        "policy_loss_coeff": ranges.NOT_NEGATIVE,
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        # roles(...)
        self.max_future_tokens = 192
        self.max_critique_tokens = 192
        self.future_temperature = 1.0
        self.backup_temperature = 0.0
        self.critique_temperature = 0.0
        self.refine_temperature = 0.0
        self.correct_reasoning = True
        self.max_reasoning_tokens = 1024
        # training(...)
        self.tau = 0.01
        self.judge_weights = "target"
        self.backup_weights = "target"
        self.future_weights = "policy"
        self.train_on_yes = "success"
        self.critic_loss_coeff = 1.0
        self.policy_loss_coeff = 1.0

    def roles(
        self,
        *,
        max_future_tokens: int | None = NotProvided,
        max_critique_tokens: int | None = NotProvided,
        future_temperature: float | None = NotProvided,
        backup_temperature: float | None = NotProvided,
        critique_temperature: float | None = NotProvided,
        refine_temperature: float | None = NotProvided,
        correct_reasoning: bool | None = NotProvided,
        max_reasoning_tokens: int | None = NotProvided,
    ) -> Self:
        """Sets how each role beside the policy samples.

        Args:
            max_future_tokens: The most tokens of a future and of a Bellman target.
            max_critique_tokens: The most tokens of a critique.
            future_temperature: Temperature of the successor model. Below 1 it forgets the rarer futures.
            backup_temperature: Temperature of the backup; 0 is greedy.
            critique_temperature: Temperature of the evaluator.
            refine_temperature: Temperature of the refinement.
            correct_reasoning: Rewrites the reasoning of a thinking model's targets so that it claims nothing that it could
                not know (arXiv 2512.04601, App. B.2). Models that do not think are not concerned.
            max_reasoning_tokens: The most tokens of such a rewritten reasoning.

        Returns:
            This updated config.
        """
        return self._set(locals())

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        judge_weights: str | None = NotProvided,
        backup_weights: str | None = NotProvided,
        future_weights: str | None = NotProvided,
        train_on_yes: str | None = NotProvided,
        critic_loss_coeff: float | None = NotProvided,
        policy_loss_coeff: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets what is learned from the critic's words.

        Args:
            judge_weights: Which weights criticise and refine: "target", "policy", or "initial", those of ``language_model`` as
                it was before training. Neither role is trained, and under moving weights both forget; the initial ones cost
                an engine a third set in its host's memory.
            backup_weights: Which weights write the Bellman target from reply, reward and d': "target", as in the paper, or
                "initial".
            future_weights: Which weights predict: "policy" (with d' from the target's, as in the paper), or "initial", which
                with ``critic_loss_coeff: 0`` is a critic that stays what it was.
            train_on_yes: When an action of verdict yes is trained on: "success", "always" or "never".
            critic_loss_coeff: Weight of L1; at 0 the critic is not trained, though the policy's loss still moves the weights
                that they share.
            policy_loss_coeff: Weight of L2.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @property
    def stage_settings(self) -> StageSettings:
        """What the language stages need to know."""
        return StageSettings(
            action=self.action_sampling,
            future=Sampling(self.max_future_tokens, self.future_temperature),
            backup=Sampling(self.max_future_tokens, self.backup_temperature),
            critique=Sampling(self.max_critique_tokens, self.critique_temperature),
            refine=Sampling(self.max_action_tokens, self.refine_temperature),
            reasoning=Sampling(self.max_reasoning_tokens, 0.0) if self.correct_reasoning else None,
            action_format=self.action_format,
            judge=Weights(self.judge_weights),
            backup_weights=Weights(self.backup_weights),
            future_weights=Weights(self.future_weights),
            train_on_yes=self.train_on_yes,
        )

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check_choice("backup_weights", "target", "initial")
        self._check_choice("future_weights", "policy", "initial")
        self._check_choice("judge_weights", "target", "policy", "initial")
        self._check_choice("train_on_yes", "success", "always", "never")
