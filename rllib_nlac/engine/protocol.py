"""What every engine can do. Code that generates text knows this protocol and not the engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import ray
import torch

from rllib_nlac.engine.token_usage import Tokens, TokenUsage
from rllib_nlac.engine.weight_transfer import Delivery, Sent
from rllib_nlac.types import Generation, Request, Weights


class EngineError(RuntimeError):
    """An engine failed, stalled, or did not take the weights it was given; the message holds the cause's text."""


class WeightsMissing(EngineError):
    """A restarted engine was asked before it had the current weights: send them and ask again."""


class HandOver(StrEnum):
    """What the first learner does with its weights for an engine."""

    COPIES = "copies"
    LENDS = "lends them, until the engine has taken them"
    PUTS = "puts them into the store"
    KEEPS = "keeps them until they are sent"


@dataclass(frozen=True)
class Handed:
    """One weight set as the first learner hands it over.

    Attributes:
        state: Tensors by their names in a checkpoint, or the reference that Ray's object store has them under; None where the
            learner keeps them until they are sent.
        checksum: Checksum of the tensors.
        num_bytes: Size of the tensors.
        send: Has the learner send them by vLLM's weight transfer; without a delivery it only puts them into the store.
        lent: Whether another process holds the tensors, so that they are lost when it ends.
    """

    state: Any
    checksum: int
    num_bytes: int
    send: Callable[[Delivery | None], Sent] | None = None
    lent: bool = False


class Engine(Protocol):
    """Token prompts in, sampled ids with their weight version out, and with their log-probabilities where they are wanted.

    Attributes:
        num_restarts: How often a lost engine has been found to have started again.
        takes: How a learner in the same process hands its weights over.
    """

    num_restarts: int = 0

    @property
    def takes(self) -> HandOver:
        return HandOver.COPIES

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

    def take(self, weights: Weights, version: int, handed: Handed) -> int:
        """As ``set_weights``, of what the learner hands over."""
        state = ray.get(handed.state) if isinstance(handed.state, ray.ObjectRef) else handed.state
        assert state is not None, "only engines that take part in vLLM's weight transfer are sent weights"
        return self.set_weights(weights, version, state)

    def tokens_so_far(self) -> list[dict[str, Tokens]]:
        """Tokens of each engine since its start, by role; empty where one does not answer at once."""

    def seconds_rested(self) -> list[float] | None:
        """Idle seconds of each engine since its start, empty where one does not answer at once; None: nobody counts them."""
        return None

    def stop(self) -> None:
        """Frees what the engine holds."""


class LocalEngine(Engine, Protocol):
    """An engine in this process, built as ``LocalEngine(model, max_context, end_ids, settings, seed)``.

    It samples none of the ids that a padded vocabulary has beyond the tokenizer's, and gives them no probability.

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

    def tokens_so_far(self) -> list[dict[str, Tokens]]:
        return [self.token_usage.so_far()]

    def holds(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the policy's weights are these same objects."""
