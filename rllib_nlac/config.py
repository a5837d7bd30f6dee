"""``NLACConfig``: NLAC's own knobs on top of those that all algorithms on text share, checked before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac import ranges
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.language_config import LanguageAlgorithmConfig
from rllib_nlac.offline.dialogues import DialogueData, input_files
from rllib_nlac.types import Weights

LOGGED = "LoggedDialogues"  # the environment of a run that has none
REPLAY_DEFAULTS: dict[str, Any] = {
    "capacity": 50_000,
    "max_bytes": 4 << 30,
    "alpha": 0.6,
    "beta": 0.4,
    "beta_final_timesteps": 100_000,
}


class RolesConfig(LanguageAlgorithmConfig):
    """How the model's critic roles sample and what the policy learns from them; shared by all that criticise in words."""

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


class ReplayConfig(LanguageAlgorithmConfig):
    """Off-policy learning from prioritised replay. A mixin, like ``LanguageConfig``."""

    RANGES = {
        "store_buffer_in_checkpoints": ranges.FLAG,
        "num_steps_sampled_before_learning_starts": ranges.WHOLE_NOT_NEGATIVE,
        "n_step": ranges.COUNT,
        "offline_iterations": ranges.Range(0, whole=True, optional=True),
    }
    NESTED_RANGES = {
        "replay_buffer_config": {
            "capacity": ranges.COUNT,
            "max_bytes": ranges.POSITIVE,
            "alpha": ranges.NOT_NEGATIVE,
            "beta": ranges.SHARE,
            "beta_final_timesteps": ranges.NOT_NEGATIVE,
        }
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.replay_buffer_config: dict[str, Any] = {}
        self.store_buffer_in_checkpoints = True
        self.num_steps_sampled_before_learning_starts = 0
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
            offline_iterations: So many iterations learn from them alone before any episode is collected; None is 0 with an
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
        store_buffer_in_checkpoints: bool | None = NotProvided,
        num_steps_sampled_before_learning_starts: int | None = NotProvided,
        n_step: int | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets replay. ``train_batch_size_per_learner`` counts the transitions sampled per iteration.

        Args:
            replay_buffer_config: ``capacity`` (transitions), ``max_bytes``, ``alpha``, ``beta`` at the start and
                ``beta_final_timesteps``, the environment steps over which β rises to 1 (learning from logs alone makes none).
                ``alpha: 0`` is uniform replay.
            store_buffer_in_checkpoints: Whether checkpoints hold the replay buffer, with its priorities.
            num_steps_sampled_before_learning_starts: Environment steps before the first update.
            n_step: Stored steps that a target rests on before it bootstraps; as many as an episode can have is Monte
                Carlo. The stored actions within them are not corrected for.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @property
    def replay_settings(self) -> dict[str, Any]:
        """The replay buffer's settings with their defaults."""
        return REPLAY_DEFAULTS | self.replay_buffer_config

    @override(AlgorithmConfig)
    def validate(self) -> None:
        if self.env is None and self.is_offline:
            self.env = LOGGED
        super().validate()
        if self.is_offline:
            input_files(self.input_)
        self._check(self.offline_iterations is None or self.is_offline, "offline_iterations", "needs input_, the dialogues")
        self._check_keys("replay_buffer_config", set(REPLAY_DEFAULTS))


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
        from rllib_nlac.nlac import NLAC

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
            num_next_actions: Number of next actions a' sampled in s'. The backup uses the first one the evaluator approves
                (1: the current policy, as in the paper). Each one costs a future and a critique for every target.
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
            num_policy_epochs: Number of the ``num_epochs`` passes, the last ones, in which the policy is trained, too; None is
                all of them.
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
