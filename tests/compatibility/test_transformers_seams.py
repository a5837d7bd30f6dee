"""What packed attention, tools and the conversion of GGUF files take from Transformers, and packs from torch's kernel."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import (
    AttentionInterface,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    modeling_gguf_pytorch_utils,
)

from rllib_nlac.learner.packed_attention import NAME, adopt, restore


@pytest.mark.parametrize("family", [Qwen2ForCausalLM, LlamaForCausalLM, GPT2LMHeadModel])
def test_models_say_that_they_take_an_attention_from_outside(family):
    assert family._supports_attention_backend and not MambaForCausalLM._supports_attention_backend


@pytest.mark.parametrize(("family", "config"), [(Qwen2ForCausalLM, Qwen2Config), (LlamaForCausalLM, LlamaConfig)])
def test_a_registered_attention_is_given_what_the_model_is_and_no_mask(family, config, monkeypatch):
    """By its name, also after the model was made; without a mask function of that name none is made."""
    shape = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm, given = family(config(**shape, num_key_value_heads=1)), []
    former = AttentionInterface()[NAME]

    def spy(module, query, key, value, attention_mask, **others):
        given.append((query.shape, key.shape, attention_mask, others["segments"], others["scaling"]))
        others.pop("segments")
        return former(module, query, key, value, attention_mask, **others)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, spy)
    assert lm.config._attn_implementation == "sdpa"
    adopt(lm)
    thing, ids = object(), torch.tensor([[3, 4, 5, 3, 4]])
    places = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "logits_to_keep": torch.tensor([4, 1])}
    logits = lm(input_ids=ids, segments=thing, use_cache=False, **places).logits
    assert given == [((1, 2, 5, 4), (1, 1, 5, 4), None, thing, 0.5)] and logits.shape == (1, 2, 9)
    restore(lm)
    lm(input_ids=ids, use_cache=False)
    assert len(given) == 1


def test_the_kernel_has_these_arguments():
    """Holds for torch 2.11; later ones want to be told if there are fewer heads of keys than of queries."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    assert list(known)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert known["scale"].default is None and known["window_size"].default == (-1, -1)
    if "enable_gqa" in known:
        assert known["enable_gqa"].default is False
    # A window of (-1, 0) is what makes it causal, and of fewer queries than keys the last ones are aligned.
    assert "window_size == (-1, 0)" in inspect.getsource(varlen_attn)


def test_a_response_template_is_checked_when_it_is_loaded_and_read_with_a_prefix(chat):
    """``tool_template`` goes through both; ``prefix`` is the prompt, which may hold the beginning of the answer."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    with pytest.raises(ValueError, match="non-empty dict"):
        load_response_template({"fields": {}})
    assert "prefix" in inspect.signature(chat.tokenizer.parse_response).parameters


def test_the_schema_of_a_method_leaves_self_out_and_names_what_is_wrong():
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    class Tools:
        def add(self, a: int) -> int:
            """Adds one.

            Args:
                a: A number.
            """
            return a + 1

        def untyped(self, a):
            """Adds.

            Args:
                a: A number.
            """

        def undescribed(self, a: int):
            """Adds."""

    parameters = get_json_schema(Tools.add)["function"]["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer", "description": "A number."}},
        "required": ["a"],
    }
    with pytest.raises(TypeHintParsingException):
        get_json_schema(Tools.untyped)
    with pytest.raises(DocstringParsingException):
        get_json_schema(Tools.undescribed)


def test_the_reader_of_gguf_files_counts_its_tensors_by_a_bar_of_its_module():
    """``inputs/pretrained.py`` puts its own in that place, so that the progress line knows how far it is."""
    source = inspect.getsource(modeling_gguf_pytorch_utils.load_gguf_checkpoint)
    assert "in tqdm(reader.tensors, desc=" in source and callable(modeling_gguf_pytorch_utils.tqdm)
