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
from rllib_nlac.algorithm.memory import estimate
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.shapes import KNOWN
from rllib_nlac.learner.batch import CRITIC, TrainingSequence, into_minibatches, to_multi_agent_batch
from rllib_nlac.types import Request, Weights

GIB = 2**30
PARTS = ("learner", "learner-lora", "engine", "engine-lora", "iteration")
ANSWER = "Future: SUCCESS\nOptimal: No\nReason: none\nFix: is it an animal?"
TOKENS, LENGTH, SEQUENCES = 256, 64, 16


def build(folder: Path, name: str, layers: int | None) -> None:
    """Random weights of a well-known shape, with the shipped model's tokenizer."""
    shipped = NLACConfig().model_path
    shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns("*.safetensors", "MODEL_CARD.md"))
    family, hidden, known_layers, heads, kv_heads, _, wide, vocab, tied, _ = KNOWN[name]
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        num_hidden_layers=layers or known_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=wide,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


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


def learner(folder: str, rank: int) -> dict[str, Any]:
    """Two updates of one step, each of two micro-batches."""
    config = config_of(folder, rank).copy(copy_frozen=False)
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


def engine(folder: str, rank: int) -> dict[str, Any]:
    """Policy and target are handed over, and a wave is answered under each."""
    config = config_of(folder, rank)
    chat = Chat.from_pretrained(folder, config.max_context)
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


def iteration(folder: str, rank: int) -> dict[str, Any]:
    """One iteration; whatever was sampled reads as an answer that parses in every role, and as one that has ended."""
    Chat.decode = lambda chat, ids: ANSWER  # type: ignore[method-assign]
    algorithm = config_of(folder, rank).build_algo()
    engine, poll = algorithm.engine, algorithm.engine.poll
    engine.poll = lambda: [(ticket, replace(answer, finished=True)) for ticket, answer in poll()]
    started = time.perf_counter()
    results = algorithm.train()
    learned = results["learners"]["default_policy"]
    found = {
        "seconds": {name: round(value, 1) for name, value in results["seconds"].items()},
        "whole": time.perf_counter() - started,
        "trained": {name: float(learned[name]) for name in ("num_tokens_trained", "num_gradient_steps")},
        "peak": peak(),
    }
    algorithm.stop()
    return found


def expected(folder: str, part: str, rank: int) -> float:
    """What the dry run says, in GiB."""
    config = config_of(folder, rank)
    if part == "iteration":
        return estimate(config).host_bytes / GIB
    if part.startswith("learner"):
        config.learners(num_learners=1)
    config.engines(num_engines=1)
    found = estimate(config)
    (process,) = [process for process in found.processes if process.name == part.partition("-")[0]]
    # In a trial the weights that are handed over lie in Ray's object store, which counts by itself; here in the process.
    handed_over = found.sync_bytes / 2 if process.name == "engine" else 0
    return (process.on_host + handed_over) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", choices=list(KNOWN), default="Qwen2.5-0.5B")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a quick look")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the folder, in a process that is measured
    arguments = parser.parse_args()
    if arguments.inside:
        (part,) = arguments.parts
        work: dict[str, Callable[[str, int], dict[str, Any]]] = {"learner": learner, "engine": engine, "iteration": iteration}
        rank = arguments.rank if part not in ("learner", "engine") else 0
        torch.set_num_threads(1 if part != "iteration" else 2)
        print(json.dumps(work[part.partition("-")[0]](arguments.inside, rank)))
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
            said = expected(folder, part, arguments.rank if part not in ("learner", "engine") else 0)
            print(
                f"  {part:13} said {said:6.2f}   measured {measured:6.2f}   ratio {said / measured:5.2f}   {found}", flush=True
            )


if __name__ == "__main__":
    main()
