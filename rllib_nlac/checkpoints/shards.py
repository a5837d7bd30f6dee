"""How the optimizer is divided among learners: what a manifest says of it, and the parts beside RLlib's own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_nlac.checkpoints.manifest import CheckpointError
from rllib_nlac.learner.deepspeed import read_shard
from rllib_nlac.learner.group import index_of, on_every_learner

SHARDS = "learner_shards"  # folder of the learners' parts, where each learner has one


def is_divided(config: Any) -> bool:
    """Whether each learner has a part of the optimizer that no other has."""
    return config.zero_stage > 0 and config.num_learners > 1


def shard_facts(config: Any) -> dict[str, Any]:
    """What a manifest says of the optimizer of a run."""
    return {
        "num_learners": config.num_learners if is_divided(config) else 1,
        "zero_stage": config.zero_stage,
        "dtype": "bfloat16" if config.deepspeed_settings.get("bf16", {}).get("enabled") else "float32",
    }


def check_shards(name: str, had: Any, now: Any) -> None:
    """Refuses the optimizer of a checkpoint before anything of it is restored: DeepSpeed takes over weights before it fails.

    Args:
        name: The checkpoint's.
        had: What its manifest says.
        now: The ``shard_facts`` of this run, None where its algorithm has none.

    Raises:
        CheckpointError: It was divided in another way, or has another precision.
    """
    had, now = (each if isinstance(each, dict) else {} for each in (had, now))
    if any(_kind(key, had.get(key)) != _kind(key, now.get(key)) for key in had.keys() | now.keys()):
        raise CheckpointError(
            f"{name} holds the optimizer {_division(had)}, and this run has it {_division(now)}: restore it with the former "
            "settings, or export the model and start from that"
        )


def save_shards(group: LearnerGroup, folder: Path) -> None:
    """Writes the learners' parts, where each has one."""
    for rank, shard in enumerate(on_every_learner(group, _shard)):
        if shard is not None:
            (folder / SHARDS).mkdir(exist_ok=True)
            torch.save(shard, folder / SHARDS / f"{rank:05d}.pt")


def load_shards(group: LearnerGroup, folder: Path) -> None:
    """Gives each learner its part of a checkpoint that has such parts."""
    shards = [ray.put(read_shard(file)) for file in sorted((folder / SHARDS).glob("*.pt"))]
    if shards:
        on_every_learner(group, lambda learner: learner.set_shard(ray.get(shards[index_of(learner)])))


def _kind(key: str, value: Any) -> Any:
    """ZeRO 1 and 2 divide the same."""
    return 2 if key == "zero_stage" and value == 1 else value


def _division(shards: Mapping[str, Any]) -> str:
    return f"under ZeRO {shards.get('zero_stage')} in {shards.get('num_learners')} shard(s) of {shards.get('dtype')}"


def _shard(learner: Any) -> dict[str, Any] | None:
    return learner.get_shard()
