"""Measured memory beside what ``--dry-run`` says: ``python -m benchmarks.memory [--parts learner engine ...] [--rank 16]``.

Random weights of Qwen2.5-0.5B's shape in float32, with the shipped model's tokenizer, whose tokens are some of its vocabulary.
A learner and an engine, each in a process of its own, with all weights and with an adapter: the largest resident set of a
process, as Linux keeps it, beside the estimate. ``iteration``: one whole iteration of NLAC with an adapter in one process, its
largest resident set and its seconds by stage; since nothing that random weights write parses, every answer is taken as if it
did. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.learner import build_learner
from rllib_nlac import NLACConfig
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.shapes import KNOWN
from rllib_nlac.learner.batch import CRITIC, TrainingSequence, into_minibatches, to_multi_agent_batch
from rllib_nlac.memory.trial import Process, estimate
from rllib_nlac.types import Request, Weights

GIB = 2**30
# Those of the package, and one that a test can afford. So small a model whose output layer were its embedding would say its
# last token again and again.
SHAPES = {**KNOWN, "small": ("qwen2", 64, 2, 2, 1, 32, 128, 536, False, 512)}
PARTS = ("learner", "learner-lora", "engine", "engine-lora", "iteration")
ANSWER = "Optimal: No\nReason: none\nFix: is it an animal?\nFuture: it ends. SUCCESS"
TOKENS, LENGTH, SEQUENCES = 256, 64, 16


def build(
    folder: Path,
    name: str,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    context: int = 512,
    spread: float | None = None,
) -> None:
    """Random weights of a well-known shape, with the shipped model's tokenizer.

    Args:
        folder: Where the model goes.
        name: One of ``SHAPES``.
        layers: Fewer than the shape has.
        dtype: Precision of the weights in the files.
        device: Where the numbers are drawn.
        context: The most tokens of a sequence.
        spread: Standard deviation of the logits, about; None leaves them as they come, close to each other.
    """
    shipped = NLACConfig().model_path
    shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns("*.safetensors", "MODEL_CARD.md"))
    family, hidden, known_layers, heads, kv_heads, head_dim, wide, vocab, tied, _ = SHAPES[name]
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        num_hidden_layers=layers or known_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=wide,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if spread is not None:  # what the last norm hands on has this size, and rows of the output layer that of their start
        torch.nn.init.constant_(model.get_decoder().norm.weight, spread / (config.initializer_range * math.sqrt(hidden)))
    model.save_pretrained(folder)


def config_of(folder: str, rank: int) -> NLACConfig:
    """One process, small enough for two cores."""
    return (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 2})
        .language(
            language_model=folder,
            lora={"rank": rank} if rank else None,
            prompts="compact",
            max_context=256,
            max_action_tokens=8,
            max_tokens_per_micro_batch=TOKENS,
        )
        .roles(max_future_tokens=8, max_critique_tokens=8)
        .engines(engine_config={"max_num_seqs": SEQUENCES, "cpu_kv_cache_gib": 0.25, "lora_serving": "adapter"})
        .env_runners(episodes_per_iteration=4, num_envs_per_env_runner=4)
        .training(lr=1e-4, train_batch_size_per_learner=8, minibatch_size=8, judge_weights="initial" if rank else "target")
        .debugging(seed=0)
    )


def peak() -> float:
    """Largest resident set of this process until now, in GiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 2**20


def learner(config: NLACConfig) -> dict[str, Any]:
    """Two updates of one step, each of two micro-batches."""
    built = build_learner(config)
    rng, seconds = np.random.default_rng(0), []
    for _ in range(2):
        ids = rng.integers(3, 500, (2 * TOKENS // LENGTH, LENGTH)).tolist()
        rows = [TrainingSequence(row[:1], row[1:], CRITIC, i, 0, 1.0) for i, row in enumerate(ids)]
        batch = to_multi_agent_batch(into_minibatches(rows, len(rows), 1, rng), env_steps=len(rows))
        started = time.perf_counter()
        built.update(batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0})
        seconds.append(time.perf_counter() - started)
    stepped = peak()
    built.export_weights()
    return {"peak": peak(), "of the steps": stepped, "seconds": seconds}


def engine(config: NLACConfig) -> dict[str, Any]:
    """Policy and target are handed over, and a wave is answered under each."""
    chat = config.make_chat()
    built = config.engine_spec.maker(chat)()
    started = peak()
    trained = make_module(config)
    for number in range(2):
        for which in (Weights.TARGET, Weights.POLICY):
            built.set_weights(which, number, trained)
    began = time.perf_counter()
    for which in (Weights.TARGET, Weights.POLICY):
        asked = [Request(tuple(range(5 + i, 69 + i)), 4, 1.0, 1.0, i, weights=which) for i in range(SEQUENCES)]
        built.generate(asked)
    return {"peak": peak(), "of the start": started, "seconds": [time.perf_counter() - began]}


def make_module(config: NLACConfig) -> dict[str, torch.Tensor]:
    """The tensors that an engine is given, as a learner exports them."""
    from rllib_nlac.learner.adapter import add_adapter
    from rllib_nlac.learner.rl_module import served_state

    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
    if config.lora_settings is not None:
        add_adapter(model, config.lora_settings)
    return {name: tensor.clone() for name, tensor in served_state(model).items()}


def all_parse(engine: Any) -> None:
    """From now on whatever an engine sampled reads, in this process, as an answer that parses in every role, and has ended."""
    Chat.decode = lambda chat, ids: ANSWER  # type: ignore[method-assign]
    poll = engine.poll
    engine.poll = lambda *patience: [(ticket, replace(answer, finished=True)) for ticket, answer in poll(*patience)]


def iteration(config: NLACConfig) -> dict[str, Any]:
    """One iteration whose answers all parse."""
    algorithm = config.build_algo()
    all_parse(algorithm.engine)
    started = time.perf_counter()
    results = algorithm.train()
    learned = results["learners"]["default_policy"]
    found = {
        "seconds": {name: round(value, 3) for name, value in results["seconds"].items()},
        "whole": time.perf_counter() - started,
        "trained": {name: float(learned[name]) for name in ("num_tokens_trained", "num_gradient_steps")},
        "peak": peak(),
    }
    algorithm.stop()
    return found


def process_alone(config: NLACConfig, name: str, gpu_bytes: float | None = None) -> tuple[Process, int]:
    """The estimate of "learner" or "engine" as a process of its own, and the bytes of a sync.

    Args:
        config: Configuration of a trial that has both in one process.
        name: Which of them.
        gpu_bytes: Memory of one GPU.
    """
    own = config.copy(copy_frozen=False)
    own.learners(num_learners=1).engines(num_engines=1, num_gpus_per_engine=own.num_gpus_per_learner)
    found = estimate(own, gpu_bytes)
    (process,) = [process for process in found.processes if process.name == name]
    return process, found.sync_bytes


def expected(config: NLACConfig, part: str) -> float:
    """What the dry run says, in GiB."""
    if part == "iteration":
        return estimate(config).host_bytes / GIB
    process, sync_bytes = process_alone(config, part.partition("-")[0])
    # In a trial the weights that are handed over lie in Ray's object store, which counts by itself; here in the process.
    handed_over = sync_bytes / 2 if process.name == "engine" else 0
    return (process.on_host + handed_over) / GIB


def rank_of(part: str, rank: int) -> int:
    """The adapter's rank in a part; 0 where all weights are trained."""
    return 0 if part in ("learner", "engine") else rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", choices=list(SHAPES), default="Qwen2.5-0.5B")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a quick look")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the folder, in a process that is measured
    arguments = parser.parse_args()
    if arguments.inside:
        (part,) = arguments.parts
        work: dict[str, Callable[[NLACConfig], dict[str, Any]]] = {"learner": learner, "engine": engine, "iteration": iteration}
        torch.set_num_threads(1 if part != "iteration" else 2)
        print(json.dumps(work[part.partition("-")[0]](config_of(arguments.inside, rank_of(part, arguments.rank)))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "model")
        build(Path(folder), arguments.shape, arguments.layers)
        print(f"{arguments.shape} in float32, adapters of rank {arguments.rank}; the largest resident set of a process, in GiB")
        for part in arguments.parts:
            command = [sys.executable, "-m", "benchmarks.memory", "--parts", part, "--rank", str(arguments.rank)]
            done = subprocess.run([*command, "--inside", folder], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{part} ended with {done.returncode}:\n{done.stderr[-3000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            measured = found.pop("peak")
            said = expected(config_of(folder, rank_of(part, arguments.rank)), part)
            print(
                f"  {part:13} said {said:6.2f}   measured {measured:6.2f}   ratio {said / measured:5.2f}   {found}", flush=True
            )


if __name__ == "__main__":
    main()
