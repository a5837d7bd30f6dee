"""What every engine can do. Whoever generates text knows this protocol and never which engine is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rllib_nlac.types import Generation, Request, Weights


class EngineError(RuntimeError):
    """An engine failed, stalled, or did not take the weights it was given; the message holds the cause's text."""


class WeightsMissing(EngineError):
    """An engine that has started again was asked before it had the current weights; give them to it and ask again."""


class Engine(Protocol):
    """Token prompts in, sampled ids with their log-probabilities and weight version out."""

    def generate(self, requests: Sequence[Request], weights: Weights = Weights.POLICY) -> list[Generation]:
        """Answers all requests, in their order."""

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queues requests for the policy's weights and returns their tickets."""

    def poll(self) -> list[tuple[int, Generation]]:
        """Works on what is queued and returns the requests that have finished since the last call.

        Blocks until at least one has, unless nothing is queued.
        """

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        """Takes new weights, under their Hugging Face names, and returns the checksum of what now serves."""

    def stop(self) -> None:
        """Frees what the engine holds."""
