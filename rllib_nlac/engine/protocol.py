"""What every engine can do. Code that generates text knows this protocol and not the engine behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from rllib_nlac.engine.token_usage import TokenUsage
from rllib_nlac.types import Generation, Request, Weights


class EngineError(RuntimeError):
    """An engine failed, stalled, or did not take the weights it was given; the message holds the cause's text."""


class WeightsMissing(EngineError):
    """A restarted engine was asked before it had the current weights: send them and ask again."""


class Engine(Protocol):
    """Token prompts in, sampled ids with their weight version out, and with their log-probabilities where they are wanted.

    Attributes:
        num_restarts: How often a lost engine has been found to have started again.
    """

    num_restarts: int

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answers all requests, in their order, each under the weights that it names."""

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queues requests, each for the weights that it names, and returns their tickets."""

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        """Works on what is queued and returns the requests that have finished since the last call.

        Args:
            patience_s: Return after about so long even if none has finished; None waits for the first one.
        """

    def withdraw(self) -> None:
        """Gives up all that was submitted; nothing of it is answered any more."""

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        """Takes new weights, under their names in a checkpoint, and returns the checksum of what was taken."""

    def stop(self) -> None:
        """Frees what the engine holds."""


class LocalEngine(Engine, Protocol):
    """An engine in this process, built as ``LocalEngine(model, max_context, end_ids, settings, seed)``.

    With LoRA it is given two arguments more: ``lora``, what the adapters are, and ``merges_lora``, whether they are put into
    the model's own weights, or None where that is left to the engine.

    Attributes:
        Settings: The dataclass of its settings; its fields are the keys of ``engine_config``.
        mixes_sets: Whether requests under different weights may run at the same time.
        token_usage: Books each answer.
    """

    Settings: ClassVar[type]
    mixes_sets: bool
    token_usage: TokenUsage

    def __init__(self, model: str, max_context: int, end_ids: list[int], settings: Any, seed: int) -> None: ...

    def holds(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the policy's weights are these same objects."""
