"""Classes with tools as users write them, and templates that have places for tools in the manner of two families."""

from __future__ import annotations

from dataclasses import replace

from attacks.families import FAMILIES, Family

from rllib_nlac.engine.chat import Chat
from rllib_nlac.envs.tools import schemas_of
from rllib_nlac.inputs.tool_calls import tools_message
from rllib_nlac.types import Message

# The manner of Qwen: schemas in the system message, results in user messages, those that follow each other in one.
QWEN = Family(
    "{% if tools %}{{ '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + "
    "'Tools:\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for call in m.tool_calls %}"
    "{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
# The manner of Llama 3: schemas in the first user message, results as JSON in a role of their own, all texts trimmed.
_HEADED = "{{ '<|start_header_id|>' + %s + '<|end_header_id|>\\n\\n' + %s + '<|eot_id|>' }}"
LLAMA = Family(
    "{{ '<|begin_of_text|>' }}{% set ns = namespace(told=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    + _HEADED % ("'ipython'", "m.content | tojson")
    + "{% elif m.role == 'user' and tools and not ns.told %}{% set ns.told = true %}"
    + _HEADED % ("'user'", "'Functions:\\n' + (tools | tojson(indent=4)) + '\\n\\n' + m.content | trim")
    + "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    + _HEADED
    % (
        "m.role",
        """'{"name": "' + m.tool_calls[0].function.name + '", "parameters": '"""
        " + m.tool_calls[0].function.arguments | tojson + '}'",
    )
    + "{% else %}"
    + _HEADED % ("m.role", "m.content | trim")
    + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
)


class Counter:
    """As written for TRL: no base class, its own ``reset``, a tool that is called step."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, start: int = 0, **kwargs) -> str:
        self.count = start
        return f" It is {start} now."

    def step(self, by: int, note: str | None = None) -> int:
        """
        Adds to the count.

        Args:
            by: How much.
            note: A remark.

        Returns:
            The new count.
        """
        if by == 13:
            raise RuntimeError("unlucky")
        self.count += by
        return self.count

    def name(self) -> str:
        """Says what this is."""
        return "a counter"

    def get_reward(self) -> float:
        return float(self.count == 5)

    def _hidden(self) -> None:
        pass


class Undocumented(Counter):
    def bare(self, by: int) -> int:
        return by


def reward(prompts, completions, environments, goal, **kwargs) -> list[float]:
    """TRL's kind: lists in, a list out."""
    return [float(str(g) in c[0]["content"] and e.count == g) for c, e, g in zip(completions, environments, goal, strict=True)]


SCHEMAS = schemas_of(Counter)
CHATS = {name: Chat(family.tokenizer(), 8192) for name, family in (("qwen", QWEN), ("llama", LLAMA))}
CHATS["knows none"] = Chat(FAMILIES["llama3"].tokenizer(), 8192)
CHATS["no system"] = Chat(replace(FAMILIES["gemma"], kind="bytes", words=()).tokenizer(), 8192)


def opened(chat: Chat, system: str, schemas=SCHEMAS) -> tuple[Message, ...]:
    start = (tools_message(schemas), *([Message("system", system)] if system else []))
    return (*start, Message("user", "Make it five."))
