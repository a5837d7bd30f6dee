"""An engine other than vLLM: Transformers, one token after the other. It shows how little an engine has to be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rllib_nlac.engine.protocol import LocalEngine
from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.token_usage import TokenUsage
from rllib_nlac.types import Generation, Request, Weights


@dataclass(frozen=True)
class PlainSettings:
    """Keys of ``engine_config``.

    Attributes:
        dtype: Precision of the weights.
    """

    dtype: str = "float32"


class PlainEngine(LocalEngine):
    """Answers each request by itself, with the weight set that it names."""

    Settings = PlainSettings
    mixes_sets = False

    def __init__(self, model: str, max_context: int, end_ids: list[int], settings: PlainSettings, seed: int) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype))
        self.end_ids, self.seed = set(end_ids), seed
        self.token_usage = TokenUsage()
        self.states: dict[Weights, Mapping[str, torch.Tensor]] = {}
        self.versions = dict.fromkeys(Weights, 0)
        self.tickets, self.queue = itertools.count(), list[tuple[int, Request]]()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return [self._answer(request) for request in requests]

    def submit(self, requests: Sequence[Request]) -> list[int]:
        tickets = [next(self.tickets) for _ in requests]
        self.queue += zip(tickets, requests, strict=True)
        return tickets

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        queue, self.queue = self.queue, []
        return [(ticket, self._answer(request)) for ticket, request in queue]

    def withdraw(self) -> None:
        self.queue.clear()

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        self.states[weights] = {name: tensor.to(self.lm.dtype, copy=True) for name, tensor in state.items()}
        self.versions[weights] = version
        return checksum(self.states[weights].values())

    def holds(self, state: Mapping[str, torch.Tensor]) -> bool:
        return False

    def stop(self) -> None:
        self.queue.clear()

    @torch.no_grad()
    def _answer(self, request: Request) -> Generation:
        self.lm.load_state_dict(self.states[request.weights], strict=False)
        rng = torch.Generator().manual_seed(self.seed if request.seed is None else request.seed)
        ids, logprobs = [], []
        while len(ids) < request.max_tokens and not self.end_ids & set(ids[-1:]):
            logits = self.lm(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1].float()
            known = torch.log_softmax(logits / max(request.temperature, 1e-6), dim=-1)
            ids.append(int(torch.multinomial(known.exp(), 1, generator=rng)))
            logprobs.append(float(known[ids[-1]]))
        finished = ids[-1] in self.end_ids
        told = np.array(logprobs if request.logprobs else [], np.float32)
        version = self.versions[request.weights]
        generation = Generation(request.prompt_ids, tuple(ids), told, finished, version, request.weights)
        self.token_usage.book(request, generation)
        return generation
