"""Natural Language Actor-Critic for Ray RLlib.

Importing this package registers ``NLAC``, its baselines and the environments with Tune, so that ``tune.Tuner("NLAC", ...)``
and ``rllib train`` know them by name. In the process of the ``rllib`` command that waits until ``load`` is called: torch,
Transformers and RLlib take some ten seconds to import, and a person should read something before.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from rllib_nlac.version import __version__

if TYPE_CHECKING:
    from rllib_nlac.envs.registry import register
    from rllib_nlac.nlac import NLAC, NLACConfig

__all__ = ["NLAC", "NLACConfig", "__version__", "load", "register"]


def load() -> None:
    """Imports everything and registers it with Tune; nothing happens where that is done."""
    if "NLAC" in globals():
        return
    from ray.tune.registry import register_trainable

    from rllib_nlac import algorithms
    from rllib_nlac.envs.builtin import register_all
    from rllib_nlac.envs.registry import register
    from rllib_nlac.nlac import NLAC, NLACConfig

    for name, algorithm in algorithms.OURS.items():
        register_trainable(name, algorithm)
    for algorithm in algorithms.STOCK_ON_TEXT.values():
        register_trainable(algorithm.__name__, algorithm)
    register_all()
    globals().update(NLAC=NLAC, NLACConfig=NLACConfig, register=register)


def __getattr__(name: str) -> Any:
    if name not in ("NLAC", "NLACConfig", "register"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load()
    return globals()[name]


def _is_the_command() -> bool:
    """Whether this process was started as ``rllib`` or as ``python -m rllib_nlac.command``."""
    started, words = sys.argv[0] if sys.argv else "", sys.orig_argv
    return os.path.basename(started) == "rllib" or (started == "-m" and "rllib_nlac.command" in words)


if not _is_the_command():
    load()
