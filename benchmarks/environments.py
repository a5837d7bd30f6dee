"""Is the environment side ever the bottleneck? ``python -m benchmarks.environments``

Prints how long an episode of each environment takes with its scripted expert, and how many environment steps a second the
EnvRunner makes when the engine costs nothing: 256 episodes across 64 slots, the answers taken from the expert.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from contextlib import suppress

import gymnasium as gym
import numpy as np

from benchmarks.figures import ENV_STEPS, EPISODE_MS, Figure, add_option, hand_over
from rllib_nlac import NLACConfig
from rllib_nlac.envs import registry
from rllib_nlac.envs.contract import play
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Generation, Request

WORLDS = {"TwentyQuestions": {}, "MathReasoning": {}, "ServiceDesk": {}, "TextArena": {}}
EPISODES, SLOTS = 256, 64


class FreeEngine:
    """Answers every request at once with the same generation, so that all the time measured is the EnvRunner's own."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._queue, self._next = generation, deque[int](), 0

    def submit(self, requests: list[Request]) -> list[int]:
        tickets = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        self._queue.extend(tickets)
        return tickets

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        tickets = list(self._queue)
        self._queue.clear()
        return [(ticket, self._generation) for ticket in tickets]

    def withdraw(self) -> None:
        self._queue.clear()


class Expert(gym.Wrapper):
    """Takes the expert's action, whatever the policy said."""

    def step(self, action: str):
        with suppress(NotImplementedError):
            action = self.env.unwrapped.expert_action()  # type: ignore[attr-defined]
        return self.env.step(action)


def episode_ms(name: str, count: int) -> np.ndarray:
    """Milliseconds of each of ``count`` scripted episodes."""
    env, times = registry.make(name, WORLDS[name]), []
    for seed in range(count):
        started = time.perf_counter()
        play(env, seed)
        times.append(1000 * (time.perf_counter() - started))
    return np.array(times)


def runner_steps(name: str) -> tuple[float, int]:
    """Environment steps per second of processor time of one EnvRunner, which runs on one core, and the steps made."""
    config = NLACConfig().environment(name)
    config.num_envs_per_env_runner = SLOTS
    runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: Expert(registry.make(name, WORLDS[name])))
    ids = runner.chat.encode("Is it big?")
    runner.attach(FreeEngine(Generation((1,), ids, np.zeros(len(ids), np.float32), True, 0)))  # type: ignore[arg-type]
    runner.sample(num_episodes=SLOTS)
    started = time.process_time()
    steps = sum(len(episode) for episode in runner.sample(num_episodes=EPISODES))
    return steps / (time.process_time() - started), steps


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200, help="scripted episodes of each environment")
    add_option(parser)
    return parser


def main() -> None:
    """Prints both tables."""
    arguments = options().parse_args()
    print("scripted episode, milliseconds")
    for name in WORLDS:
        times = episode_ms(name, arguments.episodes)
        late = np.percentile(times, 95)
        print(f"  {name:<16} median {np.median(times):6.2f}   95th percentile {late:6.2f}   largest {times.max():6.2f}")
        hand_over(arguments.figures, Figure(f"{name}, scripted episode", float(np.median(times)), "ms", *EPISODE_MS))
    print(f"EnvRunner with an engine that costs nothing, {EPISODES} episodes across {SLOTS} slots")
    for name in WORLDS:
        rate, steps = runner_steps(name)
        print(f"  {name:<16} {rate:8.0f} environment steps a second of one core ({steps} steps)")
        hand_over(arguments.figures, Figure(f"{name}, EnvRunner with a free engine, of one core", rate, "steps/s", *ENV_STEPS))


if __name__ == "__main__":
    main()
