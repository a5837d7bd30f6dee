"""Sampling speed beside bare vLLM, and the cost of a weight sync: ``python -m benchmarks.engine``.

All sides answer the same prompts with the same sampling parameters, turn about in one process, so that the ratio hardly
depends on what else the machine is doing. Prints a table; nothing is asserted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.figures import ENV_RUNNER, Figure, add_option, hand_over
from rllib_nlac import NLACConfig
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.vllm_engine import VLLMEngine, _uncompiled
from rllib_nlac.episode import GENERATION
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Generation, Request, Weights

HELD, BARE, SILENT = "bare, held", "bare vLLM", "bare, silent"
# Beside which of bare vLLM's ways each of ours stands: one that is asked for the same, and holds as many sequences.
BESIDE = {"EnvRunner": HELD, "engine": BARE, "waves": SILENT, HELD: HELD, BARE: BARE, SILENT: SILENT}


def bare_generate(engine: VLLMEngine, requests: list[Request], end_id: int, at_once: int | None = None) -> int:
    """What ``vllm.LLM.generate`` does for token prompts: add, step until all is done; returns the tokens. Log-probabilities are
    asked for where a request asks for them.

    Args:
        engine: Holds the vLLM engine.
        requests: What is asked, in this order.
        end_id: Ends an answer.
        at_once: So many sequences are held: as one is finished the next is added. None adds all at once.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm, waiting = engine._llm, iter(enumerate(requests))

    def add(count: int) -> None:
        for number, request in itertools.islice(waiting, count):
            params = SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                stop_token_ids=[end_id],
                logprobs=0 if request.logprobs else None,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm.add_request(f"bare-{number}", {"prompt_token_ids": list(request.prompt_ids)}, params)

    add(at_once or len(requests))
    tokens = 0
    while llm.has_unfinished_requests():
        with _uncompiled():
            finished = [len(output.outputs[0].token_ids) for output in llm.step() if output.finished]
        tokens += sum(finished)
        if finished:
            add(len(finished))
    return tokens


class Recorder:
    """Passes everything on to an engine and keeps the requests."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine, self.requests = engine, list[Request]()

    def submit(self, requests: list[Request]) -> list[int]:
        self.requests += requests
        return self.engine.submit(requests)

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        return self.engine.poll(patience_s)

    def withdraw(self) -> None:
        self.engine.withdraw()


def speed(work: Callable[[], int]) -> np.ndarray:
    """Tokens per second, and per second of this process's CPUs, of something that returns how many it generated."""
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = work()
    return tokens / np.array([time.perf_counter() - started, time.process_time() - cpu_started])


def speeds(
    config: NLACConfig, engine: VLLMEngine, end_id: int, episodes: int, rounds: int
) -> tuple[dict[str, list[np.ndarray]], list[Request]]:
    """All sides turn about, after a round that warms up.

    Args:
        config: Says in how many slots the EnvRunner plays.
        engine: What answers.
        end_id: Ends an answer.
        episodes: So many are played each round.
        rounds: How often.

    Returns:
        Of each side and round what ``speed`` gives, and the last round's requests.
    """
    runner, recorder = TextEnvRunner(config=config, worker_index=0), Recorder(engine)
    runner.attach(recorder)
    slots = config.num_envs_per_env_runner

    def play() -> int:
        played = runner.sample(num_episodes=episodes)
        return sum(len(g.token_ids) for episode in played for g in episode.get_extra_model_outputs(GENERATION))

    play()
    figures: dict[str, list[np.ndarray]] = {name: [] for name in BESIDE}
    requests: list[Request] = []
    for _ in range(rounds):
        recorder.requests.clear()
        figures["EnvRunner"].append(speed(play))
        requests = list(recorder.requests)
        figures["engine"].append(speed(lambda r=requests: sum(len(g.token_ids) for g in engine.generate(r))))
        silent = [replace(request, logprobs=False) for request in requests]
        figures["waves"].append(speed(lambda r=silent: sum(len(g.token_ids) for g in engine.generate(r))))
        figures[HELD].append(speed(lambda r=requests: bare_generate(engine, r, end_id, slots)))
        figures[BARE].append(speed(lambda r=requests: bare_generate(engine, r, end_id)))
        figures[SILENT].append(speed(lambda r=silent: bare_generate(engine, r, end_id)))
    return figures, requests


def logprobs_by(model: torch.nn.Module, answers: list[Generation]) -> list[np.ndarray]:
    """What a plain model says of each token that an engine sampled, where the model lies and in its precision."""
    found = []
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]], device=next(model.parameters()).device)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(answer.prompt_ids) - 1 : -1].float().log_softmax(-1)
        found.append(logits.gather(1, ids[0, len(answer.prompt_ids) :, None])[:, 0].cpu().numpy())
    return found


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_option(parser)
    return parser


def main() -> None:
    arguments = options().parse_args()
    config = (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
        .language(language_model=arguments.model)
        .env_runners(num_envs_per_env_runner=arguments.slots)
        .debugging(seed=0)
    )
    chat = Chat.from_pretrained(config.model_path)
    engine = VLLMEngine(config.model_path, chat.max_context, [chat.end_id])
    figures, requests = speeds(config, engine, chat.end_id, arguments.episodes, arguments.rounds)
    prompts = np.mean([len(request.prompt_ids) for request in requests])
    print(f"generated tokens/s on the {len(requests)} prompts (mean {prompts:.0f} tokens) of {arguments.episodes} episodes")
    for name, label in (
        ("EnvRunner", f"turn by turn in {arguments.slots} environment slots"),
        ("engine", "all prompts in one call"),
        ("waves", "the same without log-probabilities, as the language stages ask"),
        (HELD, f"the same prompts, {arguments.slots} held at once, LLMEngine.add_request and step"),
        (BARE, "all prompts at once"),
        (SILENT, "the same without log-probabilities"),
    ):
        ratios = np.array([mine / bare for mine, bare in zip(figures[name], figures[BESIDE[name]], strict=True)])
        (wall, cpu), (low, _), (high, _) = np.median(ratios, 0), ratios.min(0), ratios.max(0)
        print(
            f"  {name:12s} {np.median(figures[name], 0)[0]:7.0f}   to {BESIDE[name]:12s} {wall:.2f} ({low:.2f} to {high:.2f}), "
            f"by CPU time {cpu:.2f}   {label}"
        )
        if BESIDE[name] != name:
            goal = ENV_RUNNER if name == "EnvRunner" else ()
            what = f"{name} beside bare vLLM that is asked for the same and holds as many sequences"
            hand_over(arguments.figures, Figure(what, float(wall), "", *goal))

    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in served_state(model).items()}
    seconds, swaps = [], []
    for version in range(20):
        started = time.perf_counter()
        for which in (Weights.TARGET, Weights.POLICY):
            engine.set_weights(which, version, state)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        for which in (Weights.TARGET, Weights.POLICY):
            engine.generate([Request((5, 6, 7), 1, weights=which)])
        swaps.append((time.perf_counter() - started) / 2)
    size = sum(tensor.numel() for tensor in state.values())
    print(f"weight sync, both weight sets of {size:,} parameters, verified")
    print(f"  median            {statistics.median(seconds) * 1e3:8.1f} ms   (largest of 20: {max(seconds) * 1e3:.1f} ms)")
    print(f"  one for the other {statistics.median(swaps) * 1e3:8.1f} ms   as the language stages do between two waves")

    answers = engine.generate(requests[:64])
    gaps = [float(np.abs(own - a.logprobs).max()) for own, a in zip(logprobs_by(model, answers), answers, strict=True)]
    print(f"largest difference of a log-probability between engine and trainer: {max(gaps):.1e}")
    engine.stop()


if __name__ == "__main__":
    main()
