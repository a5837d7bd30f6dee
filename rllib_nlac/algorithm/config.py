"""What our own algorithms configure beside the model and the engines: collection by episodes, and DeepSpeed's gradient step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.make import ENGINES, EngineSpec
from rllib_nlac.engine.weight_transfer import Way, way_of
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.learner.rl_module import CausalLMModule
from rllib_nlac.types import Weights

# Keys of DeepSpeed's that would change what a gradient step is, or be ignored, and ours that do what they say.
DEEPSPEED_KEYS_OF_OURS = {
    "train_batch_size": "minibatch_size",
    "train_micro_batch_size_per_gpu": "max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "max_tokens_per_micro_batch",
    "managed_gradient_accumulation": "max_tokens_per_micro_batch",
    "optimizer": "lr and optimizer",
    "gradient_clipping": "grad_clip",
    "fp16": "learner_model: {dtype: bfloat16}",  # its scaling of losses skips steps, which would count as stopped
}


class LanguageAlgorithmConfig(LanguageConfig):
    """What NLAC and the baselines of this package share: collection by episodes, and DeepSpeed's gradient step."""

    has_master_weights = True
    serves_target = True  # whether an engine ever answers with the target weights, where there are any
    discounts = False  # whether ``gamma`` is read
    RANGES = {
        "minibatch_size": ranges.COUNT,
        "max_staleness": ranges.WHOLE_NOT_NEGATIVE,
        "sample_timeout_s": ranges.POSITIVE,
        "learner_timeout_s": ranges.POSITIVE,
        "learner_snapshot_interval": ranges.WHOLE_NOT_NEGATIVE,
        "tau": ranges.Range(0, 1, optional=True),
        "kl_to_base_coeff": ranges.Range(0, optional=True),
    }
    NESTED_RANGES = {
        "optimizer": {
            "weight_decay": ranges.NOT_NEGATIVE,
            "eps": ranges.Range(0, above=True, why="at 0 a weight without a gradient becomes 0 / 0"),
        },
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.train_batch_size_per_learner = 512
        self.minibatch_size = 64
        self.num_epochs = 1
        self.episodes_per_iteration = 64
        self.max_staleness = 0
        self.sample_timeout_s = 1800.0
        self.learner_snapshot_interval = 1
        self.learner_timeout_s = 1800.0
        self.env_runner_restore_timeout_s = 60.0  # ours are restored by a few counters, and RLlib waits for half an hour
        self.tau: float | None = None
        self.kl_to_base_coeff: float | None = None
        self.optimizer: dict[str, float] = {}
        # deepspeed(...)
        self.deepspeed_config: dict[str, Any] = {}

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        episodes_per_iteration: int | None = NotProvided,
        tau: float | None = NotProvided,
        kl_to_base_coeff: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets hyper-parameters of training; also accepts RLlib's own (``lr``, ``grad_clip``, ...).

        ``optimizer`` may hold AdamW's ``weight_decay`` (0) and ``eps`` (1e-8, below which a gradient counts for less).

        Args:
            episodes_per_iteration: Episodes collected before each round of updates.
            tau: Step of the target weights towards the policy's after each gradient step. 0 freezes them, 1 copies. None: the
                algorithm has no target weights.
            kl_to_base_coeff: Weight of KL(π_θ || π_base) in the policy's loss; π_base is the model as it was loaded. 0 only
                measures it, as the metric ``kl_to_base``. With ``lora`` it is always measured; without, any value but None
                costs a copy of the weights.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def env_runners(self, *, max_staleness: int | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets collection; also accepts ``LanguageConfig``'s and RLlib's own keys.

        Args:
            max_staleness: Rounds of episodes that remote EnvRunners play ahead while the learner trains. An episode's
                weights are then at most this many syncs old when it is used; ``collection/staleness_max`` reports it. In the
                text house it cost most of the success.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().env_runners(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def fault_tolerance(  # type: ignore[override]
        self,
        *,
        learner_snapshot_interval: int | None = NotProvided,
        learner_timeout_s: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets what happens when processes are lost; also accepts RLlib's own keys.

        Args:
            learner_snapshot_interval: Number of updates between two copies of the remote learners' state in Ray's object store.
                A lost learner is restored from the last copy; updates since then are repeated or lost. 0: no copies, for
                models whose optimizer is too large. Then a lost learner ends the trial, and Tune's ``max_failures`` restarts
                it from its last checkpoint.
            learner_timeout_s: Seconds that one call of a remote learner, such as a whole update, may take. After that the
                learner counts as lost, and all of them restart as above.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().fault_tolerance(**kwargs)
        return self._set(arguments)

    def deepspeed(self, *, deepspeed_config: dict[str, Any] | None = NotProvided) -> Self:
        """Sets how DeepSpeed trains.

        Args:
            deepspeed_config: DeepSpeed's own keys, merged over ours: ``zero_optimization: {stage: 2}`` (0 to 3), offload, a
                scheduler, ...

        Returns:
            This updated config.
        """
        return self._set(locals())

    @property
    def learned_sets(self) -> tuple[Weights, ...]:
        """The sets of weights that every engine is given after each update."""
        return (Weights.POLICY, Weights.TARGET) if self.tau is not None and self.serves_target else (Weights.POLICY,)

    @property
    def deepspeed_settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration: what RLlib's keys say, with ``deepspeed_config`` merged over it."""
        settings: dict[str, Any] = {
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": self.held_model.dtype == "bfloat16"},
            "gradient_clipping": self.grad_clip or 0.0,
        }
        return _merge(settings, self.deepspeed_config)

    @property
    def transfer(self) -> Way:
        """How whole weights reach the engines."""
        return way_of(self, ENGINES[self.engine_config.get("engine", "vllm")])

    @property
    @override(LanguageConfig)
    def engine_spec(self) -> EngineSpec:
        return replace(super().engine_spec, transfer=self.transfer.backend)

    @property
    def zero_stage(self) -> Any:
        """DeepSpeed's ZeRO stage."""
        return self.deepspeed_settings["zero_optimization"].get("stage", 0)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        return LanguageLearner

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=CausalLMModule, model_config=self.model_settings)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        self._check(isinstance(self.deepspeed_config, Mapping), "deepspeed_config", "must be a mapping of DeepSpeed's keys")
        for part in ("zero_optimization", "bf16"):
            good = isinstance(self.deepspeed_config.get(part, {}), Mapping)
            self._check(good, "deepspeed_config", f"must have a mapping at {part}")
        self._check(
            not self.evaluation_parallel_to_training,
            "evaluation_parallel_to_training",
            "must be False: evaluations ask engines and learner that training changes at the same time",
        )
        super().validate()
        usual = self.algo_class.get_default_config() if self.algo_class else type(self)()
        self._check(
            self.train_batch_size == usual.train_batch_size,
            "train_batch_size",
            "has no effect here: set train_batch_size_per_learner"
            if self.learns_from_logs
            else "has no effect here: an iteration learns from all that it played (episodes_per_iteration)",
        )
        self._check(
            self.tau is None or usual.tau is not None,
            "tau",
            "has no effect: this algorithm has no target weights. Leave it out",
        )
        self._check(
            self.discounts or self.gamma == usual.gamma,
            "gamma",
            "has no effect: this algorithm discounts nothing. Leave it out",
        )
        self._check(
            # An evaluation plays nothing ahead: its own EnvRunner may be in this process.
            self.max_staleness == 0 or self.num_env_runners > 0 or self.in_evaluation,
            "max_staleness",
            "needs remote EnvRunners (num_env_runners > 0): one in the learner's process cannot play meanwhile",
        )
        self._check(self.zero_stage in range(4), "deepspeed_config", "must have a zero_optimization.stage of 0, 1, 2 or 3")
        self._check(self.grad_clip_by == "global_norm", "grad_clip_by", "must be global_norm: DeepSpeed clips by nothing else")
        for key in DEEPSPEED_KEYS_OF_OURS.keys() & self.deepspeed_config.keys():
            raise ValueError(f"config.deepspeed_config has {key!r}: remove it and set {DEEPSPEED_KEYS_OF_OURS[key]} instead")
        self._check(
            "scheduler" not in self.deepspeed_config or self.lr == usual.lr,
            "lr",
            "has no effect beside deepspeed_config: {scheduler: ...}, which sets the learning rate: leave out one of them",
        )
        self._check_keys("optimizer", {"weight_decay", "eps"})
        for part, key in (("zero_optimization", "compute_grad_norm"), ("bf16", "check_grad_overflow")):
            off = self.deepspeed_settings.get(part, {}).get(key) is False
            self._check(not off, "deepspeed_config", f"lets gradients pass that are not finite: leave out {part}.{key}")
        self._check(
            self.num_env_runners == 0 or self.num_engines > 0,
            "num_engines",
            "must be at least 1 with remote EnvRunners (num_env_runners > 0): they cannot reach an engine inside "
            "another process",
        )
        self._check(
            self.evaluation_num_env_runners == 0 or self.num_engines > 0,
            "evaluation_num_env_runners",
            "must be 0 where num_engines is 0: remote EnvRunners cannot reach an engine inside another process",
        )
        self._check_gpus()

    def _check_gpus(self) -> None:
        """Who runs on a GPU must have been given one, and work on the host some cores."""
        apart = self.num_learners > 0 and self.num_gpus_per_learner > 0
        self._check(
            self.num_engines > 0 or not apart or bool(self.engine_spec.endpoint),
            "num_engines",
            "must be at least 1, with num_gpus_per_engine, where learners with GPUs are apart (num_learners > 0): an engine in "
            "the trial's own process would have no GPU",
        )
        parts = self.engine_config.get("tensor_parallel_size", 1)
        self._check(
            self.num_engines > 0 or not self.num_gpus_per_learner or parts <= max(self.num_gpus_per_learner, 1),
            "engine_config",
            f"has a tensor_parallel_size of {parts}, and the engine has the {self.num_gpus_per_learner:g} GPU of its process "
            "(num_gpus_per_learner): set num_engines to 1 and num_gpus_per_engine to as many",
        )
        zero = self.deepspeed_settings.get("zero_optimization", {})
        offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        self._check(
            not (offloads and apart and self.num_cpus_per_learner == "auto"),
            "num_cpus_per_learner",
            "gives a learner with a GPU one thread, and DeepSpeed's optimizer is in the host's memory "
            "(deepspeed_config: offload_optimizer): say how many cores it may use, such as 8",
        )


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged
