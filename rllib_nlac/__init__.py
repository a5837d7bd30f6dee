"""Natural Language Actor-Critic for Ray RLlib.

The first use of a name of this package, as in ``from rllib_nlac import NLACConfig``, registers ``NLAC``, its baselines and the
environments with Tune, so that ``tune.Tuner("NLAC", ...)`` knows them by name. ``load`` does the same. ``import rllib_nlac``
alone imports nothing else: torch, Transformers and RLlib take some ten seconds, and the ``rllib`` command prints a line before.
"""

from __future__ import annotations

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
    from rllib_nlac.envs.registry import register
    from rllib_nlac.nlac import NLAC, NLACConfig

    for name, algorithm in algorithms.OURS.items():
        register_trainable(name, algorithm)
    for algorithm in algorithms.STOCK_ON_TEXT.values():
        register_trainable(algorithm.__name__, algorithm)
    globals().update(NLAC=NLAC, NLACConfig=NLACConfig, register=register)


def __getattr__(name: str) -> Any:
    if name not in ("NLAC", "NLACConfig", "register"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load()
    return globals()[name]
