"""Sampling speed beside bare vLLM, and the cost of a weight sync: ``python -m benchmarks.engine``.

Both sides answer the same prompts with the same sampling parameters, turn about in one process, so that the ratio does
not depend on what else the machine is doing. Prints a table; nothing is asserted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rllib_nlac import NLACConfig
from rllib_nlac.learner.rl_module import trainable_state
from rllib_nlac.sampling.chat import Chat
from rllib_nlac.sampling.vllm_engine import VLLMEngine
from rllib_nlac.tiny.build import make_corpus
from rllib_nlac.types import Request, Weights


def bare_generate(engine: VLLMEngine, requests: list[Request], end_id: int) -> int:
    """What ``vllm.LLM.generate`` does for token prompts: add everything, step until all is done; returns the tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine._llm
    for number, request in enumerate(requests):
        params = SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed, stop_token_ids=[end_id],
            logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.add_request(f"bare-{number}", {"prompt_token_ids": list(request.prompt_ids)}, params)
    tokens = 0
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step() if output.finished)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=NLACConfig().model_path)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chat = Chat.from_pretrained(arguments.model)
    engine = VLLMEngine(arguments.model, chat.max_context, [chat.end_id])
    examples = itertools.islice((e for e in make_corpus(7) if e.role in ("policy", "predict", "evaluate")), arguments.requests)
    prompts = [chat.prompt_ids(example.prompt) for example in examples]

    def requests(seed: int) -> list[Request]:
        return [Request(prompt, 32, seed=seed * 100_000 + i) for i, prompt in enumerate(prompts)]

    engine.generate(requests(999))
    ours, bare = [], []
    for number in range(arguments.rounds):
        started = time.perf_counter()
        tokens = sum(len(generation.token_ids) for generation in engine.generate(requests(number)))
        ours.append(tokens / (time.perf_counter() - started))
        started = time.perf_counter()
        tokens = bare_generate(engine, requests(number), chat.end_id)
        bare.append(tokens / (time.perf_counter() - started))
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    print(f"sampling, {len(prompts)} prompts of {np.mean([len(p) for p in prompts]):.0f} tokens")
    print(f"  this package      {statistics.median(ours):8.0f} generated tokens/s")
    print(f"  bare vLLM         {statistics.median(bare):8.0f} generated tokens/s")
    print(
        f"  ratio             {statistics.median(ratios):8.2f}   "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)"
    )

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in trainable_state(model).items()}
    seconds = []
    for version in range(20):
        started = time.perf_counter()
        for which in (Weights.TARGET, Weights.POLICY):
            engine.set_weights(which, version, state)
        seconds.append(time.perf_counter() - started)
    size = sum(tensor.numel() for tensor in state.values())
    print(f"weight sync, both weight sets of {size:,} parameters, verified")
    print(f"  median            {statistics.median(seconds) * 1e3:8.1f} ms   (largest of 20: {max(seconds) * 1e3:.1f} ms)")

    gaps = []
    for generation in engine.generate(requests(5)[:64]):
        ids = torch.tensor([[*generation.prompt_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(generation.prompt_ids) - 1 : -1].log_softmax(-1)
        own = logits.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].numpy()
        gaps.append(float(np.abs(own - generation.logprobs).max()))
    print(f"largest difference of a log-probability between engine and trainer: {max(gaps):.1e}")
    engine.stop()


if __name__ == "__main__":
    main()
