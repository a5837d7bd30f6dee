"""What one trial will need where: processes, what each of them holds, and which key to change where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.critic_config import CriticConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.memory import BYTES, Cache, EnginePlan, Part, engine_parts, plan_of
from rllib_nlac.engine.shapes import ModelShape, shape_of
from rllib_nlac.language.variant import NLAC_AS_IT_IS, answered_by
from rllib_nlac.learner.memory import LearnerPlan, learner_parts, trained_parameters
from rllib_nlac.learner.rl_module import LearnerModel
from rllib_nlac.types import Weights

GIB = 2**30
PROGRAM_BYTES = 0.65 * GIB  # Python, torch, Ray and what they load
ENGINE_BYTES = 0.2 * GIB  # vLLM's part of it
DRIVER_BYTES = 0.15 * GIB  # Ray's and RLlib's
CONTEXT_BYTES = 0.6 * GIB  # CUDA's context and libraries on a GPU, of each process
CHECKPOINTING = "learner_model: {gradient_checkpointing: true}"
HEADROOM = 0.9  # share of a memory that may be planned with: an iteration on an H100 took 1.08 times what was said


@dataclass(frozen=True)
class Process:
    """Processes of one kind.

    Attributes:
        name: What it is.
        count: How many there are.
        gpus: GPUs of each, or a share of one; 0 without.
        parts: What each holds; of several GPUs, on each of them.
        cache: Of an engine in it, as far as it is known.
        plan: Of an engine in it.
    """

    name: str
    count: int
    gpus: float
    parts: tuple[Part, ...]
    cache: Cache | None = None
    plan: EnginePlan | None = None

    @property
    def on_gpu(self) -> float:
        """Bytes on each of its GPUs."""
        return sum(part.num_bytes for part in self.parts if self.gpus and not part.on_host)

    @property
    def on_host(self) -> float:
        """Bytes in the host's memory, of the first of them."""
        return sum(part.num_bytes for part in self.parts if not self.gpus or part.on_host)

    @property
    def on_host_of_all(self) -> float:
        """Bytes in the host's memory of all of them."""
        of_first = sum(part.num_bytes for part in self.parts if part.first_only and (not self.gpus or part.on_host))
        return self.count * (self.on_host - of_first) + of_first


@dataclass(frozen=True)
class Estimate:
    """What one trial needs.

    Attributes:
        shape: The model's.
        trained: Numbers that are trained.
        processes: All that the trial has.
        sync_bytes: What a sync of weights carries.
    """

    shape: ModelShape
    trained: int
    processes: tuple[Process, ...]
    sync_bytes: int

    @property
    def host_bytes(self) -> float:
        """Bytes in the host's memory of all processes."""
        return sum(process.on_host_of_all for process in self.processes)

    @property
    def uses_gpus(self) -> bool:
        """Whether any process has a GPU."""
        return any(process.gpus for process in self.processes)


def estimate(config: LanguageConfig, gpu_bytes: float | None = None) -> Estimate:
    """What a trial of a configuration needs; nothing is loaded.

    Args:
        config: Validated.
        gpu_bytes: Memory of one GPU; None where it is not known.

    Raises:
        UnknownShape: Nothing says how large the model is.
        FileNotFoundError: A file of the model is missing.
        ValueError: A file of the model cannot be read.
    """
    shape = shape_of(config.model_path)
    is_ours = isinstance(config, LanguageAlgorithmConfig)
    context = config.max_context or shape.context
    numbers = trained_parameters(shape, config.lora_settings)
    sets = _sets(config)
    handed_over = sum(name in ("policy", "target") for name in sets) if is_ours else 1
    sync = handed_over * numbers * BYTES[_model(config).dtype if is_ours else "float32"]
    of_learner = learner_parts(shape, _learner_plan(config, context)) if config.trains else []
    if not config.trains:
        sync = 0

    def engine(on_gpu: bool, in_process: bool) -> tuple[EnginePlan, list[Part], Cache | None]:
        spec = config.engine_spec
        plan = plan_of(spec.settings, spec, context, sets, on_gpu, in_process and config.trains)
        return plan, *engine_parts(shape, plan, gpu_bytes if on_gpu else 0)

    driver_gpus = config.num_gpus_per_learner if not config.num_learners else 0
    driver = [Part("program", PROGRAM_BYTES + DRIVER_BYTES, "Python, torch, Ray", on_host=True), *_kept(config)]
    driver += of_learner if not config.num_learners else []
    driver_engine: tuple[Any, Any] = (None, None)
    has_engine = not config.engine_spec.endpoint
    plays_here = not config.num_env_runners or (config.evaluation_interval and not config.evaluation_num_env_runners)
    if has_engine and (not config.num_engines if is_ours else plays_here):
        plan, more, cache = engine(bool(driver_gpus), not config.num_learners)
        driver += [_program_of_engine(), *more]
        driver_engine = (cache, plan)
    in_files = shape.parameters * shape.bytes_in_files
    processes = [_process("driver", 1, driver_gpus, driver, in_files, *driver_engine)]
    if config.num_learners and config.trains:
        parts = [Part("program", PROGRAM_BYTES, on_host=True), *of_learner]
        processes.append(_process("learner", config.num_learners, config.num_gpus_per_learner, parts, in_files))
    if config.num_engines and has_engine:
        plan, more, cache = engine(bool(config.num_gpus_per_engine), False)
        parts = [Part("program", PROGRAM_BYTES, on_host=True), _program_of_engine(), *more]
        processes.append(_process("engine", config.num_engines, config.num_gpus_per_engine, parts, in_files, cache, plan))
    of_evaluation = config.get_evaluation_config_object() or config
    for name, count, gpus in (
        ("EnvRunner", config.num_env_runners, config.num_gpus_per_env_runner),
        ("evaluation EnvRunner", config.evaluation_num_env_runners, of_evaluation.num_gpus_per_env_runner),
    ):
        parts = [Part("program", PROGRAM_BYTES, on_host=True)]
        if count and is_ours:
            processes.append(_process(name, count, 0, parts, in_files))
        elif count:
            plan, more, cache = engine(bool(gpus), False)
            parts += [_program_of_engine(), *more]
            processes.append(_process(name, count, gpus, parts, in_files, cache, plan))
    if crossing := _crossing(config, sync, numbers):
        processes.append(Process("Ray's object store", 1, 0, tuple(crossing)))
    return Estimate(shape, numbers, tuple(processes), sync)


def advice(found: Estimate, config: LanguageConfig, gpu_bytes: float | None, host_bytes: float | None) -> list[str]:
    """Where a trial does not fit, and the keys that change it; empty where it fits as far as that is known.

    Args:
        found: Of the configuration.
        config: The same one.
        gpu_bytes: Memory of one GPU; None where it is not known.
        host_bytes: Memory of the machine; None where it is not to be looked at.
    """
    lines = []
    for process in found.processes:
        if process.gpus and gpu_bytes:
            room = HEADROOM * gpu_bytes * min(process.gpus, 1)
            if process.on_gpu > room:
                keys = _keys(process, config, room, on_host=False)
                lines.append(f"{process.name}: {_gib(process.on_gpu)} of {_gib(room)} GiB on each GPU; {keys}")
        if process.cache is not None and process.plan is not None and process.cache.sequences < 1:
            key = "engine_config: {gpu_memory_utilization: ...}" if process.gpus else "engine_config: {cpu_kv_cache_gib: ...}"
            split = ", or more GPUs (num_gpus_per_engine and tensor_parallel_size)" if process.gpus else ""
            lines.append(
                f"{process.name}: the KV cache does not hold one sequence of {process.plan.max_context:,} tokens, "
                f"{_gib(process.cache.sequence_bytes)} GiB; raise {key}, lower max_context{split}"
            )
    if host_bytes and found.host_bytes > HEADROOM * host_bytes:
        largest = max(found.processes, key=lambda process: process.on_host_of_all)
        room = HEADROOM * host_bytes - (found.host_bytes - largest.on_host)
        keys = _keys(largest, config, room, on_host=True)
        lines.append(f"this machine: {_gib(found.host_bytes)} of {_gib(HEADROOM * host_bytes)} GiB; {keys}")
    return lines


def _keys(process: Process, config: LanguageConfig, room: float, on_host: bool) -> str:
    """What to change, the largest part first."""
    sizes: dict[str, float] = {}
    for part in process.parts:
        if (not process.gpus or part.on_host) == on_host:
            sizes[part.what] = sizes.get(part.what, 0) + part.num_bytes
    named: list[str] = []
    for what in sorted(sizes, key=lambda what: -sizes[what]):
        for key in _keys_for(what, process, config, sizes, room):
            if key not in named:
                named.append(key)
    return "change " + ", or ".join(named[:3]) if named else "take a larger machine"


def _keys_for(what: str, process: Process, config: LanguageConfig, sizes: dict[str, float], room: float) -> list[str]:
    deepspeed = isinstance(config, LanguageAlgorithmConfig)
    if what in ("activations", "logits"):
        keys = [CHECKPOINTING] if what == "activations" and not _model(config).gradient_checkpointing else []
        working = sizes.get("activations", 0) + sizes.get("logits", 0)
        left = room - (sum(sizes.values()) - working)
        tokens = int(config.max_tokens_per_micro_batch * left / working) // 64 * 64
        return [*keys, f"max_tokens_per_micro_batch: {tokens}" if tokens > 0 else "max_tokens_per_micro_batch"]
    if what in ("optimizer", "gradients", "target weights") and config.lora is None:
        several = ["deepspeed_config: {zero_optimization: {stage: 2}}"] if config.num_learners > 1 and deepspeed else []
        return ["lora: {rank: 16}", *several]
    if what == "weights":
        keys = ["learner_model: {dtype: bfloat16}"] if _model(config).dtype == "float32" and process.name != "engine" else []
        return keys or _for_weights(process, config)
    if what == "weight sets":
        serving = ["engine_config: {lora_serving: adapter}"] if config.lora is not None else ["lora: {rank: 16}"]
        return [*serving, *(["judge_weights: target"] if Weights.INITIAL.value in _sets(config) else [])]
    if what == "initial weights":
        return ["kl_to_base_coeff: null"]
    if what == "generation":
        return ["engine_config: {max_num_seqs: ...}"]
    if what == "KV cache":
        return ["engine_config: {gpu_memory_utilization: ...}" if process.gpus else "engine_config: {cpu_kv_cache_gib: ...}"]
    if what == "snapshot":
        return ["learner_snapshot_interval: 0"]
    return []


def _for_weights(process: Process, config: LanguageConfig) -> list[str]:
    """What makes room where weights take most, in processes that have half of the precision already."""
    keys = []
    if process.gpus and process.name == "engine":
        keys.append("tensor_parallel_size with num_gpus_per_engine")
    elif process.gpus and process.name == "driver" and not config.num_engines and isinstance(config, LanguageAlgorithmConfig):
        keys.append("num_engines: 1 with num_gpus_per_engine: 1")
    elif process.gpus and isinstance(config, LanguageAlgorithmConfig) and config.lora is None:
        keys.append("num_learners with deepspeed_config: {zero_optimization: {stage: 3}}")
    return [*keys, "a smaller language_model"]


def _model(config: LanguageConfig) -> LearnerModel:
    return config.held_model


def _learner_plan(config: LanguageConfig, context: int) -> LearnerPlan:
    coefficient = getattr(config, "kl_to_base_coeff", None)
    in_one_process = not (config.num_learners or config.num_engines)
    return LearnerPlan(
        dtype=_model(config).dtype,
        tokens=max(config.max_tokens_per_micro_batch, context),  # a sequence that is longer goes through alone
        logit_tokens=config.max_tokens_per_micro_batch,  # and of that one the answer alone has logits
        lora=config.lora_settings,
        has_target=getattr(config, "tau", None) is not None,
        with_kl=bool(coefficient),
        keeps_base=coefficient is not None and config.lora is None,
        gradient_checkpointing=_model(config).gradient_checkpointing,
        deepspeed=config.deepspeed_settings if isinstance(config, LanguageAlgorithmConfig) else {},
        num_learners=max(config.num_learners, 1),
        on_gpu=bool(config.num_gpus_per_learner),
        lends=isinstance(config, LanguageAlgorithmConfig)
        and bool(config.num_gpus_per_learner and in_one_process and config.lora is None),
        exported_sets=sum(name != Weights.INITIAL.value for name in _sets(config)),
    )


def _sets(config: LanguageConfig) -> tuple[str, ...]:
    """Names of the weight sets that an engine is given."""
    if not config.trains:
        return ()
    sets = [which.value for which in getattr(config, "learned_sets", (Weights.POLICY,))]
    if isinstance(config, CriticConfig):
        variant = getattr(config.algo_class, "variant", NLAC_AS_IT_IS)
        if Weights.INITIAL in answered_by(config.stage_settings, variant).values():
            sets.append(Weights.INITIAL.value)
    return tuple(sets)


def _kept(config: LanguageConfig) -> list[Part]:
    """What the driver keeps of episodes, at most."""
    buffer = getattr(config, "replay_buffer_config", None)
    return [] if buffer is None else [Part("replay buffer", 0, "grows up to replay_buffer_config: {max_bytes}", on_host=True)]


def _crossing(config: LanguageConfig, sync: int, numbers: int) -> list[Part]:
    """What lies in Ray's object store, between processes."""
    parts = []
    if sync and (config.num_learners or config.num_engines or config.num_env_runners):
        whole = config.lora is None or config.num_engines
        if whole and (config.num_learners or config.num_engines):
            parts.append(Part("weight sets", sync, "of a sync, until the next one"))
            if config.num_learners and config.num_engines:  # see ``RemoteEngines._keep``
                parts.append(Part("weight sets", sync, "the learner's own, until the engines have read them"))
    if config.num_learners and getattr(config, "learner_snapshot_interval", 0):
        size = BYTES[_model(config).dtype]
        num_bytes = numbers * (size + 8 + (4 if size == 2 else 0) + (4 if getattr(config, "tau", None) is not None else 0))
        parts.append(Part("snapshot", num_bytes, "of the learners, after each update"))
    return parts


def _process(
    name: str,
    count: int,
    gpus: float,
    parts: Sequence[Part],
    in_files: float,
    cache: Cache | None = None,
    plan: EnginePlan | None = None,
) -> Process:
    context = [Part("program", CONTEXT_BYTES, "CUDA's context")] if gpus else []
    weights = max((part.num_bytes for part in parts if part.what == "weights"), default=0)
    held = sum(part.num_bytes for part in parts if part.what != "program")
    more = weights + in_files - held
    loading = (
        [Part("loading", more, "its files beside the weights, while these are read")]
        if weights and more > 0 and not gpus
        else []
    )
    return Process(name, count, gpus, (*context, *parts, *loading), cache, plan)


def _program_of_engine() -> Part:
    return Part("program", ENGINE_BYTES, "vLLM", on_host=True)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
