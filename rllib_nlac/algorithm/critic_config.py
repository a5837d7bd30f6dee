"""How the model's critic roles sample and what the policy learns from their words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.language.settings import JudgeTemperatures, Sampling, StageSettings
from rllib_nlac.types import Weights


class CriticConfig(LanguageAlgorithmConfig):
    """How the model's critic roles sample and what the policy learns from them; shared by all that criticise in words."""

    criticises_in_words = True
    trains_by_imitation = True
    RANGES = {
        **{f"max_{key}_tokens": ranges.COUNT_OR_NONE for key in ("future", "critique")},
        "structured_answers": ranges.FLAG_OR_NONE,
        "max_reasoning_tokens": ranges.WHOLE_NOT_NEGATIVE,
        "tau": ranges.Range(0, 1, why="the backup is made under the target weights, 0 freezes and 1 copies them"),
        "policy_loss_coeff": ranges.NOT_NEGATIVE,
    }
    NESTED_RANGES = {"judge_temperatures": {"critique": ranges.NOT_NEGATIVE, "refine": ranges.NOT_NEGATIVE}}
    SETTINGS = {"judge_temperatures": JudgeTemperatures}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        # roles(...)
        self.max_future_tokens: int | None = None
        self.max_critique_tokens: int | None = None
        self.judge_temperatures: dict[str, float] = {}
        self.structured_answers: bool | None = None
        self.backup = "written"
        self.max_reasoning_tokens = 1024
        # training(...)
        self.tau = 0.01
        self.judge_weights = "target"
        self.train_on_yes = "success"
        self.policy_loss_coeff = 1.0

    def roles(
        self,
        *,
        max_future_tokens: int | None = NotProvided,
        max_critique_tokens: int | None = NotProvided,
        judge_temperatures: dict[str, float] | None = NotProvided,
        max_reasoning_tokens: int | None = NotProvided,
        structured_answers: bool | None = NotProvided,
        backup: str | None = NotProvided,
    ) -> Self:
        """Sets how each role beside the policy samples.

        Args:
            max_future_tokens: Maximum tokens of a future or a Bellman target. None: the shipped model's limit, or 192.
            max_critique_tokens: Maximum tokens of a critique. None: the shipped model's limit, or 192.
            judge_temperatures: The fields of ``JudgeTemperatures`` (critique, refine). The backup is always greedy, and the
                successor model always samples at 1: below that it forgets the rarer futures.
            max_reasoning_tokens: Token limit for rewriting the reasoning of a thinking model's targets, so that it claims
                nothing it could not know (arXiv 2512.04601, App. B.2). 0: it is trained on as it was sampled. No effect on
                models that do not think.
            structured_answers: Whether the engine enforces the form of futures, targets and critiques that the prompt set
                declares, behind the reasoning of a model that thinks. None: yes, except for the shipped small models,
                which were taught their forms.
            backup: Who writes the Bellman target: "written", the model, as in the paper; or "composed", the package, from the
                reply, the first clause of d' and its outcome. The latter costs no tokens and never forgets any of these.

        Returns:
            This updated config.
        """
        return self._set(locals())

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        judge_weights: str | None = NotProvided,
        train_on_yes: str | None = NotProvided,
        policy_loss_coeff: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets what is learned from the critic's words.

        Args:
            judge_weights: Which weights criticise and refine: "target", "policy", or "initial". The last is the model before
                training, which then writes the Bellman target, too. These roles are not trained, and weights that change
                forget them. "initial" costs a third weight set in the host memory of each engine; with ``lora`` nothing.
            train_on_yes: When the policy is trained on an action with the verdict yes: "success" (if success is predicted),
                "always" or "never", which also leaves out an action that the refinement repeats.
            policy_loss_coeff: Weight of L2, beside 1 for L1.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @property
    def stage_settings(self) -> StageSettings:
        """What the language stages need to know."""
        temperatures, limits = JudgeTemperatures(**self.judge_temperatures), self.model_defaults
        structured = limits.structured_answers
        roles = {
            "action": self.action_sampling,
            "future": Sampling(limits.max_future_tokens, structured=structured),
            "backup": Sampling(limits.max_future_tokens, 0.0, structured=structured),
            "critique": Sampling(limits.max_critique_tokens, temperatures.critique, structured=structured),
            "refine": Sampling(limits.max_action_tokens, temperatures.refine, structured=self.structured_actions),
            "reasoning": Sampling(self.max_reasoning_tokens, 0.0) if self.max_reasoning_tokens else None,
            "judge_weights": Weights(self.judge_weights),
            "backup_by": self.backup,
        }
        named = {field.name: vars(self)[field.name] for field in fields(StageSettings) if field.name in vars(self)}
        return StageSettings(**{**named, **roles})

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check_choice("judge_weights", "target", "policy", "initial")
        self._check_choice("train_on_yes", "success", "always", "never")
        self._check_choice("backup", "written", "composed")
