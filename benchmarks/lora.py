"""How fast waves are that ask three weight sets: ``python -m benchmarks.lora [--hidden 96] [--layers 4] [--rank 16]``.

Whole weight sets, adapters over one base, and adapters merged into the model, side by side in one process: the same requests,
a third for each of policy, target and initial weights. Then greedy answers of adapters and of merged weights, and by how much
the log-probabilities of their tokens differ, from each other and from PEFT's. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.sync import build
from rllib_nlac import NLACConfig
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.learner.adapter import add_adapter
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.types import Request, Weights


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
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole = {name: tensor.clone() for name, tensor in served_state(model).items()}
        add_adapter(model, lora)
        with torch.no_grad():  # B is 0 in a new one
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        adapter = {name: tensor.clone() for name, tensor in served_state(model).items()}
        engines = {
            "whole sets": (VLLMEngine(folder, chat.max_context, [chat.end_id]), whole),
            "adapters": (VLLMEngine(folder, chat.max_context, [chat.end_id], lora=lora, merges_lora=False), adapter),
            "merged": (VLLMEngine(folder, chat.max_context, [chat.end_id], lora=lora, merges_lora=True), adapter),
        }
        engines["whole sets"][0].set_weights(Weights.INITIAL, 0, whole)
    prompt, sets = tuple(range(5, 69)), list(Weights)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    syncs: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(arguments.rounds + 1):
        asked = [
            Request((*prompt, 5 + i % 400), 24, 1.0, 1.0, i, logprobs=False, weights=sets[i % 3])
            for i in range(arguments.requests)
        ]
        for name, (engine, state) in engines.items():
            started = time.perf_counter()
            for which in (Weights.TARGET, Weights.POLICY):
                engine.set_weights(which, number, state)
            synced = time.perf_counter()
            answers = engine.generate(asked)
            if number:  # the first warms up
                syncs[name].append(synced - started)
                speeds[name].append(sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - synced))
    compare(engines["adapters"][0], engines["merged"][0], model, arguments.requests)
    print(f"{size:,} parameters, rank {arguments.rank}, {arguments.requests} requests a wave, a third under each of three sets")
    base = statistics.median(speeds["whole sets"])
    for name in engines:
        fast, sync = statistics.median(speeds[name]), statistics.median(syncs[name])
        spread = f"({min(speeds[name]):,.0f} to {max(speeds[name]):,.0f})"
        print(
            f"  {name:11} {fast:8,.0f} tokens/s {spread}   {fast / base:.2f} of whole sets   sync of both {sync * 1e3:7.1f} ms"
        )


def compare(adapters: VLLMEngine, merged: VLLMEngine, model: torch.nn.Module, count: int) -> None:
    """Prints how far greedy answers under the policy's adapter, served both ways, are from each other and from PEFT's."""
    asked = [Request((*range(5, 69), 5 + i % 400), 24, 0.0, seed=i) for i in range(count)]
    one, other = adapters.generate(asked), merged.generate(asked)
    same = sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))
    gap = max(float(abs(a.logprobs - b.logprobs).max()) for a, b in zip(one, other, strict=True) if a.token_ids == b.token_ids)
    of_peft = 0.0
    for answer in one[:32]:
        ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]])
        with torch.no_grad():
            own = model(input_ids=ids).logits[0, len(answer.prompt_ids) - 1 : -1].log_softmax(-1)
        found = own.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].numpy()
        of_peft = max(of_peft, float(abs(found - answer.logprobs).max()))
    tokens = sum(len(answer.token_ids) for answer in one)
    print(f"adapter against merged in float32: {same} of {count} greedy answers have the same tokens ({tokens:,}), whose")
    print(f"  log-probabilities differ by at most {gap:.1e}; from PEFT's own those of 32 answers by at most {of_peft:.1e}")


if __name__ == "__main__":
    main()
