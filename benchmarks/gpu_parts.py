"""What ``benchmarks.gpu`` measures, one function a part, each called in a process of its own.

On a CPU the same functions measure less: shorter, fewer, and in float32, which is what engines take there by default; on a GPU
they and the learner take bfloat16. Weights are random, with logits so far apart that an error of theirs shows.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from transformers import AutoModelForCausalLM

from benchmarks import engine as engine_speed
from benchmarks import lora as lora_serving
from benchmarks import memory, roofline, sync
from benchmarks.learner import build_learner, make_sequences, seconds
from rllib_nlac import NLACConfig
from rllib_nlac.engine.shapes import BYTES, ModelShape, shape_of
from rllib_nlac.learner.batch import to_multi_agent_batch
from rllib_nlac.learner.flops import Peak, peak_of
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.learner.packed_attention import restore
from rllib_nlac.learner.packing import Packing
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.memory.trial import Estimate, estimate
from rllib_nlac.memory.weights import GIB
from rllib_nlac.types import Request, Weights

RANK = 16
SPREAD = 4.0  # of logits; with 150,000 tokens about 4 nats of entropy
ENGINES_SHARE = 0.3  # of a GPU, for weights and KV cache
ACTORS_SHARE = 0.4  # the same and all else of an engine actor; the learner beside it has the rest
SYNC_ON_TWO = "sync-nccl"  # the part that needs two GPUs
WITH_ADAPTER = ("lora", "iteration-lora")
ALONE = {"speed": "engine", "lora": "engine", "learner": "learner"}  # parts that hold only one of both


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        context: The most tokens of a sequence.
        answer: The most tokens of an answer, in every role.
        held: Sequences that are decoded together, and environment slots.
        episodes: Episodes of a round of the speed, each of four turns.
        iteration: Episodes of an iteration of NLAC.
        batch: Transitions of its gradient step.
        micro_batch: Tokens that go through a learner at once; twice as many when it is measured alone.
        sequences: Sequences of a gradient step when the learner is measured.
        times: How many times as long as in the text house these are.
        requests: Requests of a wave.
        rounds: How often something is measured.
    """

    context: int
    answer: int
    held: int
    episodes: int
    iteration: int
    batch: int
    micro_batch: int
    sequences: int
    times: int
    requests: int
    rounds: int


ON_GPU = Sizes(1024, 64, 128, 256, 32, 64, 1024, 64, 8, 384, 3)
ON_CPU = Sizes(256, 8, 8, 8, 4, 8, 256, 16, 1, 24, 2)


@dataclass(frozen=True)
class Task:
    """One part, as the process that measures it is told.

    Attributes:
        part: Its name.
        shape: Name of the model's shape.
        folder: Where the model is.
        on_gpu: Whether a GPU does the work.
        device: The device's name, by which its peak is looked up.
        gpu_bytes: Memory of the GPU; None without one.
    """

    part: str
    shape: str = ""
    folder: str = ""
    on_gpu: bool = False
    device: str = ""
    gpu_bytes: float | None = None

    @property
    def sizes(self) -> Sizes:
        """How much is measured."""
        return ON_GPU if self.on_gpu else ON_CPU

    @property
    def config(self) -> NLACConfig:
        """What is measured."""
        return config_of(self.part, self.folder, self.on_gpu)

    @property
    def peak(self) -> Peak | None:
        """What the device could do; None where that is not known."""
        return peak_of(self.device) if self.on_gpu else None


def config_of(part: str, model: str, on_gpu: bool) -> NLACConfig:
    """A trial on one device, of the shape of the shipped examples for one GPU."""
    size = ON_GPU if on_gpu else ON_CPU
    with_adapter = part in WITH_ADAPTER
    engine = {"max_num_seqs": size.held, "gpu_memory_utilization": ENGINES_SHARE, "cpu_kv_cache_gib": 0.25}
    engine |= {"enforce_eager": part.startswith("sync"), "timeout_s": 300}  # CUDA graphs take time, and no part in a sync
    if with_adapter and on_gpu:  # and twice as many are captured: with an adapter, and without one
        engine |= {"extra": {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 32, 64, size.held]}}}
    held = {"dtype": "bfloat16", **({"packing": "always"} if part == "learner" else {"gradient_checkpointing": True})}
    config = (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 4})
        .language(
            language_model=model,
            lora={"rank": RANK} if with_adapter else None,
            prompts="compact",
            max_context=size.context,
            max_action_tokens=size.answer,
            max_tokens_per_micro_batch=size.micro_batch * (2 if part == "learner" else 1),
            learner_model=held if on_gpu else {},
        )
        .roles(max_future_tokens=size.answer, max_critique_tokens=size.answer)
        .learners(num_gpus_per_learner=int(on_gpu))
        .engines(engine_config=engine)
        .env_runners(episodes_per_iteration=size.iteration, num_envs_per_env_runner=size.held)
        .training(
            lr=1e-5,
            train_batch_size_per_learner=size.batch,
            minibatch_size=size.batch,
            judge_weights="initial" if with_adapter else "target",
        )
        .fault_tolerance(learner_snapshot_interval=0)
        .debugging(seed=0)
    )
    if part == "sync-actor":
        config.learners(num_learners=1, num_gpus_per_learner=on_gpu * (1 - ACTORS_SHARE))
        config.engines(num_engines=1, num_gpus_per_engine=on_gpu * ACTORS_SHARE)
    if part == SYNC_ON_TWO:
        config.learners(num_learners=1).engines(num_engines=1, num_gpus_per_engine=int(on_gpu))
    return config


def estimate_of(part: str, model: str, on_gpu: bool, gpu_bytes: float | None) -> Estimate:
    """What a part's process needs by the estimate; ``model`` is a folder, or the name of a shape that is known."""
    config = config_of(part, model, on_gpu)
    whole = estimate(config, gpu_bytes)
    if part not in ALONE:
        return whole
    return replace(whole, processes=(memory.process_alone(config, ALONE[part], gpu_bytes)[0],))


def build(task: Task) -> dict[str, Any]:
    """The model of random weights, in the precision that the device takes."""
    dtype, device = (torch.bfloat16, "cuda") if task.on_gpu else (torch.float32, "cpu")
    torch.manual_seed(0)
    memory.build(Path(task.folder), task.shape, dtype=dtype, device=device, context=task.sizes.context, spread=SPREAD)
    return {}


@contextmanager
def largest_memory(on_gpu: bool) -> Iterator[Callable[[], float]]:
    """Gives what says, in GiB, the most that this process has held, or that was taken of the GPU, by whomever."""
    if not on_gpu:
        yield memory.peak
        return
    taken, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            taken[0] = max(taken[0], (total - free) / GIB)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: taken[0]
    finally:
        done.set()
        thread.join()


def against_estimate(task: Task, measured: float) -> dict[str, float]:
    """The largest memory beside what the estimate says of this process, in GiB."""
    found = estimate_of(task.part, task.folder, task.on_gpu, task.gpu_bytes)
    said = (found.processes[0].on_gpu if task.on_gpu else found.host_bytes) / GIB
    return {"memory_said_gib": said, "memory_measured_gib": measured, "memory_said_to_measured": said / measured}


def logprobs(task: Task) -> dict[str, Any]:
    """Log-probabilities of engine and learner after a sync; where they are not float32, both beside a model that is."""
    config, sizes = task.config, task.sizes
    learner, chat = build_learner(config), config.make_chat()
    states = learner.export_weights()
    engine = config.engine_spec.maker(chat)()
    for which in (Weights.TARGET, Weights.POLICY):
        engine.set_weights(which, 1, states[which])
    dtypes = {"engine_dtype": _name(engine._llm.vllm_config.model_config.dtype), "learner_dtype": _name(learner.lm.dtype)}
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 500, sizes.context // 8).tolist()) for _ in range(16)]
    answers = engine.generate([Request(prompt, sizes.answer, seed=i) for i, prompt in enumerate(prompts)])
    by_engine = [answer.logprobs for answer in answers]
    by_learner = learner.logprobs_of([a.prompt_ids for a in answers], [a.token_ids for a in answers])
    found = {
        **dtypes,
        "tokens": sum(map(len, by_engine)),
        "logprob_mean": float(np.concatenate(by_engine).mean()),
        **_gap("gap", by_engine, by_learner),
    }
    engine.stop()
    if set(dtypes.values()) != {"float32"}:
        torch.set_float32_matmul_precision("highest")  # vLLM or others may have allowed less
        exact = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32).to(learner.lm.device)
        by_exact = engine_speed.logprobs_by(exact, answers)
        found |= _gap("engine_to_float32", by_engine, by_exact) | _gap("learner_to_float32", by_learner, by_exact)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gap(name: str, one: list[np.ndarray], other: list[np.ndarray]) -> dict[str, float]:
    """Largest and mean difference of log-probabilities."""
    apart = np.abs(np.concatenate(one) - np.concatenate(other))
    return {f"{name}_largest": float(apart.max()), f"{name}_mean": float(apart.mean())}


def speed(task: Task) -> dict[str, Any]:
    """Generated tokens a second of EnvRunner and waves, beside bare vLLM that is asked for the same; share of the bandwidth."""
    config, sizes = task.config, task.sizes
    chat = config.make_chat()
    engine = config.engine_spec.maker(chat)()
    memory.all_parse(engine)
    figures, requests = engine_speed.speeds(config, engine, chat.end_id, sizes.episodes, sizes.rounds)
    wall = {name: statistics.median(float(seconds_and_cpu[0]) for seconds_and_cpu in rows) for name, rows in figures.items()}
    prompt = float(np.mean([len(request.prompt_ids) for request in requests]))
    shape, size = shape_of(task.folder), BYTES[_name(engine._llm.vllm_config.model_config.dtype)]
    read = roofline.decode_bytes(shape, size, sizes.held, prompt + sizes.answer / 2)
    bandwidth = task.peak.bytes_per_s if task.peak else None
    engine.stop()
    found: dict[str, Any] = {"sequences_held": sizes.held, "prompt_tokens_mean": prompt, "bytes_read_per_token": read}
    for key, name in (("bare_vllm", engine_speed.HELD), ("env_runner", "EnvRunner"), ("waves", "waves")):
        found[f"{key}_tokens_per_s"] = wall[name]
        if name != engine_speed.HELD:
            found[f"{key}_to_bare_vllm"] = wall[name] / wall[engine_speed.BESIDE[name]]
        # Of the time prompts are read in, too, so of decoding alone it is more.
        found[f"{key}_share_of_bandwidth"] = roofline.share(wall[name] * read, 1.0, bandwidth)
    return found


def learner(task: Task) -> dict[str, Any]:
    """Tokens a second of a gradient step on all weights, MFU, and memory; and the same of sequences that are padded.

    Once no two sequences begin alike, and once they do, about as those of a gradient step of NLAC.
    """
    config = task.config
    found: dict[str, Any] = {}
    with largest_memory(task.on_gpu) as largest:
        built = build_learner(config)
        found |= {"packed": built.packing.packs, "by_varlen_kernel": built.packing.by_kernel, **steps(task, built, False)}
        found |= {f"alike_{name}": value for name, value in steps(task, built, True).items()}
        measured = largest()
    if built.packing.packs:  # the same weights and optimizer, as there may be no room for others
        restore(built.lm)
        built.packing = Packing(config.max_tokens_per_micro_batch)
    for name, alike in (("", False), ("alike_", True)):
        of_padded = steps(task, built, alike)
        found |= {f"{name}padded_{key}": of_padded[key] for key in ("tokens_per_s", "mfu")}
        found[f"{name}packed_to_padded"] = found[f"{name}tokens_per_s"] / of_padded["tokens_per_s"]
    return found | against_estimate(task, measured)


def steps(task: Task, built: LanguageLearner, alike: bool) -> dict[str, Any]:
    """Gradient steps on the same sequences."""
    sizes = task.sizes
    sequences = make_sequences(1, sizes.sequences, times=sizes.times, alike=alike)
    batch = to_multi_agent_batch(sequences, env_steps=len(sequences))
    took = [
        seconds(lambda: built.update(batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0}))
        for _ in range(sizes.rounds + 1)
    ]
    tokens = sum(len(s.prompt_ids) + len(s.answer_ids) for s in sequences)
    step = statistics.median(took[1:])  # the first warms up
    rows = {name: torch.from_numpy(np.asarray(column)) for name, column in batch[DEFAULT_MODULE_ID].items()}
    flops = built.flops_of(rows)
    return {
        "sequences": len(sequences),
        "tokens": tokens,
        "step_s": step,
        "tokens_per_s": tokens / step,
        "flops_per_token": flops / tokens,
        "mfu": roofline.share(flops, step, task.peak.flops if task.peak else None),
    }


def lora(task: Task) -> dict[str, Any]:
    """An adapter served apart and merged into the model: the same waves, and the same greedy answers."""
    config, sizes = task.config, task.sizes
    assert config.lora_settings is not None
    chat, spec = config.make_chat(), config.engine_spec
    model = lora_serving.with_adapter(task.folder, config.lora_settings, torch.bfloat16 if task.on_gpu else torch.float32)
    state = {name: tensor.clone() for name, tensor in served_state(model).items()}
    engines: dict[str, Any] = {
        "apart": (replace(spec, merges_lora=False).maker(chat)(), state),
        "merged": (replace(spec, merges_lora=True).maker(chat)(), state),
    }
    speeds, syncs = lora_serving.serve(engines, sizes.requests, sizes.rounds)
    model.to("cuda" if task.on_gpu else "cpu")
    compared = lora_serving.compare(engines["apart"][0], engines["merged"][0], model, sizes.requests // 4)
    fast = {name: statistics.median(rows) for name, rows in speeds.items()}
    return {
        "rank": RANK,
        **{f"{name}_tokens_per_s": rate for name, rate in fast.items()},
        "apart_to_merged": fast["apart"] / fast["merged"],
        **{f"{name}_sync_s": statistics.median(rows) for name, rows in syncs.items()},
        **{f"greedy_{name}": value for name, value in asdict(compared).items()},
    }


def transfer(task: Task) -> dict[str, Any]:
    """Seconds and bytes of a sync, which raises unless the engine serves what the learner has, and of a swap."""
    start_ray(task)
    shape: ModelShape = shape_of(task.folder)
    config = task.config
    found, sent = sync.figures(config, shape.parameters * shape.bytes_in_files, task.sizes.rounds)
    return {
        "way": str(config.transfer),
        "sync_s": statistics.median(found[sync.SYNC]),
        "sync_bytes": sent,
        "sync_bytes_per_s": sent / statistics.median(found[sync.SYNC]),
        "verified": True,
        "swap_s": statistics.median(found[sync.SWAP]),
        "copy_in_host_memory_s": statistics.median(found[sync.COPY]),
    }


def iteration(task: Task) -> dict[str, Any]:
    """One iteration of NLAC whose answers all count as ones that parse."""
    start_ray(task)
    with largest_memory(task.on_gpu) as largest:
        found = memory.iteration(task.config)
        measured = largest()
    return {
        "iteration_s": found["whole"],
        **{f"{name}_s": value for name, value in found["seconds"].items()},
        **{name: int(value) for name, value in found["trained"].items()},
        **against_estimate(task, measured),
    }


def start_ray(task: Task) -> None:
    """A Ray with room for one learner and one engine."""
    gpus = task.on_gpu * (2 if task.part == SYNC_ON_TWO else 1)
    ray.init(num_cpus=4, num_gpus=gpus, include_dashboard=False, log_to_driver=False)


# In this order: what matters most comes first, should the time not be enough.
PARTS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "logprobs": logprobs,
    "iteration": iteration,
    "iteration-lora": iteration,
    "speed": speed,
    "learner": learner,
    "lora": lora,
    "sync": transfer,
    "sync-actor": transfer,
    SYNC_ON_TWO: transfer,
}
