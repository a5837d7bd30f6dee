"""A run of many processes, as small as it gets, and what is wrong with it after a fault."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import ray

from rllib_nlac import NLACConfig
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.types import Message, Request, Weights

EPISODES = 16
EVALUATION_EPISODES = 16


def small_config() -> NLACConfig:
    """Two EnvRunners, two engines, two learners and an evaluation EnvRunner, as small as they get."""
    return (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, episodes_per_iteration=EPISODES, num_cpus_per_env_runner=1)
        .engines(num_engines=2, engine_config={"cpu_kv_cache_gib": 0.25, "timeout_s": 300})
        .learners(num_learners=2)
        .training(lr=1e-3, train_batch_size_per_learner=48, minibatch_size=24)
        .evaluation(evaluation_num_env_runners=1, evaluation_interval=1, evaluation_duration=EVALUATION_EPISODES)
        .fault_tolerance(learner_timeout_s=300)
        .debugging(seed=0)
    )


def processes(algorithm: LanguageAlgorithm) -> dict[str, list[int]]:
    """Process ids by kind."""
    engines = [actor.__ray_call__.remote(lambda engine: os.getpid()) for actor in algorithm.engine._actors]  # type: ignore[attr-defined]
    runners = [
        group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False, timeout_seconds=60)
        for group in (algorithm.env_runner_group, algorithm.eval_env_runner_group)
    ]
    return {
        "EnvRunner": runners[0],
        "engine": ray.get(engines, timeout=300),
        "learner": on_every_learner(algorithm.learner_group, lambda learner: os.getpid()),
        "evaluation EnvRunner": runners[1],
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


def wrong_evaluation(result: dict) -> str:
    """What is wrong with an iteration's evaluation, or an empty string."""
    played = result["evaluation"]["env_runners"]["num_tasks"]
    return "" if played == EVALUATION_EPISODES else f"{played} evaluation episodes instead of {EVALUATION_EPISODES}"


def wrong_weights(algorithm: LanguageAlgorithm) -> str:
    """What is wrong with the weights that the engines serve, or an empty string."""
    prompt = algorithm.chat.prompt_ids((Message("user", "Guess my object."),))
    requests = [Request(prompt, 4, seed=seed) for seed in range(4)]  # some for each engine
    for weights in (Weights.TARGET, Weights.POLICY):
        answers = algorithm.engine.generate([replace(request, weights=weights) for request in requests])
        versions = {answer.weight_version for answer in answers}
        if versions != {algorithm.weight_version} or {answer.weights for answer in answers} != {weights}:
            return f"versions {versions} of the {weights} weights instead of {algorithm.weight_version}"
    prompts, ids = [answer.prompt_ids for answer in answers], [answer.token_ids for answer in answers]
    # As the algorithm itself asks its learners: one that was killed after its part of the iteration is missed here first.
    asked = lambda: on_every_learner(algorithm.learner_group, lambda learner: learner.logprobs_of(prompts, ids))  # noqa: E731
    own = algorithm._with_learners(asked)[0]
    gap = max(np.abs(mine - answer.logprobs).max() for mine, answer in zip(own, answers, strict=True))
    return "" if gap < 1e-3 else f"the policy's log-probabilities differ by {gap}"
