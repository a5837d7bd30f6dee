"""Environments by name: what ``env: TwentyQuestions`` in a YAML file means, or ``env: my_module:MyEnvironment``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from ray.rllib.env.env_context import EnvContext
from ray.tune.registry import register_env as register_with_tune

from rllib_nlac.names import attribute_of, names_attribute, unknown_key

ENVIRONMENTS: dict[str, Callable[..., gym.Env]] = {}


def find(name: str) -> Callable[..., gym.Env]:
    """The factory of that name: a registered one, or what ``module:attribute`` names, which is then registered.

    Modules are looked for in the current directory too.

    Raises:
        ValueError: There is none; the nearest known name is given.
    """
    if name not in ENVIRONMENTS and names_attribute(name):
        factory = attribute_of(name, "environment", "my_module:MyEnvironment")
        register(name, factory)
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment: {unknown_key(name, ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def is_known(name: Any) -> bool:
    """Whether a name is one of a text environment; a module that it names is imported."""
    return isinstance(name, str) and (name in ENVIRONMENTS or (names_attribute(name) and find(name) is not None))


def make(name: str, config: dict[str, Any] | None = None) -> gym.Env:
    """Builds a registered environment from its ``env_config``.

    Raises:
        ValueError: The name or a key of the configuration is unknown; the nearest known one is named.
    """
    factory, config = find(name), dict(config or {})
    known = inspect.signature(factory).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
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
