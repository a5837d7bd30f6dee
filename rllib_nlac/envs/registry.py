"""Environments by name: what ``env: TwentyQuestions`` in a YAML file means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from ray.rllib.env.env_context import EnvContext
from ray.tune.registry import register_env as register_with_tune

from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.names import unknown_key

ENVIRONMENTS: dict[str, Callable[..., gym.Env]] = {"TwentyQuestions": TwentyQuestions}


def make(name: str, config: dict[str, Any] | None = None) -> gym.Env:
    """Builds a registered environment from its ``env_config``.

    Raises:
        ValueError: The name or a key of the configuration is unknown; the nearest known one is named.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment: {unknown_key(name, ENVIRONMENTS)}")
    factory, config = ENVIRONMENTS[name], dict(config or {})
    known = inspect.signature(factory).parameters
    for key in config:
        if key not in known:
            raise ValueError(f"env_config of {name}: {unknown_key(key, known)}")
    return factory(**config)


def register(name: str, factory: Callable[..., gym.Env]) -> None:
    """Makes an environment known by name, to Tune and to the ``rllib`` command.

    Args:
        name: The name in ``env:``.
        factory: Takes the keys of ``env_config`` as keyword arguments and returns the environment.
    """
    ENVIRONMENTS[name] = factory

    def create(context: EnvContext) -> gym.Env:
        # The registry is looked up by the process that creates, so a pickled creator brings its factory along.
        ENVIRONMENTS.setdefault(name, factory)
        return make(name, dict(context))

    register_with_tune(name, create)


def register_all() -> None:
    """Registers every environment of this package with Tune."""
    for name, factory in list(ENVIRONMENTS.items()):
        register(name, factory)
