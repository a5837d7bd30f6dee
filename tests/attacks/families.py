"""Small tokenizers and chat templates in the style of well-known model families, for attacks on the prompts.

Only the control tokens are those of the families; vocabularies are made here from a few sentences, and the templates are
written anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CORPUS = (
    "user assistant system hello world is it big no yes the task is paused think tool call end start of turn header id",
    'Future: it goes on and ends well. SUCCESS Optimal: Yes Reason: it does. <b>bold</b> [1, 2] {"a": 0} a < b > c | d',
)


def _loop(before: str, between: str, after: str) -> str:
    """Each message with its role, all alike."""
    return f"{{% for m in messages %}}{{{{ '{before}' + m['role'] + '{between}' + m['content'] + '{after}' }}}}{{% endfor %}}"


def _opening(text: str) -> str:
    """How the answer begins."""
    return f"{{% if add_generation_prompt %}}{{{{ '{text}' }}}}{{% endif %}}"


@dataclass(frozen=True)
class Family:
    """How the models of one family write a dialogue.

    Attributes:
        template: The chat template.
        special: Special tokens; the first is the end of a turn.
        marks: Added tokens that are not special but mark a part of a dialogue.
        words: Added tokens that are plain text.
        kind: Tokenizer: "bytes" (byte-level BPE), "pieces" (BPE with ▁ and byte fallback), "unigram" (with NFKC) or "slow".
        strips: Special tokens that swallow the spaces to their right.
    """

    template: str
    special: tuple[str, ...]
    marks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    kind: str = "bytes"
    strips: tuple[str, ...] = ()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer of this kind with these tokens."""
        if self.kind == "slow":
            tokens = [AddedToken(text, special=True, normalized=False) for text in self.special]
            slow = ByT5Tokenizer(eos_token=tokens[0], extra_ids=0, additional_special_tokens=tokens[1:])
            slow.chat_template = self.template
            return slow
        made = _TOKENIZERS[self.kind]()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=made,
            eos_token=self.special[0],
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
            additional_special_tokens=[
                AddedToken(text, special=True, normalized=False, rstrip=text in self.strips) for text in self.special[1:]
            ],
        )
        fast.add_tokens([AddedToken(text, normalized=False) for text in self.words])
        fast.add_tokens([AddedToken(text, normalized=self.kind == "unigram") for text in self.marks])
        return fast

    @property
    def control(self) -> tuple[str, ...]:
        """All tokens that no message of an environment may hold."""
        return (*self.special, *self.marks)


def _bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer


def _pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    # Bytes are pieces of the vocabulary here and no tokens that a text could name.
    return Tokenizer.from_str(_without_added_bytes(tokenizer.to_str()))


def _without_added_bytes(description: str) -> str:
    import json

    data = json.loads(description)
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] == "<unk>"]
    return json.dumps(data)


def _unigram() -> Tokenizer:
    # Its vocabulary holds the end of a text as a piece, which the model itself finds in a text, as some real ones do.
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted({letter for text in _CORPUS for letter in text if letter != " "})
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer


_TOKENIZERS = {"bytes": _bytes, "pieces": _pieces, "unigram": _unigram}

FAMILIES: dict[str, Family] = {
    "shipped": Family(
        _loop("<|", "|>", "<|end|>") + _opening("<|assistant|>"),
        ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "chatml": Family(
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
        + _loop("<|im_start|>", "\\n", "<|im_end|>\\n")
        + _opening("<|im_start|>assistant\\n"),
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|object_ref_start|>", "<|vision_pad|>"),
        ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    ),
    # The reasoning of earlier turns is left out, and a user's message that is a tool's answer is no question.
    "thinking": Family(
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' and not "
        "(m['content'].startswith('<tool_response>') and m['content'].endswith('</tool_response>')) %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set text = m['content'] %}"
        "{% if m['role'] == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
        "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
        + _opening("<|im_start|>assistant\\n<think>\\n"),
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "not_thinking": Family(
        _loop("<|im_start|>", "\\n", "<|im_end|>\\n") + _opening("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"),
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "llama3": Family(
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
        "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}" + _opening("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
        (
            "<|eot_id|>",
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
            "<|finetune_right_pad_id|>",
            *(f"<|reserved_special_token_{i}|>" for i in range(12)),
        ),
    ),
    "gemma": Family(
        "{{ '<bos>' }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] "
        "+ '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{{ '<start_of_turn>' + "
        "('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (first if loop.first else '') + m['content'] | trim "
        "+ '<end_of_turn>\\n' }}{% endfor %}" + _opening("<start_of_turn>model\\n"),
        ("<end_of_turn>", "<bos>", "<eos>", "<pad>", "<start_of_turn>", "<start_of_image>"),
        ("<unused0>", "[multimodal]"),
        ("\n\n", "<table>", "</table>", "<b>", "</b>", "<h1>"),
        kind="pieces",
    ),
    "mistral": Family(
        "{{ '<s>' }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] "
        "+ '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + (first if loop.last else '') + m['content'] + '[/INST]' }}{% else %}{{ ' ' + m['content'] + '</s>' }}"
        "{% endif %}{% endfor %}",
        (
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[IMG]",
            "[THINK]",
            "[/THINK]",
        ),
        kind="pieces",
    ),
    "phi": Family(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
        + _opening("<|assistant|>\\n"),
        ("<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|placeholder1|>"),
        kind="pieces",
        strips=("<|system|>", "<|user|>", "<|assistant|>", "<|placeholder1|>"),
    ),
    "deepseek": Family(
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
        "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}{{ '<｜Assistant｜>' + "
        "m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        + _opening("<｜Assistant｜><think>\\n"),
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<|EOT|>"),
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
        + _opening("<|assistant|>\\n"),
        ("</s>", "<s>", "<pad>"),
        ("<unk2>",),
        kind="unigram",
    ),
    "command_r": Family(
        "{{ '<BOS_TOKEN>' }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' + {'system': '<|SYSTEM_TOKEN|>', 'user': "
        "'<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m['role']] + m['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}"
        "{% endfor %}" + _opening("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
        (
            "<|END_OF_TURN_TOKEN|>",
            "<BOS_TOKEN>",
            "<EOS_TOKEN>",
            "<PAD_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
        ),
    ),
    "slow": Family(
        _loop("<|im_start|>", "\\n", "<|im_end|>\\n") + _opening("<|im_start|>assistant\\n"),
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        kind="slow",
    ),
    # Nothing between the messages, and text of its own that a message could go on with.
    "glued": Family(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '<|im_' + messages[-1]['content'] + 'start|>' }}"
        + _opening("<|im_end|>"),
        ("<|im_end|>", "<|im_start|>", "<s>", "</s>"),
        ("<tool_call>",),
    ),
}


def people_use() -> dict[str, Family]:
    """Those that stand for models people use: without the two that were made to be hard."""
    return {name: family for name, family in FAMILIES.items() if name not in ("slow", "glued")}
