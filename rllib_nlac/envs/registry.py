"""Environments by name: what ``env: TwentyQuestions`` in a YAML file means, or ``env: my_module:MyEnvironment``."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from ray.rllib.env.env_context import EnvContext
from ray.tune.registry import register_env as register_with_tune

from rllib_nlac.envs.adapters.gymnasium_text import GymnasiumText
from rllib_nlac.envs.adapters.tau2_bench import Tau2Bench
from rllib_nlac.envs.adapters.tau_bench import TauBench
from rllib_nlac.envs.adapters.text_arena import TextArena
from rllib_nlac.envs.logged import LoggedDialogues
from rllib_nlac.envs.math_reasoning import MathReasoning
from rllib_nlac.envs.service_desk.env import ServiceDesk
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.names import unknown_key

_OURS = (
    TwentyQuestions, TextHouse, MathReasoning, ServiceDesk, TaskSet, TextArena, TauBench, Tau2Bench, GymnasiumText,
    LoggedDialogues,
)  # fmt: skip
ENVIRONMENTS: dict[str, Callable[..., gym.Env]] = {environment.__name__: environment for environment in _OURS}


def find(name: str) -> Callable[..., gym.Env]:
    """The factory of that name: a registered one, or what ``module:attribute`` names, which is then registered.

    Modules are looked for in the current directory too.

    Raises:
        ValueError: There is none; the nearest known name is given.
    """
    if name not in ENVIRONMENTS and _names_attribute(name):
        module, _, attribute = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"environment {name!r}: {error}; it must read as in 'my_module:MyEnvironment'") from error
        register(name, factory)
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment: {unknown_key(name, ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def is_known(name: Any) -> bool:
    """Whether a name is one of a text environment; a module that it names is imported."""
    return isinstance(name, str) and (name in ENVIRONMENTS or (_names_attribute(name) and find(name) is not None))


def _names_attribute(name: str) -> bool:
    """Whether a name reads as ``module:attribute``; gymnasium's ids, as "module:Name-v0", do not."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


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


def register_all() -> None:
    """Registers every environment of this package with Tune."""
    for name, factory in list(ENVIRONMENTS.items()):
        register(name, factory)
