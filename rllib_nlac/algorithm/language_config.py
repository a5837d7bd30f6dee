"""What every algorithm on text environments configures, RLlib's own as well as ours: the model, how it speaks, the engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.evaluation import Repeats, evaluate_tasks
from rllib_nlac.algorithm.model_defaults import SHIPPED_MODELS, ModelDefaults, defaults_for
from rllib_nlac.algorithm.placement import placed_learners
from rllib_nlac.checkpoints.start import starting_point
from rllib_nlac.engine.chat import Chat, check_model_path
from rllib_nlac.engine.lora import SERVED_RANKS, LoRASettings
from rllib_nlac.engine.make import ENGINES, MERGES_LORA, EngineKeys, EngineSpec
from rllib_nlac.engine.model_folder import check_weights, suits_bfloat16
from rllib_nlac.envs import registry
from rllib_nlac.inputs.pretrained import PRETRAINED, prepare
from rllib_nlac.language.prompts import PromptSet, load_prompts
from rllib_nlac.language.settings import Sampling
from rllib_nlac.learner.adapter import check_targets
from rllib_nlac.learner.packing import WAYS as PACKING
from rllib_nlac.learner.rl_module import LearnerModel
from rllib_nlac.names import unknown_key
from rllib_nlac.sampling.env_runner import TextEnvRunner


class LanguageConfig(AlgorithmConfig):
    """The part that RLlib's own algorithms and ours share on a text environment. A mixin: put it before RLlib's class."""

    truncation_ends = False  # whether a truncated episode counts as ended, where an algorithm would bootstrap from its end
    episodes_per_task = 1  # played one after the other, as groups that a policy gradient compares
    learns_from_logs = False  # whether there is a replay buffer, which logged dialogues can fill
    criticises_in_words = False  # whether there are ``stage_settings``
    trains = True  # whether a learner holds the model
    trains_by_imitation = False  # whether turns and answers are learned as they stand
    has_master_weights = False  # whether weights in bfloat16 are trained as float32 ones
    # What numeric keys and flags may hold; a class adds its own and overrides those of its bases.
    RANGES: ranges.Ranges = {
        **ranges.RLLIB,
        "episodes_per_iteration": ranges.COUNT_OR_NONE,
        "env_threads": ranges.WHOLE_NOT_NEGATIVE,
        "env_step_timeout_s": ranges.Range(0, above=True, optional=True),
        "evaluate_before_training": ranges.FLAG,
        "max_context": ranges.COUNT_OR_NONE,
        "max_action_tokens": ranges.COUNT_OR_NONE,
        "history_turns": ranges.COUNT_OR_NONE,
        "max_response_tokens": ranges.COUNT_OR_NONE,
        "structured_actions": ranges.FLAG,
        "action_temperature": ranges.NOT_NEGATIVE,
        "action_top_p": ranges.Range(0, 1, above=True),
        "max_tokens_per_micro_batch": ranges.COUNT,
        "num_engines": ranges.WHOLE_NOT_NEGATIVE,
        "num_gpus_per_engine": ranges.NOT_NEGATIVE,
    }
    NESTED_RANGES: Mapping[str, ranges.Ranges] = {
        "learner_model": {"gradient_checkpointing": ranges.FLAG},
        "evaluation_repeats": {
            "tasks": ranges.Range(0, whole=True, optional=True),
            "attempts": ranges.Range(2, whole=True, why="pass@k of one attempt is success"),
        },
        "engine_config": {
            "timeout_s": ranges.POSITIVE,
            "max_num_seqs": ranges.COUNT,
            "tensor_parallel_size": ranges.COUNT,
            "gpu_memory_utilization": ranges.Range(0, 1, above=True),
            "cpu_kv_cache_gib": ranges.POSITIVE,
            "enforce_eager": ranges.FLAG,
            "enable_prefix_caching": ranges.FLAG,
        },
        "lora": {
            "rank": ranges.Range(1, SERVED_RANKS[-1], whole=True, why="vLLM serves adapters of no higher rank"),
            "alpha": ranges.Range(0, above=True, optional=True),
            "dropout": ranges.Range(0, 0.9),
        },
    }

    # Keys that hold a mapping, and the dataclass whose fields it may name; a class adds its own.
    SETTINGS: Mapping[str, type] = {"learner_model": LearnerModel, "evaluation_repeats": Repeats}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.env_runner_cls = TextEnvRunner
        self.num_envs_per_env_runner = 64
        self.batch_mode = "complete_episodes"
        self.episodes_per_iteration: int | None = None
        self.env_threads = 0
        self.env_step_timeout_s: float | None = None
        # evaluation(...)
        self.custom_evaluation_function = evaluate_tasks
        self.evaluate_before_training = True
        self.evaluation_repeats: dict[str, Any] = {}
        self.evaluation_sample_timeout_s = 1800.0
        # language(...)
        self.language_model = "tiny"
        self.lora: dict[str, Any] | None = None
        self.max_context: int | None = None
        self.tool_template: dict[str, Any] | None = None
        self.prompts: str | dict[str, Any] | None = None
        self.action_format = "plain"
        self.max_action_tokens: int | None = None
        self.history_turns: int | None = None
        self.max_response_tokens: int | None = None
        self.structured_actions = False
        self.action_temperature = 1.0
        self.action_top_p = 1.0
        self.learner_model: dict[str, Any] = {}
        self.max_tokens_per_micro_batch = 8192
        # engines(...)
        self.num_engines = 0
        self.num_gpus_per_engine: float = 0
        self.engine_config: dict[str, Any] = {}

    def language(
        self,
        *,
        language_model: str | None = NotProvided,
        lora: dict[str, Any] | None = NotProvided,
        max_context: int | None = NotProvided,
        tool_template: dict[str, Any] | None = NotProvided,
        prompts: str | dict[str, Any] | None = NotProvided,
        action_format: str | None = NotProvided,
        max_action_tokens: int | None = NotProvided,
        history_turns: int | None = NotProvided,
        max_response_tokens: int | None = NotProvided,
        structured_actions: bool | None = NotProvided,
        action_temperature: float | None = NotProvided,
        action_top_p: float | None = NotProvided,
        learner_model: dict[str, Any] | None = NotProvided,
        max_tokens_per_micro_batch: int | None = NotProvided,
    ) -> Self:
        """Sets the model, how the policy speaks and how the learner holds the model.

        Args:
            language_model: A Hugging Face folder or name; "smollm2", a pretrained model of 135 million parameters, which is
                fetched where it is not here yet (``rllib model smollm2``); or one of the models shipped with this package,
                "tiny" (twenty questions) and "tiny_house" (the text house). A checkpoint of another run, or that run's
                folder, stands for the policy that it holds.
            lora: The fields of ``LoRASettings`` (rank, alpha, dropout, target_modules): the model is a base that stays as it
                is, and an adapter is trained; policy, target and initial weights differ in it alone. None trains all weights.
            max_context: Maximum tokens of a prompt and its answer. None: the model's own limit.
            tool_template: How the model writes calls of tools, as transformers' ``response_template`` has it. None: the
                tokenizer's own, or ``<tool_call>`` tags and JSON objects.
            prompts: A shipped prompt set ("default", "small", "compact"), a YAML file, or a mapping. None: the shipped model's
                own, "small" for other models of less than 3 billion parameters, or "default".
            action_format: "plain", the whole turn goes to the environment, or "react", only what follows ``Action:``.
            max_action_tokens: Maximum tokens of a turn, thought included. None: the shipped model's limit, or 128.
            history_turns: Number of latest turns that all roles see after the opening. For environments whose observations
                summarise what matters. None: the whole dialogue, as in the paper.
            max_response_tokens: The most generated tokens of an episode; at more it is truncated.
            structured_actions: Whether the engine enforces what the environment offers: ``info["action_choices"]``, a list of
                actions, or ``info["action_pattern"]``, a regular expression. Not under a policy gradient, whose ratios need
                the unconstrained distribution.
            action_temperature: Temperature of the policy; a policy gradient is taken at the same one, and needs at least 0.01.
            action_top_p: Nucleus mass of the policy; 1 for a policy gradient.
            learner_model: How the learner holds the model: the fields of ``LearnerModel`` (dtype, attn_implementation,
                packing, gradient_checkpointing).
            max_tokens_per_micro_batch: Tokens in one forward pass of the learner. In a pack, shared tokens count once.
                Without packing, padding counts too.

        Returns:
            This updated config.
        """
        return self._set(locals())

    @override(AlgorithmConfig)
    def env_runners(  # type: ignore[override]
        self,
        *,
        episodes_per_iteration: int | None = NotProvided,
        env_threads: int | None = NotProvided,
        env_step_timeout_s: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets collection; also accepts RLlib's own keys.

        Args:
            episodes_per_iteration: Episodes of one round of all EnvRunners; None counts steps instead, as RLlib does:
                whole episodes until there are ``rollout_fragment_length`` steps for every environment.
            env_threads: Number of threads that step environments in parallel, for environments that wait, as for an endpoint.
                0: one after the other.
            env_step_timeout_s: Seconds that ``reset`` or ``step`` of an environment may take. After that its episode is lost,
                as after an exception, and the environment is replaced. Its thread stays behind, so the call must not need the
                main thread. None: no limit.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().env_runners(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def evaluation(  # type: ignore[override]
        self,
        *,
        evaluate_before_training: bool | None = NotProvided,
        evaluation_repeats: dict[str, Any] | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets evaluation; also accepts RLlib's own keys. ``evaluation_duration`` counts all episodes.

        Every evaluation plays the same tasks with the same seeds, however many runners it has.

        Args:
            evaluate_before_training: Whether to evaluate once before training. The result is under ``before_training`` in
                the first result.
            evaluation_repeats: The fields of ``Repeats`` (tasks, attempts): how many tasks are attempted again for pass@k,
                which stands under ``evaluation/repeated``.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().evaluation(**kwargs)
        return self._set(arguments)

    def engines(
        self,
        *,
        num_engines: int | None = NotProvided,
        num_gpus_per_engine: float | None = NotProvided,
        engine_config: dict[str, Any] | None = NotProvided,
    ) -> Self:
        """Sets the vLLM engines.

        Args:
            num_engines: Number of engine actors; 0 runs one engine inside the algorithm's own process.
            num_gpus_per_engine: GPUs of each engine actor.
            engine_config: The fields of ``VLLMSettings`` and of ``EngineKeys`` (engine, timeout_s, lora_serving).

        Returns:
            This updated config.
        """
        return self._set(locals())

    def _set(self, arguments: dict[str, Any]) -> Self:
        for name, value in arguments.items():
            if name not in ("self", "kwargs", "__class__") and value is not NotProvided:
                setattr(self, name, value)
        return self

    def share_of_episodes(self, worker_index: int) -> int:
        """A runner's part of ``episodes_per_iteration``, whole groups of a task; the parts of all runners add up to it."""
        assert self.episodes_per_iteration is not None
        if not self.num_env_runners:
            return self.episodes_per_iteration
        tasks = self.episodes_per_iteration // self.episodes_per_task
        return self.episodes_per_task * (tasks // self.num_env_runners + (worker_index <= tasks % self.num_env_runners))

    @property
    def num_repeated_tasks(self) -> int:
        """Tasks that an evaluation attempts several times beside the others, for pass@k; fewer than two say nothing."""
        if not self.action_temperature:
            return 0
        wanted = self.repeats.tasks
        count = min(16, self.evaluation_duration // 8) if wanted is None else wanted
        return count if count > 1 else 0

    @property
    def repeats(self) -> Repeats:
        """What is attempted again for pass@k."""
        return Repeats(**self.evaluation_repeats)

    @property
    def model_defaults(self) -> ModelDefaults:
        """How the model is spoken to: what is set here, and else what it brings."""
        names = [field.name for field in fields(ModelDefaults)]
        own: dict[str, Any] = {name: value for name in names if (value := vars(self).get(name)) is not None}
        if "prompts" in own:  # nothing was chosen
            own["why"] = ""
        return replace(self._brought, **own)

    @property
    def _brought(self) -> ModelDefaults:
        return SHIPPED_MODELS.get(self.language_model) or defaults_for(self.model_path)

    @property
    def model_path(self) -> str:
        """Where the language model is; one that is known by a short name is fetched where it is not here yet.

        Raises:
            ModelUnavailable: It could not be fetched.
        """
        shipped = SHIPPED_MODELS.get(self.language_model)
        if shipped is not None and (folder := shipped.folder):
            return str(Path(__file__).parents[1] / "tiny" / folder)
        if (known := PRETRAINED.get(self.language_model)) is not None:
            return str(prepare(known))
        return os.path.expanduser(self.language_model)  # a Path would drop the ./ by which a folder is told from a hub's name

    def prompts_for(self, env: str | None) -> PromptSet:
        """The prompt set of an environment, by its registered name."""
        return load_prompts(self.model_defaults.prompts, env)

    @property
    def action_sampling(self) -> Sampling:
        """How the policy samples a turn."""
        return Sampling(
            self.model_defaults.max_action_tokens, self.action_temperature, self.action_top_p, self.structured_actions
        )

    @property
    def engine_spec(self) -> EngineSpec:
        """What the engines are made from."""
        of_any = {field.name for field in fields(EngineKeys)}
        keys = EngineKeys(**{key: value for key, value in self.engine_config.items() if key in of_any})
        own = {key: value for key, value in self.engine_config.items() if key not in of_any}
        return EngineSpec(
            self.model_path,
            ENGINES[keys.engine].Settings(**own),
            keys.engine,
            self.seed or 0,
            self.num_engines,
            self.num_gpus_per_engine,
            keys.timeout_s,
            lora=self.lora_settings,
            merges_lora=MERGES_LORA[keys.lora_serving],
        )

    @property
    def lora_settings(self) -> LoRASettings | None:
        """What the adapter is; None where all weights are trained."""
        return None if self.lora is None else LoRASettings.of(self.lora)

    @property
    def held_model(self) -> LearnerModel:
        """How the learner holds the model, its precision resolved."""
        held = LearnerModel(**self.learner_model)
        if held.dtype != "auto":
            return held
        halves = (self.has_master_weights or self.lora is not None) and not self.num_gpus_per_learner
        return replace(held, dtype="bfloat16" if halves and suits_bfloat16(self.model_path) else "float32")

    @property
    def model_settings(self) -> dict[str, Any]:
        """What the RLModules around the language model need to know."""
        return {
            "model": self.model_path,
            "lora": self.lora,
            "seed": self.seed or 0,
            **asdict(self.held_model),
            "temperature": self.action_temperature,
            "max_tokens_per_micro_batch": self.max_tokens_per_micro_batch,
        }

    def make_chat(self) -> Chat:
        """The boundary between text and tokens for this model."""
        return Chat.from_pretrained(self.model_path, self.max_context, self.tool_template)

    @override(AlgorithmConfig)
    def build_learner_group(self, **arguments: Any) -> LearnerGroup:
        """RLlib's, within a trial each learner in the bundle that was reserved for it."""
        with placed_learners(self):
            return super().build_learner_group(**arguments)

    @property
    @override(AlgorithmConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {}

    @override(AlgorithmConfig)
    def validate(self) -> None:
        if (start := starting_point(self.language_model)) != self.language_model:  # a frozen configuration has it already
            self.language_model = start
        registry.is_known(self.env)  # imports and registers what "my_module:MyEnvironment" names
        self._check_ranges()
        super().validate()
        self._check(
            self.input_ == "sampler" or self.learns_from_logs, "input_", "needs an algorithm with a replay buffer, such as NLAC"
        )
        if self.episodes_per_iteration is not None:
            self._check(
                self.episodes_per_iteration % self.episodes_per_task == 0,
                "episodes_per_iteration",
                f"must be a multiple of episodes_per_task, {self.episodes_per_task}",
            )
        if self.evaluation_interval:
            self._check(
                self.evaluation_duration_unit == "episodes" and self.evaluation_duration != "auto",
                "evaluation_duration",
                "must be a number of episodes (evaluation_duration_unit: episodes)",
            )
        for key in self.evaluation_config if isinstance(self.evaluation_config, Mapping) else ():
            if key.startswith("evaluat") and key != "evaluation_repeats":
                raise ValueError(f"config.evaluation_config has {key!r}, which has no effect there: set it beside that mapping")
        self._check(
            self.explore is not False,
            "explore",
            "changes nothing here: set action_temperature to 0 to play the likeliest tokens",
        )
        rllibs = AlgorithmConfig()
        for key in ("clip_rewards", "clip_actions", "normalize_actions", "observation_filter"):
            same = getattr(self, key) == getattr(rllibs, key)
            self._check(same, key, "has no effect here: texts are neither clipped nor scaled, and rewards count as they come")
        self._check(
            not self.num_gpus,
            "num_gpus",
            "reserves none here: set num_gpus_per_learner, and for engines of their own num_gpus_per_engine",
        )
        self._check(
            not self.num_gpus_per_engine or self.num_engines > 0,
            "num_gpus_per_engine",
            "needs num_engines of at least 1: without, the engine has the GPU of its process (num_gpus_per_learner; under PPO "
            "and APPO num_gpus_per_env_runner)",
        )
        self._check(
            not self.structured_actions or not self.trains or self.trains_by_imitation,
            "structured_actions",
            "must be False: this algorithm's gradient compares probabilities under the policy's own distribution, and an "
            "engine that enforces a form samples from another one. Leave it out, or imitate (NLAC, RFT)",
        )
        self._check_choice("action_format", "plain", "react")
        self._check_choice("learner_model", "auto", "float32", "bfloat16", inner="dtype")
        self._check_choice("learner_model", *PACKING, inner="packing")
        self._check_choice("engine_config", *MERGES_LORA, inner="lora_serving")
        kind = self.engine_config.get("engine", "vllm")
        if kind not in ENGINES:
            raise ValueError(f"config.engine_config['engine']: {unknown_key(kind, ENGINES)}")
        self._check_keys("engine_config", {field.name for field in (*fields(EngineKeys), *fields(ENGINES[kind].Settings))})
        self._check_parts("num_gpus_per_engine")
        self.prompts_for(self.env if isinstance(self.env, str) else None)
        check_model_path(self.model_path)
        if (lora := self.lora_settings) is not None:
            check_targets(self.model_path, lora)
        if Path(self.model_path).is_dir():  # a hub's name is left to the hub
            self._check_room(self.make_chat().max_context)
            if not self.engine_spec.endpoint:  # behind an endpoint are weights of their own
                check_weights(Path(self.model_path))

    def _check_parts(self, key: str) -> None:
        """Holds the parts of an engine against the GPUs that its process has."""
        gpus, parts = getattr(self, key), self.engine_config.get("tensor_parallel_size", 1)
        self._check(not gpus or parts <= max(gpus, 1), key, f"must be at least engine_config's tensor_parallel_size, {parts}")

    def _check_room(self, context: int) -> None:
        for key in ("max_action_tokens", *(("max_future_tokens", "max_critique_tokens") if self.criticises_in_words else ())):
            if (limit := getattr(self.model_defaults, key)) >= context:
                raise ValueError(
                    f"config.{key} is {limit}, and the context, prompt and answer together, is {context} tokens: lower it, or "
                    "raise max_context if the model reads more"
                )

    @classmethod
    def of_all_bases(cls, table: str) -> dict[str, Any]:
        """``RANGES``, ``NESTED_RANGES`` or ``SETTINGS`` of a class and all that it derives from."""
        return {key: value for base in reversed(cls.__mro__) for key, value in vars(base).get(table, {}).items()}

    def _check_ranges(self) -> None:
        ranges_of_all, nested = self.of_all_bases("RANGES"), self.of_all_bases("NESTED_RANGES")
        if self.in_evaluation:  # of what is played there no gradient is taken
            ranges_of_all |= {key: LanguageConfig.RANGES[key] for key in ranges.POLICY_GRADIENT}
        values = {key: getattr(self, key) for key in ranges_of_all if hasattr(self, key)}
        ranges.check(ranges_of_all, values, "config.{key}")
        settings = self.of_all_bases("SETTINGS")
        for key in {**nested, **settings, "engine_config": None}:
            if key != "lora" or self.lora is not None:
                self._check(
                    isinstance(getattr(self, key), Mapping), key, "must be a mapping: leave it out where it sets nothing"
                )
                ranges.check(nested.get(key, {}), getattr(self, key), f"config.{key}[{{key!r}}]")
        for key, known in settings.items():
            self._check_keys(key, {field.name for field in fields(known)})

    def _check(self, condition: bool, key: str, complaint: str) -> None:
        if not condition:
            raise ValueError(f"config.{key} is {getattr(self, key)!r} and {complaint}")

    def _check_choice(self, key: str, *known: str, inner: str | None = None) -> None:
        """Refuses another value than these; ``inner`` is an entry of the mapping ``key``, which may be left out."""
        value = getattr(self, key) if inner is None else getattr(self, key).get(inner, known[0])
        where = key if inner is None else f"{key}[{inner!r}]"
        if value not in known:
            raise ValueError(f"config.{where} is {value!r} and must be one of {', '.join(known)}")

    def _check_keys(self, key: str, known: set[str]) -> None:
        for name in getattr(self, key):
            if name not in known:
                raise ValueError(f"config.{key}: {unknown_key(name, known)}")
