"""``NLACConfig``: every knob of NLAC on top of RLlib's ``AlgorithmConfig``, checked before anything is started."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.sampling.chat import Chat, check_model_path
from rllib_nlac.sampling.vllm_engine import VLLMSettings
from rllib_nlac.types import Weights

TINY_MODEL = "tiny"


class NLACConfig(AlgorithmConfig):
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

    def __init__(self, algo_class: type | None = None) -> None:
        from rllib_nlac.nlac import NLAC
        from rllib_nlac.sampling.env_runner import TextEnvRunner

        super().__init__(algo_class=algo_class or NLAC)
        # What RLlib defines and NLAC needs otherwise.
        self.env_runner_cls = TextEnvRunner
        self.num_envs_per_env_runner = 64
        self.batch_mode = "complete_episodes"
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.train_batch_size_per_learner = 512
        self.minibatch_size = 64
        self.num_epochs = 1
        # language(...)
        self.language_model = TINY_MODEL
        self.max_context: int | None = None
        self.prompts: str | dict[str, Any] = "default"
        self.action_format = "plain"
        self.max_action_tokens = 128
        self.max_future_tokens = 192
        self.max_critique_tokens = 192
        self.action_temperature = 1.0
        self.action_top_p = 1.0
        self.future_temperature = 1.0
        self.backup_temperature = 0.0
        self.critique_temperature = 0.0
        self.refine_temperature = 0.0
        # training(...)
        self.episodes_per_iteration = 64
        self.num_futures = 1
        self.num_refinements = 1
        self.judge_weights = "target"
        self.critic_input = "predicted"
        self.train_on_yes = "success"
        self.critic_loss_coeff = 1.0
        self.policy_loss_coeff = 1.0
        self.tau = 0.01
        self.weight_decay = 0.0
        self.replay_buffer_config: dict[str, Any] = {}
        self.store_buffer_in_checkpoints = True
        self.num_steps_sampled_before_learning_starts = 0
        # deepspeed(...)
        self.learner_dtype = "float32"
        self.attn_implementation: str | None = None
        self.gradient_checkpointing = False
        self.max_tokens_per_micro_batch = 8192
        self.zero_stage = 0
        self.deepspeed_config: dict[str, Any] = {}
        # engines(...)
        self.num_engines = 0
        self.num_gpus_per_engine: float = 0
        self.engine_config: dict[str, Any] = {}
        self.engine_timeout_s = 600.0

    def language(
        self,
        *,
        language_model: str | None = NotProvided,
        max_context: int | None = NotProvided,
        prompts: str | dict[str, Any] | None = NotProvided,
        action_format: str | None = NotProvided,
        max_action_tokens: int | None = NotProvided,
        max_future_tokens: int | None = NotProvided,
        max_critique_tokens: int | None = NotProvided,
        action_temperature: float | None = NotProvided,
        action_top_p: float | None = NotProvided,
        future_temperature: float | None = NotProvided,
        backup_temperature: float | None = NotProvided,
        critique_temperature: float | None = NotProvided,
        refine_temperature: float | None = NotProvided,
    ) -> NLACConfig:
        """Sets the model, its prompts and how each role samples.

        Args:
            language_model: A Hugging Face folder or name, or "tiny" for the model shipped with this package.
            max_context: The most tokens of a prompt and its answer; None takes the model's own limit.
            prompts: A shipped prompt set ("default", "compact"), a YAML file, or a mapping.
            action_format: "plain", the whole turn goes to the environment, or "react", only what follows ``Action:``.
            max_action_tokens: The most tokens of a turn, thought included.
            max_future_tokens: The most tokens of a future and of a Bellman target.
            max_critique_tokens: The most tokens of a critique.
            action_temperature: Temperature of the policy, in collection and in the backup's a'.
            action_top_p: Nucleus mass of the policy.
            future_temperature: Temperature of the successor model. Below 1 it forgets the rarer futures.
            backup_temperature: Temperature of the backup; 0 is greedy.
            critique_temperature: Temperature of the evaluator.
            refine_temperature: Temperature of the refinement.

        Returns:
            This updated config.
        """
        return self._set(locals())

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        episodes_per_iteration: int | None = NotProvided,
        num_futures: int | None = NotProvided,
        num_refinements: int | None = NotProvided,
        judge_weights: str | None = NotProvided,
        critic_input: str | None = NotProvided,
        train_on_yes: str | None = NotProvided,
        critic_loss_coeff: float | None = NotProvided,
        policy_loss_coeff: float | None = NotProvided,
        tau: float | None = NotProvided,
        weight_decay: float | None = NotProvided,
        replay_buffer_config: dict[str, Any] | None = NotProvided,
        store_buffer_in_checkpoints: bool | None = NotProvided,
        num_steps_sampled_before_learning_starts: int | None = NotProvided,
        **kwargs: Any,
    ) -> NLACConfig:
        """Sets the algorithm's own hyper-parameters; RLlib's own (``lr``, ``grad_clip``, ...) are taken too.

        ``train_batch_size_per_learner`` counts the transitions sampled per iteration, ``minibatch_size`` those of one
        gradient step.

        Args:
            episodes_per_iteration: Episodes collected before each round of updates.
            num_futures: k, futures that the evaluator sees for each action.
            num_refinements: m, rounds of critique and refinement.
            judge_weights: Which weights criticise and refine: "target" or "policy".
            critic_input: "predicted" futures; "permuted" or "constant" ones are ablations.
            train_on_yes: When an action of verdict yes is trained on: "success", "always" or "never".
            critic_loss_coeff: Weight of L1; 0 freezes the critic's training.
            policy_loss_coeff: Weight of L2.
            tau: Step of the target weights towards the policy's after each gradient step; 0 freezes, 1 copies.
            weight_decay: AdamW's.
            replay_buffer_config: ``capacity`` (transitions), ``max_bytes``, ``alpha``, ``beta`` at the start and
                ``beta_final_timesteps``, the environment steps over which β rises to 1.
            store_buffer_in_checkpoints: Whether checkpoints hold the replay buffer, with its priorities.
            num_steps_sampled_before_learning_starts: Environment steps before the first update.

        Returns:
            This updated config.
        """
        arguments = locals()
        arguments.pop("kwargs")
        arguments.pop("__class__", None)
        super().training(**kwargs)
        return self._set(arguments)

    def deepspeed(
        self,
        *,
        learner_dtype: str | None = NotProvided,
        attn_implementation: str | None = NotProvided,
        gradient_checkpointing: bool | None = NotProvided,
        max_tokens_per_micro_batch: int | None = NotProvided,
        zero_stage: int | None = NotProvided,
        deepspeed_config: dict[str, Any] | None = NotProvided,
    ) -> NLACConfig:
        """Sets how the learner trains.

        Args:
            learner_dtype: "float32" or "bfloat16"; with the latter DeepSpeed keeps float32 master weights.
            attn_implementation: As in Transformers: "sdpa", "flash_attention_2", ...
            gradient_checkpointing: Trades compute for memory.
            max_tokens_per_micro_batch: Padded tokens that go through the model at once.
            zero_stage: DeepSpeed's ZeRO stage, 0 to 3.
            deepspeed_config: DeepSpeed's own keys, merged over ours: offload, scheduler, ...

        Returns:
            This updated config.
        """
        return self._set(locals())

    def engines(
        self,
        *,
        num_engines: int | None = NotProvided,
        num_gpus_per_engine: float | None = NotProvided,
        engine_config: dict[str, Any] | None = NotProvided,
        engine_timeout_s: float | None = NotProvided,
    ) -> NLACConfig:
        """Sets the vLLM engines.

        Args:
            num_engines: 0 runs one engine inside the algorithm's own process; otherwise so many Ray actors.
            num_gpus_per_engine: GPUs of each engine actor.
            engine_config: The fields of ``VLLMSettings``.
            engine_timeout_s: After so long without an answer an engine counts as stalled.

        Returns:
            This updated config.
        """
        return self._set(locals())

    def _set(self, arguments: dict[str, Any]) -> NLACConfig:
        for name, value in arguments.items():
            if name != "self" and value is not NotProvided:
                setattr(self, name, value)
        return self

    @property
    def model_path(self) -> str:
        """Where the language model is: the shipped one's folder for "tiny"."""
        if self.language_model == TINY_MODEL:
            return str(Path(__file__).parent / "tiny" / "model")
        return self.language_model

    @property
    def stage_settings(self) -> StageSettings:
        """What the language stages need to know."""
        return StageSettings(
            action=Sampling(self.max_action_tokens, self.action_temperature, self.action_top_p),
            future=Sampling(self.max_future_tokens, self.future_temperature),
            backup=Sampling(self.max_future_tokens, self.backup_temperature),
            critique=Sampling(self.max_critique_tokens, self.critique_temperature),
            refine=Sampling(self.max_action_tokens, self.refine_temperature),
            num_futures=self.num_futures,
            num_refinements=self.num_refinements,
            action_format=self.action_format,
            judge=Weights(self.judge_weights),
            critic_input=self.critic_input,
            train_on_yes=self.train_on_yes,
        )

    @property
    def vllm_settings(self) -> VLLMSettings:
        """How vLLM is started."""
        return VLLMSettings(**self.engine_config)

    @property
    def replay_settings(self) -> dict[str, Any]:
        """The replay buffer's settings with their defaults."""
        return REPLAY_DEFAULTS | self.replay_buffer_config

    @property
    def deepspeed_settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration: what RLlib's keys say, with ``deepspeed_config`` merged over it."""
        settings: dict[str, Any] = {
            "zero_optimization": {"stage": self.zero_stage},
            "bf16": {"enabled": self.learner_dtype == "bfloat16"},
            "gradient_clipping": self.grad_clip or 0.0,
        }
        return _merge(settings, self.deepspeed_config)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        from rllib_nlac.learner.learner import NLACLearner

        return NLACLearner

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        from rllib_nlac.learner.rl_module import CausalLMModule

        return RLModuleSpec(
            module_class=CausalLMModule,
            model_config={
                "model": self.model_path,
                "dtype": self.learner_dtype,
                "attn_implementation": self.attn_implementation,
                "gradient_checkpointing": self.gradient_checkpointing,
            },
        )

    @property
    @override(AlgorithmConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {}

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        positive = (
            "num_futures", "num_refinements", "episodes_per_iteration", "minibatch_size", "max_action_tokens",
            "max_future_tokens", "max_critique_tokens", "max_tokens_per_micro_batch", "train_batch_size_per_learner",
        )  # fmt: skip
        for key in positive:
            self._check(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("action", "future", "backup", "critique", "refine"):
            self._check(getattr(self, f"{key}_temperature") >= 0, f"{key}_temperature", "must not be negative")
        self._check(0 <= self.tau <= 1, "tau", "must lie between 0 (frozen target) and 1 (no target network)")
        self._check(0 <= self.zero_stage <= 3, "zero_stage", "must be 0, 1, 2 or 3")
        self._check(self.minibatch_size <= self.train_batch_size_per_learner, "minibatch_size",
                    f"must not exceed train_batch_size_per_learner, {self.train_batch_size_per_learner}")  # fmt: skip
        choices = {
            "action_format": ("plain", "react"), "judge_weights": ("target", "policy"),
            "critic_input": ("predicted", "permuted", "constant"), "train_on_yes": ("success", "always", "never"),
            "learner_dtype": ("float32", "bfloat16"),
        }  # fmt: skip
        for key, known in choices.items():
            self._check(getattr(self, key) in known, key, f"must be one of {', '.join(known)}")
        self._check_keys("engine_config", {field.name for field in fields(VLLMSettings)})
        self._check_keys("replay_buffer_config", set(REPLAY_DEFAULTS))
        self._check(self.num_env_runners == 0 or self.num_engines > 0, "num_engines",
                    "must be at least 1 with remote EnvRunners (num_env_runners > 0): they cannot reach an engine inside "
                    "another process")  # fmt: skip
        load_prompts(self.prompts, self.env if isinstance(self.env, str) else None)
        check_model_path(self.model_path)
        if Path(self.model_path).is_dir():  # a hub's name is left to the hub
            Chat.from_pretrained(self.model_path, self.max_context)

    def _check(self, condition: bool, key: str, complaint: str) -> None:
        if not condition:
            raise ValueError(f"config.{key} is {getattr(self, key)!r} and {complaint}")

    def _check_keys(self, key: str, known: set[str]) -> None:
        from rllib_nlac.names import unknown_key

        for name in getattr(self, key):
            if name not in known:
                raise ValueError(f"config.{key}: {unknown_key(name, known)}")


REPLAY_DEFAULTS: dict[str, Any] = {
    "capacity": 50_000,
    "max_bytes": 4 << 30,
    "alpha": 0.6,
    "beta": 0.4,
    "beta_final_timesteps": 100_000,
}


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged
