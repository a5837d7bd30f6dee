"""Kills processes with SIGKILL at random moments of a run, and says what the run made of it.

    python -m benchmarks.faults [--kills 10]

An EnvRunner, an engine or a learner is lost ``--kills`` times each, in random order. A kill is survived when the iteration
during which it happened ends with all its episodes collected, a gradient step made, and engines whose log-probabilities are
the learner's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections import Counter

import ray

from rllib_nlac import NLACConfig
from rllib_nlac.algorithm import LanguageAlgorithm
from rllib_nlac.learner.group import on_every_learner

EPISODES = 16
KINDS = ("EnvRunner", "engine", "learner")


def small_config() -> NLACConfig:
    """Two EnvRunners, two engines and two learners, as small as they get."""
    return (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
        .language(language_model="tiny", prompts="compact", max_action_tokens=12)
        .roles(max_future_tokens=24, max_critique_tokens=32)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, episodes_per_iteration=EPISODES, num_cpus_per_env_runner=1)
        .engines(num_engines=2, engine_config={"cpu_kv_cache_gib": 0.25}, engine_timeout_s=300)
        .learners(num_learners=2)
        .training(lr=1e-3, train_batch_size_per_learner=48, minibatch_size=24)
        .debugging(seed=0)
    )


def processes(algorithm: LanguageAlgorithm) -> dict[str, list[int]]:
    """Process ids by kind."""
    engines = [actor.__ray_call__.remote(lambda engine: os.getpid()) for actor in algorithm.engine._actors]
    return {
        "EnvRunner": algorithm.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False),
        "engine": ray.get(engines),
        "learner": on_every_learner(algorithm.learner_group, lambda learner: os.getpid()),
    }


def verdict(result: dict, episodes_before: int) -> str:
    """What is wrong with an iteration's result, or an empty string."""
    if result["env_runners"]["num_episodes_lifetime"] != episodes_before + EPISODES:
        return f"{result['env_runners']['num_episodes_lifetime'] - episodes_before} episodes instead of {EPISODES}"
    if result["learners"]["default_policy"]["num_gradient_steps"] < 1:
        return "no gradient step"
    if not result["logprob_gap"] < 1e-3:
        return f"engines and learner differ by {result['logprob_gap']}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="how often each kind of process is killed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    algorithm: LanguageAlgorithm = small_config().build_algo()  # type: ignore[assignment]
    result = algorithm.train()
    kinds = [kind for kind in KINDS for _ in range(arguments.kills)]
    rng.shuffle(kinds)
    survived: Counter[str] = Counter()
    started = time.monotonic()
    result = algorithm.train()
    seconds = 2 * (time.monotonic() - started)
    for number, kind in enumerate(kinds, start=1):
        before = int(result["env_runners"]["num_episodes_lifetime"])
        victim = rng.choice(processes(algorithm)[kind])
        killed = threading.Timer(rng.uniform(0, seconds), os.kill, (victim, signal.SIGKILL))
        started = time.monotonic()
        killed.start()
        troubles = []
        while True:
            over = killed.finished.is_set()  # the iteration after the kill is judged too
            result = algorithm.train()
            troubles.append(verdict(result, before))
            before = int(result["env_runners"]["num_episodes_lifetime"])
            if over:
                break
        trouble = next(filter(None, troubles), "")
        survived[kind] += not trouble
        print(
            f"{number:3d} {kind:10s} {trouble or 'survived':40s} {time.monotonic() - started:6.1f} s",
            flush=True,
        )
    print({key: int(result["faults"][key]) for key in result["faults"]}, dict(result["fault_tolerance"]))
    for kind in KINDS:
        print(f"{kind}: {survived[kind]} of {arguments.kills} kills survived")
    buffer = algorithm.local_replay_buffer.get_num_episodes()  # type: ignore[attr-defined]
    print(f"replay buffer: {buffer} episodes of {int(result['env_runners']['num_episodes_lifetime'])} collected")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
