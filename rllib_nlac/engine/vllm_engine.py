"""vLLM behind the engine protocol. Its private seams are here and in ``vllm_worker``, pinned by ``tests/compatibility``."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rllib_nlac.activity import ANSWERS, activity
from rllib_nlac.engine.chat import check_model_path
from rllib_nlac.engine.lora import LoRASettings, as_served, merged
from rllib_nlac.engine.model_folder import num_ids, precision
from rllib_nlac.engine.places import alone_on_shared_gpu, has_gpu
from rllib_nlac.engine.protocol import EngineError, HandOver, LocalEngine
from rllib_nlac.engine.shared import checksum
from rllib_nlac.engine.token_usage import TokenUsage
from rllib_nlac.engine.vllm_settings import BATCHED_TOKENS, CPU_BLOCK, VLLMSettings
from rllib_nlac.engine.vllm_structure import THINKING, register_thinking, structure, why_not
from rllib_nlac.types import Generation, Request, Weights

logger = logging.getLogger(__name__)

ADAPTERS = {Weights.POLICY: 1, Weights.TARGET: 2}  # vLLM's numbers of them; the initial weights are the base


class VLLMEngine(LocalEngine):
    """An in-process vLLM engine with several sets of weights.

    Of whole sets one serves at a time. Adapters over one base answer in one batch, and the base itself is the initial set.

    Args:
        model: A Hugging Face folder or name.
        max_context: The most tokens of a prompt and its answer.
        end_ids: Token ids that end a turn.
        settings: How vLLM is started.
        seed: Seeds the requests that bring none of their own.
        lora: What the adapters are; None where a set is a whole model.
        merges_lora: Whether an adapter is put into the model's own weights, and its set then serves as a whole one; None does
            so on a CPU, where adapters decode at a sixth of the speed.
        transfer: Backend of vLLM's weight transfer, "nccl" or "ipc"; "" where weights come by ``set_weights`` alone.

    Raises:
        FileNotFoundError: The model folder does not exist.
        EngineError: There is no GPU, and vLLM is not the build for a CPU.
    """

    Settings: ClassVar[type] = VLLMSettings

    def __init__(
        self,
        model: str,
        max_context: int,
        end_ids: Sequence[int],
        settings: VLLMSettings | None = None,
        seed: int = 0,
        lora: LoRASettings | None = None,
        merges_lora: bool | None = None,
        transfer: str = "",
    ) -> None:
        check_model_path(model)
        settings = settings or VLLMSettings()
        self._on_gpu = on_gpu = has_gpu()
        # One process: with two cores, and for small models on any machine, vLLM's own worker process costs more than it
        # brings, and weights could not be handed over by reference.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        extra = dict(settings.extra or {})
        if settings.tensor_parallel_size > 1:
            # In an actor of a Tune trial vLLM would look for GPUs of its own in the trial's placement group, one a bundle.
            extra.setdefault("distributed_executor_backend", "mp")
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the learner needs the same cores
            extra.setdefault("kv_cache_memory_bytes", int(settings.cpu_kv_cache_gib * 2**30))
            # A seeded request whose prefill is cut in two makes vLLM rewind its generator, which a CPU's cannot.
            extra.setdefault("enable_chunked_prefill", False)
            extra.setdefault("block_size", CPU_BLOCK)
        extra.setdefault("max_num_batched_tokens", max(BATCHED_TOKENS, max_context))  # built this way vLLM reads 2,048
        extra.setdefault("structured_outputs_config", {"backend": "xgrammar"})
        if transfer:
            extra["weight_transfer_config"] = {"backend": transfer}
        parser = settings.reasoning_parser
        if parser == THINKING:
            register_thinking()
        extra.setdefault("reasoning_parser", "" if parser == "auto" else parser)
        self._lora = lora
        if merges_lora is None:
            merges_lora = not on_gpu
        self.mixes_sets = lora is not None and not merges_lora
        if self.mixes_sets:
            assert lora is not None
            # An adapter that had to make room for another would be looked for on the disk. On a CPU a request without one
            # reads the last slot when its batch has others with one, so that slot stays empty.
            slots = len(ADAPTERS) + (not on_gpu)
            extra |= {"enable_lora": True, "max_lora_rank": lora.served_rank, "max_loras": slots, "max_cpu_loras": slots}
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        if not on_gpu and not current_platform.is_cpu():
            raise EngineError(
                "vLLM's build here is not for a CPU, and this process has no GPU: give it one (num_gpus_per_learner: 1; with "
                "num_engines num_gpus_per_engine: 1; under PPO num_gpus_per_learner: 1 and num_env_runners: 0, or "
                "num_gpus_per_env_runner: 1), or install the extra cpu, not gpu"
            )
        _keep_process_groups()
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        arguments = EngineArgs(
            model=model,
            max_model_len=max_context,
            dtype=precision(model, settings.dtype, on_gpu),
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enforce_eager=settings.enforce_eager or not on_gpu,
            enable_prefix_caching=settings.enable_prefix_caching,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            worker_extension_cls="rllib_nlac.engine.vllm_worker.WorkerExtension",
            seed=seed,
            **extra,
        )
        with alone_on_shared_gpu():
            self._llm: Any = LLMEngine.from_engine_args(arguments)
        model_config = self._llm.vllm_config.model_config
        if (known := num_ids(model)) and known < model_config.get_vocab_size():
            self._llm.collective_rpc("keep_ids", args=(known,))
        # The CPU worker replaces torch.set_num_threads by a function that does nothing.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        self._base: dict[str, torch.Tensor] = _parameters(model) if lora is not None and merges_lora else {}
        self._end_ids = list(end_ids)
        kv_heads = model_config.get_total_num_kv_heads()
        self._verifiable = settings.tensor_parallel_size <= max(kv_heads, 1)
        self._policy_state: Mapping[str, torch.Tensor] | None = None
        self._checksums: dict[Weights, int] = {}  # of what vLLM's model serves, in its own precision
        self._versions = dict.fromkeys(Weights, 0)
        self._given = dict.fromkeys(Weights, 0)  # how often each was
        # Of whole sets the one that serves; None: nobody's, since a change of weights failed.
        self._serving: Weights | None = None if self.mixes_sets else Weights.POLICY
        self._pending: dict[str, Request] = {}
        self._next_ticket = 0
        self.token_usage = TokenUsage()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        answers: dict[int, Generation] = {}
        for weights in [None] if self.mixes_sets else sorted({request.weights for request in requests}):
            places = [i for i, request in enumerate(requests) if weights in (None, request.weights)]
            tickets = self.submit([requests[i] for i in places])
            place_of = dict(zip(tickets, places, strict=True))
            try:
                while place_of:
                    finished = self.poll()
                    activity.advance(ANSWERS, len(finished))
                    answers |= {place_of.pop(ticket): generation for ticket, generation in finished}
            except BaseException:  # Ctrl-C too: who goes on in the same process finds an idle engine
                self.withdraw()
                raise
        return [answers[i] for i in range(len(requests))]

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queues requests and returns their tickets; of whole weight sets all must name the same."""
        for weights in {request.weights for request in requests}:
            self._serve(weights)
        return self._enqueue(requests)

    def poll(self, patience_s: float | None = None) -> list[tuple[int, Generation]]:
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        while self._pending:
            with _uncompiled():
                outputs = self._llm.step()
            finished = [self._read(output) for output in outputs if output.finished]
            if finished or time.monotonic() > until:
                return finished
        return []

    def withdraw(self) -> None:
        given_up, self._pending = list(self._pending), {}
        self._llm.abort_request(given_up)

    def set_weights(self, weights: Weights, version: int, state: Mapping[str, torch.Tensor]) -> int:
        """Takes new weights; vLLM's model is compared with them before anything is generated.

        The engine may keep the state as it is, so nobody changes it afterwards; one that is lent them has made copies.

        Raises:
            EngineError: Requests are under way, or the model does not serve the new weights afterwards.
        """
        self._expect(weights, version)
        if self._lora is None:
            received = self._take_whole(weights, state)
        else:
            received = checksum(state.values())
            if self.mixes_sets:
                self._take_adapter(weights, state)
            else:
                dtype = self._llm.vllm_config.model_config.dtype
                self._take_whole(weights, merged(self._base, state, self._lora.scale, dtype))
        if weights is Weights.POLICY and not any(tensor.is_cuda for tensor in state.values()):
            self._policy_state = state  # what is on a GPU is the learner's own and changes
        return received

    def join_transfer(self, init_info: dict[str, Any]) -> None:
        """Connects the workers with a trainer's end of vLLM's weight transfer.

        Raises:
            EngineError: A worker could not be connected.
        """
        if fault := next(filter(None, self._llm.collective_rpc("join_transfer", args=(init_info,))), None):
            raise EngineError(f"an engine could not join the transfer of weights: {fault}")

    def receive_weights(self, weights: Weights, version: int, update_info: dict[str, Any]) -> int:
        """As ``set_weights``, of whole weights that a trainer sends by vLLM's weight transfer.

        Raises:
            EngineError: As ``set_weights``; or the transfer failed, and this engine must start again.
        """
        self._expect(weights, version)
        self._serving = None
        answers = self._llm.collective_rpc("receive_weights", args=(weights, update_info))
        if fault := next((fault for _, _, fault in answers if fault), None):
            raise EngineError(f"an engine did not receive the {weights} weights: {fault}")
        return self._confirm(weights, answers, serve=True)

    @property
    def takes(self) -> HandOver:
        # A GPU's engine copies whole weights itself.
        return HandOver.LENDS if self._lora is None and self._on_gpu else HandOver.COPIES

    def holds(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the policy's weights are these very ones."""
        return self._policy_state is state

    def stop(self) -> None:
        self._pending.clear()
        self._checksums.clear()
        # The model and its cache go with the last reference; cycles would keep them until some later collection.
        self._llm = self._policy_state = None
        gc.collect()

    def _take_whole(self, weights: Weights, state: Mapping[str, torch.Tensor]) -> int:
        """Takes a whole set, and returns its checksum as it came."""
        serve, self._serving = self._must_serve(weights), None
        answers = self._llm.collective_rpc("take_weights", args=(weights, state, serve))
        if fault := next((fault for _, _, fault in answers if fault), None):
            raise EngineError(
                f"vLLM did not take the {weights} weights: {fault}. See that the engine's model is the learner's "
                "(config.language_model)"
            )
        return self._confirm(weights, answers, serve)

    def _expect(self, weights: Weights, version: int) -> None:
        """Until it has come and is confirmed, neither the former nor the new set of this name serves."""
        self._require_idle()
        if weights is Weights.POLICY:
            self._policy_state = None
        self._checksums.pop(weights, None)
        self._versions[weights] = version
        self._given[weights] += 1

    def _must_serve(self, weights: Weights) -> bool:
        """Whether a whole set is put into the model as it comes. The others are when they are asked for; where they cannot be
        compared with what was given, their checksum as they are served is known only then."""
        return weights is Weights.POLICY or not self._verifiable

    def _confirm(self, weights: Weights, answers: Sequence[tuple[int, int, Any]], serve: bool) -> int:
        """Takes note of a whole set that the workers have, and returns its checksum as it came; of one that serves, it compares
        what they serve.
        """
        if len({received for received, _, _ in answers}) > 1:
            raise EngineError(f"the workers of an engine received different {weights} weights")
        received, given, _ = answers[0]
        if serve:
            served = self._served("weight_checksums")[0]
            if self._verifiable:
                _compare(weights, served, given)
            self._checksums[weights] = served
            self._begin(weights)
        else:
            self._checksums[weights] = given
        return received

    def _take_adapter(self, weights: Weights, state: Mapping[str, torch.Tensor]) -> None:
        assert self._lora is not None
        if weights not in ADAPTERS:
            raise EngineError(f"the {weights} weights are the base, which an adapter cannot be put in the place of")
        self._llm.collective_rpc("take_adapter", args=(ADAPTERS[weights], self._lora.for_peft(), state))
        served, dtype = self._served("adapter_checksums", ADAPTERS[weights])
        if self._verifiable:
            _compare(weights, served, checksum(as_served(state, self._lora.scale, dtype)))
        self._checksums[weights] = served

    def _serve(self, weights: Weights) -> None:
        """Makes these weights answer next; whole sets are swapped in if needed."""
        if weights is self._serving or (self.mixes_sets and weights is Weights.INITIAL):
            return
        if weights is Weights.INITIAL and self._base and weights not in self._checksums:
            self._require_idle()
            self._take_whole(weights, self._base)
        if weights not in self._checksums:
            raise EngineError(f"the engine was never given the {weights} weights: call set_weights first")
        if self.mixes_sets:
            return
        self._require_idle()
        self._serving = None
        self._llm.collective_rpc("serve_weights", args=(weights,))
        _compare(weights, self._served("weight_checksums")[0], self._checksums[weights])
        self._begin(weights)

    def _begin(self, weights: Weights) -> None:
        # The cache holds keys and values of the former weights.
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM kept its prefix cache across a change of weights")
        self._serving = weights

    def _served(self, call: str, *arguments: Any) -> tuple[int, torch.dtype]:
        """Checksum and precision of what serves inside vLLM's workers, fused, split and padded as it is there.

        Where tensor parallelism gives some workers the same key-value heads it is not that of what was given.
        """
        checksums, dtypes = zip(*self._llm.collective_rpc(call, args=arguments), strict=True)
        # What is equal everywhere every worker holds whole; of everything else each has its part.
        served = sum(parts[0] if len(set(parts)) == 1 else sum(parts) for parts in zip(*checksums, strict=True))
        return served, dtypes[0]

    def _require_idle(self) -> None:
        if self._pending:
            raise EngineError(f"weights cannot change while {len(self._pending)} requests are being answered")

    def _enqueue(self, requests: Iterable[Request]) -> list[int]:
        tickets: list[int] = []
        try:
            for request in requests:
                tickets.append(self._enqueue_one(request))
        except BaseException:  # the others shall not be answered to nobody
            names = [str(ticket) for ticket in tickets]
            for name in names:
                del self._pending[name]
            self._llm.abort_request(names)
            raise
        return tickets

    def _enqueue_one(self, request: Request) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ticket = self._next_ticket
        self._next_ticket += 1
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop_token_ids=self._end_ids,
            logprobs=0 if request.logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else holds them, and a copy costs as much as all else of a request
            structured_outputs=self._structure(request),
        )
        adapter = self._adapter_for(request.weights)
        self._llm.add_request(str(ticket), {"prompt_token_ids": list(request.prompt_ids)}, params, lora_request=adapter)
        self._pending[str(ticket)] = request
        return ticket

    def _structure(self, request: Request) -> Any:
        """What enforces a request's pattern; None, counted, where vLLM cannot."""
        if request.pattern is None:
            return None
        if (why := why_not(request.pattern)) is None:
            return structure(request.pattern)
        if not self.token_usage.num_unstructured:
            logger.warning("the form of an answer is not enforced: %s, pattern %.200r", why, request.pattern)
        self.token_usage.num_unstructured += 1
        return None

    def _adapter_for(self, weights: Weights) -> Any:
        """What vLLM calls the adapter that answers; None is the model itself."""
        if not self.mixes_sets or weights not in ADAPTERS:
            return None
        from vllm.lora.request import LoRARequest

        # The prefix cache knows an adapter by its name and path alone. Versions come again where a run is restored.
        name = f"{weights}@{self._given[weights]}"
        return LoRARequest(lora_name=name, lora_int_id=ADAPTERS[weights], lora_path=name)

    def _read(self, output: Any) -> tuple[int, Generation]:
        # vLLM may hand a request back under a name that it made unique with a suffix.
        name = output.request_id if output.request_id in self._pending else output.request_id.rsplit("-", 1)[0]
        request = self._pending.pop(name)
        answer = output.outputs[0]
        ids = tuple(answer.token_ids)
        places = zip(answer.logprobs or [], ids, strict=True) if request.logprobs else ()
        logprobs = np.array([place[token].logprob for place, token in places], np.float32)
        generation = Generation(
            prompt_ids=request.prompt_ids,
            token_ids=ids,
            logprobs=logprobs,
            finished=answer.finish_reason == "stop",
            weight_version=self._versions[request.weights],
            weights=request.weights,
            cached_tokens=output.num_cached_tokens or 0,
        )
        self.token_usage.book(request, generation)
        return int(name), generation


def _uncompiled() -> AbstractContextManager:
    """Keeps vLLM's sampler uncompiled on a CPU, where compiling its few helpers takes half a minute."""
    return nullcontext() if torch.cuda.is_available() else torch.compiler.set_stance("force_eager")


def _keep_process_groups() -> None:
    """Lets an engine end alone: vLLM would destroy all of torch's process groups, also those of learners and other engines."""
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = _free_memory


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _parameters(model: str) -> dict[str, torch.Tensor]:
    """A model's parameters in the precision of their files, by their names there."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    return {name: parameter.detach() for name, parameter in lm.named_parameters()}


def _compare(weights: Weights, served: int, given: int) -> None:
    if served != given:
        raise EngineError(
            f"vLLM does not serve the {weights} weights that it was given: checksum {served} instead of {given}; see that the "
            "engine's model is the learner's, and go on from the last checkpoint"
        )
