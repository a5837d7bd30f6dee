"""vLLM's private seams: ``engine/vllm_engine.py``, ``vllm_structure.py``, ``vllm_worker.py`` and ``weight_transfer.py``."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.v1.structured_output import StructuredOutputManager

from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.engine.vllm_settings import CPU_BLOCK
from rllib_nlac.engine.vllm_structure import register_thinking, why_not
from rllib_nlac.engine.vllm_worker import WorkerExtension
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.types import Request, Weights


def test_the_engine_runs_in_this_process_and_reaches_its_worker(engine):
    ((checksums, dtype),) = engine._llm.collective_rpc("weight_checksums")
    assert all(checksums) and dtype is torch.float32


def test_every_parameter_stays_readable_so_that_a_sync_can_be_verified(engine):
    """oneDNN would replace weights by packed copies that a reload does not reach."""
    sizes = engine._llm.collective_rpc(_sizes_of_model)[0]
    assert all(size > 0 for size in sizes.values())


def _sizes_of_model(worker):
    return {name: parameter.numel() for name, parameter in worker.model_runner.get_model().named_parameters()}


def test_the_model_says_its_logits_by_a_method_that_can_be_replaced(engine):
    """Ids that only pad a vocabulary are taken out there, before a sampler or a grammar sees them."""
    assert engine._llm.collective_rpc(_calls_compute_logits) == [True]


def _calls_compute_logits(worker):
    runner = worker.model_runner
    kinds = [kind for kind in type(runner).__mro__ if kind.__module__.startswith("vllm.")]
    calls = any("self.model.compute_logits(" in inspect.getsource(kind) for kind in kinds)
    return calls and callable(runner.get_model().compute_logits)


def test_weights_are_reloaded_from_an_iterator(engine):
    signature = engine._llm.collective_rpc(_signature_of_reload)[0]
    assert "weights_iterator" in signature


def _signature_of_reload(worker):
    return list(inspect.signature(worker.model_runner.reload_weights).parameters)


def test_a_load_into_the_model_that_serves_can_be_watched(engine, model_path):
    """Its parameters keep vLLM's loaders, which copy parts of the checkpoint's tensors and do no more."""
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    engine.set_weights(Weights.POLICY, 1, served_state(lm))
    assert engine._llm.collective_rpc(_knows_slices) == [True]
    assert engine._llm.collective_rpc(_tensor_parallel_size) == [1]


def _knows_slices(worker):
    return worker.slices is not None


def _tensor_parallel_size(worker):
    return worker.model_runner.parallel_config.tensor_parallel_size


def test_the_prefix_cache_says_whether_it_was_reset(engine):
    assert engine._llm.reset_prefix_cache() is True


def test_final_only_outputs_hold_everything(engine, chat):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=3, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, seed=1)
    engine._llm.add_request("seam", {"prompt_token_ids": list(chat.encode("Is it big?"))}, params)
    outputs = []
    while engine._llm.has_unfinished_requests():
        outputs += engine._llm.step()
    (output,) = [output for output in outputs if output.finished]
    answer = output.outputs[0]
    assert output.request_id.startswith("seam") and answer.finish_reason in ("stop", "length")
    assert all(token in place for token, place in zip(answer.token_ids, answer.logprobs, strict=True))


def test_an_answer_says_how_much_of_its_prompt_the_prefix_cache_held(engine, chat):
    """Whole blocks of it, without statistics being kept, which would cost time at every step."""
    llm = engine._llm
    assert llm.log_stats is False
    size = llm.vllm_config.cache_config.block_size
    prompt = [20 + i % 7 for i in range(2 * size + 3)]
    asked = [Request(tuple(prompt[:-1]), 1), Request(tuple(prompt), 1), Request(tuple(prompt[:size]), 1)]
    llm.reset_prefix_cache()
    assert [engine.generate([request])[0].cached_tokens for request in asked] == [0, 2 * size, 0]  # the last token is computed


def test_parameters_of_a_request_need_not_be_copied():
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(seed=1, stop_token_ids=[1], skip_clone=True)
    assert params.clone().stop_token_ids is params.stop_token_ids and params.clone() == params


def test_torch_threads_survive_the_cpu_worker(engine):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_nothing_is_compiled_on_a_cpu(engine, chat):
    """vLLM compiles helpers of its sampler at their first use, half a minute on a machine that has not done so before."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    engine.generate([Request(chat.encode("Is it big?"), 3, seed=number) for number in range(3)])
    assert not torch._dynamo.utils.counters["frames"]
    torch.compile(_twice, backend="eager")(torch.ones(1))
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1  # what others compile in this process is compiled


def test_an_engine_that_ends_tears_down_by_the_function_that_is_replaced(engine):
    """Its own would destroy all of torch's process groups, those of learners and other engines in the process too."""
    from vllm.v1.engine import core, core_client

    if "finalize" not in inspect.getsource(core_client.InprocClient):
        pytest.skip("vLLM 0.25 destroys nothing when an engine is dropped")
    assert "weakref.finalize(self, self.engine_core.shutdown)" in inspect.getsource(core_client.InprocClient)
    assert "    cleanup_dist_env_and_memory()\n" in inspect.getsource(core.EngineCore.shutdown)
    assert core.cleanup_dist_env_and_memory.__module__ == VLLMEngine.__module__


def _twice(numbers: torch.Tensor) -> torch.Tensor:
    return 2 * numbers


@pytest.mark.parametrize(("fault", "said"), [(None, "does more than to copy"), (ValueError("no such layer"), "no such layer")])
def test_a_model_whose_weights_cannot_be_copied_into_place_is_told(fault, said, caplog):
    class Worker(WorkerExtension):
        weight = torch.zeros(2)
        model_runner = SimpleNamespace(get_model=lambda: Model())

        def _parameters(self):
            return [self.weight]

    class Model:
        def load_weights(self, given):
            if fault:
                raise fault
            for _, tensor in given:
                Worker.weight.copy_(tensor + 1)

    assert Worker()._learn_slices({"weight": torch.ones(2)}) is None
    assert "loads the whole model at every sync" in caplog.text and said in caplog.text


def test_adapters_are_built_from_tensors_and_put_into_numbered_slots(engine):
    """Without an adapter's manager in this engine: names and signatures that ``vllm_worker`` relies on."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    given = {"lora_model_id", "tensors", "peft_helper", "device", "dtype", "model_vocab_size", "weights_mapper"}
    assert given <= set(inspect.signature(LoRAModel.from_lora_tensors).parameters)
    helper = PEFTHelper.from_dict({"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"})
    assert helper.vllm_lora_scaling_factor == 2
    for name in ("remove_adapter", "create_lora_manager"):
        assert callable(getattr(LRUCacheWorkerLoRAManager, name))
    for name in ("add_adapter", "activate_adapter"):
        assert callable(getattr(LoRAModelManager, name))
    assert "lora_index_to_id" in inspect.getsource(LoRAModelManager.__init__)


def test_the_prefix_cache_knows_an_adapter_by_name_and_path():
    """So a new version must have a new name."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    one, two = (SimpleNamespace(lora_request=LoRARequest(f"policy@v{n}", 1, f"policy@v{n}")) for n in (1, 2))
    assert _gen_lora_extra_hash_keys(one) != _gen_lora_extra_hash_keys(two)


@pytest.mark.vllm
def test_a_build_for_gpus_says_what_it_lacks_without_one(model_path, chat, monkeypatch):
    """vLLM's own words would be: Device string must not be empty."""
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(EngineError, match=r"not for a CPU, and this process has no GPU: give it one \(num_gpus_per_l"):
        VLLMEngine(model_path, chat.max_context, [chat.end_id])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_is_packed_on_a_cpu(monkeypatch, dtype):
    """Fails where a kernel packs it: of the weights nothing is left that new ones could be written to or compared with."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    layer = torch.nn.Linear(256, 128, dtype=dtype)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.shape == (128, 256) and layer.weight.dtype == layer.bias.dtype == dtype
    layer.weight.data.zero_()
    assert torch.equal(layer.cpu_linear(torch.ones(1, 256, dtype=dtype), layer.weight, layer.bias)[0], layer.bias)


def test_the_grammar_is_xgrammars_and_refuses_what_it_cannot_compile(engine):
    """``auto`` would choose by the first request, and one backend serves all that follow."""
    config = engine._llm.vllm_config
    assert config.structured_outputs_config.backend == "xgrammar"
    assert why_not("a{2,3}") is None and "regex" in why_not("(?<=a)b").lower()


def test_where_reasoning_ends_is_asked_of_a_registered_parser():
    """By the prompt's ids before the first token, and by the new ones after it."""
    kind = ReasoningParserManager.get_reasoning_parser(register_thinking())
    assert issubclass(kind, BaseThinkingReasoningParser)
    assert list(inspect.signature(BaseThinkingReasoningParser.is_reasoning_end).parameters) == ["self", "input_ids"]
    source = inspect.getsource(StructuredOutputManager)
    assert "is_reasoning_end(request.prompt_token_ids" in source and "is_reasoning_end_streaming(" in source


def test_the_block_on_a_cpu_holds_fewer_tokens_than_a_short_dialogue(engine):
    """Fails where vLLM's own size of 128 is in force: then no prefix of a short dialogue is ever found again."""
    assert engine._llm.vllm_config.cache_config.block_size == CPU_BLOCK == 32


class TestWeightTransfer:
    """Names and signatures of vLLM's weight transfer, whose two sides ``tests/test_weight_transfer.py`` runs without a GPU."""

    def test_the_trainers_side(self):
        from vllm.distributed import weight_transfer
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        assert names_of(weight_transfer.WeightTransferTrainerFactory.trainer_init) == ["init_info", "client", "source"]
        assert names_of(IPCTrainerInitInfo)[-1] == "rank" and IPCTrainerInitInfo(rank=0).packed is False
        assert names_of(NCCLTrainerInitInfo)[:3] == ["master_address", "master_port", "world_size"]
        assert NCCLTrainerInitInfo("host", 1, 2, rank=0).packed is True
        assert names_of(weight_transfer.ParamMeta) == ["name", "dtype", "shape"]
        for engine in (IPCTrainerWeightTransferEngine, NCCLTrainerWeightTransferEngine):
            assert names_of(engine.send_weights) == ["self"] and names_of(engine.shutdown) == ["self"]
        # The trainer broadcasts while the engines receive, and one call brings a whole set.
        assert "exe.submit(self.client.update_weights" in inspect.getsource(NCCLTrainerWeightTransferEngine.send_weights)
        assert inspect.getsource(IPCTrainerWeightTransferEngine._send_unpacked).count("_do_send(") == 1

    def test_our_client_has_what_vllm_calls(self):
        from vllm.distributed.weight_transfer import VLLMWeightSyncClient

        from rllib_nlac.engine.weight_transfer import EngineClient

        assert issubclass(EngineClient, VLLMWeightSyncClient)
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            assert names_of(getattr(EngineClient, name)) == names_of(getattr(VLLMWeightSyncClient, name))

    def test_the_workers_side(self):
        from vllm.v1.worker.gpu_worker import Worker

        called = {
            "init_weight_transfer_engine": ["self", "init_info"],
            "shutdown_weight_transfer_engine": ["self"],
            "start_weight_update": ["self"],
            "update_weights": ["self", "update_info"],
            "finish_weight_update": ["self"],
        }
        assert {name: names_of(getattr(Worker, name)) for name in called} == called
        assert not [name for name in vars(WorkerExtension) if not name.startswith("__") and hasattr(Worker, name)]
        # The engine loads into the very model whose ``load_weights`` is watched.
        assert "self.model_runner.get_model(),\n            )" in inspect.getsource(Worker.load_model)

    def test_both_backends_number_workers_and_load_in_the_same_way(self):
        from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine

        assert "worker_rank + init_info.rank_offset" in inspect.getsource(nccl_common.worker_init_process_group)
        assert "rank_offset=1," in inspect.getsource(nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init)
        for engine in (nccl_engine.NCCLWeightTransferEngine, ipc_engine.IPCWeightTransferEngine):
            assert "self.model.load_weights" in inspect.getsource(engine.receive_weights)

    def test_the_engine_is_configured_by_the_backends_name(self, model_path):
        from vllm import EngineArgs

        given = EngineArgs(model=model_path, weight_transfer_config={"backend": "ipc"}).weight_transfer_config
        assert given.backend == "ipc"

    def test_a_broadcast_that_waits_for_a_lost_process_can_be_aborted(self):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        assert "ncclCommAbort" in inspect.getsource(PyNcclCommunicator.destroy)


def names_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)
