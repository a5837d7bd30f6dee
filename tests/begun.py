"""Experiments that were begun, and their trials as Tune remembers them: for tests of what goes on with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune import CheckpointConfig

from rllib_nlac.command.experiment import Experiment


def kept_in(folder: Path, **what: Any) -> Experiment:
    """An experiment whose trials are in ``folder``."""
    config = {"env": "TwentyQuestions", **what.pop("config", {})}
    storage = {"storage_path": str(folder.parent)}
    return Experiment(folder.name, what.pop("run", "NLAC"), config, what.pop("stop", {}), {**storage, **what})


def begun_with(
    config: dict, stop: dict | None, restore: str | None = None, run: str = "NLAC", failures: int = 0, **checkpoints: Any
) -> SimpleNamespace:
    """A trial of it."""
    manager = SimpleNamespace(checkpoint_config=CheckpointConfig(**checkpoints))
    return SimpleNamespace(
        config={"env": "TwentyQuestions", **config},
        stopping_criterion=stop,
        path="/nowhere",
        restore_path=restore,
        trainable_name=run,
        max_failures=failures,
        run_metadata=SimpleNamespace(checkpoint_manager=manager),
    )
