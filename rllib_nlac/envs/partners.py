"""Who else takes part in an episode: a simulated user, an oracle, an opponent. Each episode draws one of a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from rllib_nlac.envs.answers import MAX_NAME

Partner = TypeVar("Partner")


class Partners(Generic[Partner]):
    """What a key such as ``user`` configures: one partner, or a list of them, so that a policy does not fit a single one.

    Args:
        given: Settings of a partner, or a list of such. Each of a list may have a ``name``, under which success is reported;
            by default that is its model, function or kind.
        make: Makes a partner of its settings.
        key: Name of the key in ``env_config``.

    Attributes:
        current: Partner of the present episode.
        name: Name of that partner; empty where there is no choice.

    Raises:
        ValueError: The list is empty, an entry is no mapping, two have the same name, or ``make`` refuses one.
    """

    def __init__(self, given: Any, make: Callable[[Mapping[str, Any]], Partner], key: str) -> None:
        several = isinstance(given, (list, tuple))
        self._all: dict[str, Partner] = {}
        for each in given if several else [given or {}]:
            if not isinstance(each, Mapping):
                raise ValueError(f"env_config.{key} must be a mapping, or a list of mappings, and it has {each!r:.80}")
            settings = dict(each)
            own = settings.pop("name", None) if several else None
            usual = next((settings[k] for k in ("model", "function", "kind") if k in settings), "default")
            name = str(own or str(usual).rpartition("/")[2][:MAX_NAME])
            if "/" in name or len(name) > MAX_NAME or not name.isprintable():
                raise ValueError(
                    f"env_config.{key} has the name {name!r:.80}, which becomes a metric's: it may have "
                    f"{MAX_NAME} characters and no '/'"
                )
            if name in self._all:
                raise ValueError(f"env_config.{key} has two that are called {name!r:.80}: give each a name of its own")
            self._all[name] = make(settings)
        if not self._all:
            raise ValueError(f"env_config.{key} is an empty list: name at least one")
        self.name, self.current = "", next(iter(self._all.values()))

    @property
    def everybody(self) -> list[Partner]:
        """All partners, in the order of the list."""
        return list(self._all.values())

    def draw(self, rng: np.random.Generator) -> None:
        """Chooses the partner of an episode. A single one takes nothing from the generator."""
        if len(self._all) > 1:
            self.name, self.current = list(self._all.items())[int(rng.integers(len(self._all)))]
