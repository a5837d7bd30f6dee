"""From a specification to an engine: one in this process, or a group of Ray actors behind the same protocol.

To add an engine, write a class that follows ``LocalEngine`` and add a line to ``ENGINES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import ray

from rllib_nlac.engine.actor import EngineActor
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.endpoint_engine import EndpointEngine
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.places import reserved
from rllib_nlac.engine.protocol import Engine, LocalEngine
from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.engine.vllm_structure import THINKING

ENGINES: dict[str, type[LocalEngine]] = {"vllm": VLLMEngine}
MERGES_LORA = {"auto": None, "adapter": False, "merged": True}  # by what ``lora_serving`` says
_shared: WeakValueDictionary[str, LocalEngine] = WeakValueDictionary()


@dataclass(frozen=True)
class EngineKeys:
    """What ``engine_config`` says of any engine; its other keys are the fields of the engine's own settings.

    Attributes:
        engine: A name of ``ENGINES``.
        timeout_s: Seconds without an answer after which an engine actor counts as stalled, and the run ends. A wave may take
            longer, as long as some of its answers come.
        lora_serving: "adapter" keeps base and adapters apart and answers all weight sets in one batch; "merged" puts each set
            into the model, which decodes faster, and swaps sets; "auto" merges on a CPU alone.
    """

    engine: str = "vllm"
    timeout_s: float = 600.0
    lora_serving: str = "auto"


@dataclass(frozen=True)
class EngineSpec:
    """All that an engine is made from; the configuration fills it in.

    Attributes:
        kind: A name of ``ENGINES``.
        model: A Hugging Face folder or name.
        settings: The engine's own, see its class.
        seed: Seeds requests that bring no seed of their own.
        num_engines: 0 for one in this process, otherwise so many Ray actors.
        num_gpus_per_engine: GPUs of each actor.
        timeout_s: After so long without an answer an actor counts as stalled.
        lora: What the adapters are; None where weight sets are whole models.
        merges_lora: Whether an adapter is put into the model's own weights; None leaves it to the engine.
        transfer: Backend of vLLM's weight transfer to the actors, "nccl" or "ipc"; "" where there is none.
        endpoint: Arguments of ``EndpointEngine``, which then answers in the place of all this.
    """

    model: str
    settings: Any
    kind: str = "vllm"
    seed: int = 0
    num_engines: int = 0
    num_gpus_per_engine: float = 0
    timeout_s: float = 600.0
    lora: LoRASettings | None = None
    merges_lora: bool | None = None
    transfer: str = ""
    endpoint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        """What an actor takes on one node, for all of the engine's tensor-parallel workers."""
        return {"CPU": 1, "GPU": self.num_gpus_per_engine}

    def maker(self, chat: Chat) -> partial[LocalEngine]:
        """What builds one engine, in whichever process it is called."""
        settings = self.settings
        if getattr(settings, "reasoning_parser", None) == "auto" and chat.thinks:
            settings = replace(settings, reasoning_parser=THINKING)
        make = partial(ENGINES[self.kind], self.model, chat.max_context, list(chat.end_ids), settings, self.seed)
        if self.lora is not None:
            return partial(make, lora=self.lora, merges_lora=self.merges_lora)
        return partial(make, transfer=self.transfer) if self.transfer else make


def local_engine(spec: EngineSpec, chat: Chat) -> LocalEngine:
    """An engine in this process, shared by all that ask for the same one, such as the runners of training and evaluation.

    Ask ``holds`` before generating: another caller may have put its own weights in.
    """
    name = repr((spec.kind, spec.model, chat.max_context, chat.end_ids, spec.settings, spec.lora, spec.merges_lora))
    engine = _shared.get(name)
    if engine is None:
        _shared[name] = engine = spec.maker(chat)()
    return engine


def make_engine(spec: EngineSpec, chat: Chat) -> Engine:
    """An algorithm's own engine: in its process with ``num_engines=0``, otherwise Ray actors; or an endpoint."""
    if spec.endpoint:
        return EndpointEngine(chat, **spec.endpoint)
    make = spec.maker(chat)
    if spec.num_engines == 0:
        return make()
    # Ray starts a lost actor again and repeats the calls that it had not answered: callers only see a delay.
    takes = {"num_cpus": spec.bundle["CPU"], "num_gpus": spec.bundle["GPU"]}
    actor = ray.remote(max_concurrency=1000, max_restarts=-1, max_task_retries=-1, **takes)(EngineActor)
    actors = [actor.options(placement_group_bundle_index=i).remote(make) for i in reserved(spec.num_engines, 0, spec.bundle)]
    workers = getattr(spec.settings, "tensor_parallel_size", 1)
    return RemoteEngines(actors, spec.timeout_s, transfer=spec.transfer, workers=workers)
