"""What one trial needs: its processes, and what each of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.engine.shapes import BYTES, ModelShape, shape_of
from rllib_nlac.memory.engine import Cache, engine_parts
from rllib_nlac.memory.learner import learner_parts, learner_plan
from rllib_nlac.memory.weights import GIB, Part, between_processes, served_sets, trained_parameters

PROGRAM_BYTES = 0.65 * GIB  # Python, torch, Ray and what they load
ENGINE_BYTES = 0.2 * GIB  # vLLM's part of it
DRIVER_BYTES = 0.15 * GIB  # Ray's and RLlib's
CONTEXT_BYTES = 0.6 * GIB  # CUDA's context and libraries on a GPU, of each process


@dataclass(frozen=True)
class Process:
    """Processes of one kind.

    Attributes:
        name: What it is.
        count: How many there are.
        gpus: GPUs of each, or a share of one; 0 without.
        parts: What each holds; of several GPUs, on each of them.
        cache: KV cache of an engine in it, as far as that is known.
    """

    name: str
    count: int
    gpus: float
    parts: tuple[Part, ...]
    cache: Cache | None = None

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
        config: Validated, with an engine of its own and not an endpoint.
        gpu_bytes: Memory of one GPU; None where it is not known.

    Raises:
        UnknownShape: Nothing says how large the model is.
        FileNotFoundError: A file of the model is missing.
        ValueError: A file of the model cannot be read.
    """
    shape, sets = shape_of(config.model_path), served_sets(config)
    is_ours, trains = isinstance(config, LanguageAlgorithmConfig), config.trains
    context = config.max_context or shape.context
    numbers = trained_parameters(shape, config.lora_settings)
    handed_over = sum(name in ("policy", "target") for name in sets) if is_ours else 1
    sync = handed_over * numbers * BYTES[config.held_model.dtype if is_ours else "float32"] if trains else 0

    def process(name: str, count: int, gpus: float, has_learner: bool, has_engine: bool, own: Sequence[Part] = ()) -> Process:
        parts = [*own] or [Part("program", PROGRAM_BYTES, on_host=True)]
        cache: Cache | None = None
        if has_learner:
            parts += learner_parts(shape, learner_plan(config, context))
        if has_engine:
            on_each = gpu_bytes if gpus else 0
            of_engine, cache = engine_parts(shape, config.engine_spec, sets, context, on_each, beside_learner=has_learner)
            parts += [Part("program", ENGINE_BYTES, "vLLM", on_host=True), *of_engine]
        if gpus:
            parts.insert(0, Part("program", CONTEXT_BYTES, "CUDA's context"))
        else:
            parts += _loading(shape, parts)
        return Process(name, count, gpus, tuple(parts), cache)

    plays_here = not config.num_env_runners or (config.evaluation_interval and not config.evaluation_num_env_runners)
    evaluation = config.get_evaluation_config_object() or config
    runners_gpus = (0, 0) if is_ours else (config.num_gpus_per_env_runner, evaluation.num_gpus_per_env_runner)
    processes = [
        process(
            "driver",
            1,
            0 if config.num_learners else config.num_gpus_per_learner,
            has_learner=trains and not config.num_learners,
            has_engine=bool(not config.num_engines if is_ours else plays_here),
            own=[Part("program", PROGRAM_BYTES + DRIVER_BYTES, "Python, torch, Ray", on_host=True), *_kept(config)],
        )
    ]
    for name, count, gpus, has_learner, has_engine in (
        ("learner", config.num_learners if trains else 0, config.num_gpus_per_learner, True, False),
        ("engine", config.num_engines, config.num_gpus_per_engine, False, True),
        ("EnvRunner", config.num_env_runners, runners_gpus[0], False, not is_ours),
        ("evaluation EnvRunner", config.evaluation_num_env_runners, runners_gpus[1], False, not is_ours),
    ):
        if count:
            processes.append(process(name, count, gpus, has_learner, has_engine))
    if stored := between_processes(config, sync, numbers):
        processes.append(Process("Ray's object store", 1, 0, tuple(stored)))
    return Estimate(shape, numbers, tuple(processes), sync)


def _kept(config: LanguageConfig) -> list[Part]:
    """What the driver keeps of episodes, at most."""
    buffer = getattr(config, "replay_buffer_config", None)
    return [] if buffer is None else [Part("replay buffer", 0, "grows up to replay_buffer_config: {max_bytes}", on_host=True)]


def _loading(shape: ModelShape, parts: Sequence[Part]) -> list[Part]:
    """What the files of a model take beside its weights while these are read, as far as nothing else takes their place."""
    weights = max((part.num_bytes for part in parts if part.what == "weights"), default=0)
    held = sum(part.num_bytes for part in parts if part.what != "program")
    more = weights + shape.parameters * shape.bytes_in_files - held
    return [Part("loading", more, "its files beside the weights, while these are read")] if weights and more > 0 else []
