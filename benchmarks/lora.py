"""How fast waves are that ask three weight sets: ``python -m benchmarks.lora [--hidden 96] [--layers 4] [--rank 16]``.

Whole weight sets, adapters over one base, and adapters merged into the model, side by side in one process: the same requests,
a third for each of policy, target and initial weights. Then greedy answers of adapters and of merged weights, and by how much
the log-probabilities of their tokens differ, from each other and from PEFT's. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine import logprobs_by
from benchmarks.sync import build
from rllib_nlac import NLACConfig
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.learner.adapter import add_adapter
from rllib_nlac.learner.layout import shared_beginning
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.types import Request, Weights

PEFT_ANSWERS = 32


def with_adapter(folder: str, lora: LoRASettings, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model with an adapter that says something."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    add_adapter(model, lora)
    with torch.no_grad():  # B is 0 in a new one
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def serve(
    engines: dict[str, tuple[VLLMEngine, dict[str, torch.Tensor]]],
    count: int,
    rounds: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The same waves by all engines, turn about, after a round that warms up; a third of a wave under each weight set.

    Args:
        engines: Each with the weights that it is given.
        count: Requests of a wave.
        rounds: How often.

    Returns:
        Generated tokens a second of each round, and seconds of a sync of policy and target.
    """
    prompt, sets = tuple(range(5, 69)), list(Weights)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    syncs: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        asked = [Request((*prompt, 5 + i % 400), 24, 1.0, 1.0, i, logprobs=False, weights=sets[i % 3]) for i in range(count)]
        for name, (engine, state) in engines.items():
            started = time.perf_counter()
            for which in (Weights.TARGET, Weights.POLICY):
                engine.set_weights(which, number, state)
            synced = time.perf_counter()
            answers = engine.generate(asked)
            if number:  # the first warms up
                syncs[name].append(synced - started)
                speeds[name].append(sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - synced))
    return speeds, syncs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    lora = LoRASettings(rank=arguments.rank)
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "model")
        size = build(NLACConfig().language(language_model="tiny").model_path, Path(folder), arguments.hidden, arguments.layers)
        chat = Chat.from_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole = {name: tensor.clone() for name, tensor in served_state(base).items()}
        model = with_adapter(folder, lora)
        adapter = {name: tensor.clone() for name, tensor in served_state(model).items()}
        engines = {
            "whole sets": (VLLMEngine(folder, chat.max_context, [chat.end_id]), whole),
            "adapters": (VLLMEngine(folder, chat.max_context, [chat.end_id], lora=lora, merges_lora=False), adapter),
            "merged": (VLLMEngine(folder, chat.max_context, [chat.end_id], lora=lora, merges_lora=True), adapter),
        }
        engines["whole sets"][0].set_weights(Weights.INITIAL, 0, whole)
    speeds, syncs = serve(engines, arguments.requests, arguments.rounds)
    found = compare(engines["adapters"][0], engines["merged"][0], model, arguments.requests)
    print(f"adapter against merged in float32: {found.same} of {found.answers} greedy answers have the same tokens")
    print(f"  ({found.tokens:,}); as far as tokens are the same their log-probabilities differ by at most {found.gap:.1e},")
    print(f"  from PEFT's own those of {min(PEFT_ANSWERS, found.answers)} answers by at most {found.of_peft:.1e}")
    print(f"{size:,} parameters, rank {arguments.rank}, {arguments.requests} requests a wave, a third under each of three sets")
    whole_sets = statistics.median(speeds["whole sets"])
    for name in engines:
        fast, sync = statistics.median(speeds[name]), statistics.median(syncs[name])
        spread = f"({min(speeds[name]):,.0f} to {max(speeds[name]):,.0f})"
        ratio = f"{fast / whole_sets:.2f} of whole sets"
        print(f"  {name:11} {fast:8,.0f} tokens/s {spread}   {ratio}   sync of both {sync * 1e3:7.1f} ms")


@dataclass(frozen=True)
class Comparison:
    """How far greedy answers under the policy's adapter, served both ways, are from each other and from PEFT's.

    Attributes:
        answers: How many were compared.
        same: How many have the same tokens, to their end.
        tokens: Tokens of the answers by the adapter that is served apart.
        same_tokens: How many of these come before the first that differs.
        gap: Largest difference of the log-probabilities of those.
        of_peft: The same between the adapter that is served apart and PEFT's own, of ``PEFT_ANSWERS`` answers.
    """

    answers: int
    same: int
    tokens: int
    same_tokens: int
    gap: float
    of_peft: float


def compare(adapters: VLLMEngine, merged: VLLMEngine, model: torch.nn.Module, count: int) -> Comparison:
    """Has both engines and PEFT's model answer greedily under the same adapter."""
    asked = [Request((*range(5, 69), 5 + i % 400), 24, 0.0, seed=i) for i in range(count)]
    one, other = adapters.generate(asked), merged.generate(asked)
    # After a token that differs the answers are about different texts.
    begun = [shared_beginning(np.array(a.token_ids), np.array(b.token_ids)) for a, b in zip(one, other, strict=True)]
    gaps = [abs(a.logprobs[:n] - b.logprobs[:n]).max() for a, b, n in zip(one, other, begun, strict=True) if n]
    of_peft = [abs(own - a.logprobs).max() for own, a in zip(logprobs_by(model, one[:PEFT_ANSWERS]), one, strict=False)]
    return Comparison(
        answers=count,
        same=sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True)),
        tokens=sum(len(answer.token_ids) for answer in one),
        same_tokens=sum(begun),
        gap=float(max(gaps, default=math.nan)),
        of_peft=float(max(of_peft)),
    )


if __name__ == "__main__":
    main()
