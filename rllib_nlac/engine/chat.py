"""The only module that knows both text and tokens: the chat template is applied here and nowhere else."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rllib_nlac.engine.control_tokens import ControlTokens, Span
from rllib_nlac.engine.model_folder import check_tokenizer_files, check_vocabulary, read_config
from rllib_nlac.types import Message

# A text of more characters for each token of the context is not tokenized to find out that it is too long.
MOST_CHARACTERS_PER_TOKEN = 64


_AS_PROMPT = {"add_generation_prompt": True, "return_dict": True}
_TOO_LONG = "raise max_context, or lower max_turns, max_new_tokens or the length of the environment's texts"


class PromptTooLong(ValueError):
    """A prompt and the room for its answer do not fit the model's context window."""


class Chat:
    """Turns messages into token ids and sampled ids into text.

    What a message says is plain text, whatever it holds: the control tokens of a prompt are those that the chat template
    writes. In the agent's own turns such added tokens stay as they are that are not special, as ``<think>``.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template and an end-of-turn token.
        max_context: The most tokens of prompt and answer together.

    Raises:
        ValueError: The tokenizer has no chat template or no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_context: int) -> None:
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {name!r} has no chat template, so a dialogue cannot be written for it: take the "
                "model's instruct version, or put a chat_template.jinja into its folder"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {name!r} has no eos_token, so a turn would never end: set eos_token")
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.max_characters = MOST_CHARACTERS_PER_TOKEN * max_context
        self.end_id: int = tokenizer.eos_token_id
        self._control = ControlTokens(tokenizer)
        self._mark = f"\ue000{secrets.token_hex(16)}:"  # of a placeholder; no text can know it, and no ids depend on it

    @classmethod
    def from_pretrained(cls, model: str, max_context: int | None = None) -> Chat:
        """Loads the tokenizer of a Hugging Face folder or name; ``max_context`` defaults to the model's own.

        Raises:
            FileNotFoundError: There is no model, or it has no tokenizer.
            ValueError: Its files cannot be read or do not fit each other, or ``max_context`` is more than the model reads.
        """
        check_model_path(model)
        config = read_config(model)
        if Path(model).is_dir():
            check_tokenizer_files(Path(model))
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or max_context
        if longest is None:
            raise ValueError(f"the model {model!r} does not say how much it reads at once: set max_context")
        if max_context is not None and max_context > longest:
            raise ValueError(f"max_context is {max_context}, and the model {model!r} reads at most {longest} tokens")
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except Exception as error:  # whatever a damaged file brings about in whichever tokenizer
            raise ValueError(
                f"the tokenizer of {model!r} cannot be read ({type(error).__name__}: {error}): copy its files again"
            ) from error
        check_vocabulary(model, config, tokenizer)
        return cls(tokenizer, max_context or longest)

    def prompt_ids(self, messages: Sequence[Message], room: int = 0) -> tuple[int, ...]:
        """Token ids of a prompt that the assistant answers next.

        Args:
            messages: The dialogue, the last message not the assistant's.
            room: Tokens that the answer may need.

        Raises:
            PromptTooLong: Prompt and room exceed ``max_context``.
        """
        characters = sum(len(message.content) for message in messages)
        if characters > self.max_characters:
            raise PromptTooLong(f"a prompt of {characters} characters exceeds the context of {self.max_context}: {_TOO_LONG}")
        if any(self._control.may_stand_in(message.role, message.content) for message in messages):
            ids = self._guarded_ids(messages)
        else:
            ids = tuple(self.tokenizer.apply_chat_template(_plain(messages), tokenize=True, **_AS_PROMPT)["input_ids"])
        if len(ids) + room > self.max_context:
            raise PromptTooLong(
                f"a prompt of {len(ids)} tokens with room for {room} more exceeds the context of {self.max_context}: "
                f"{_TOO_LONG}"
            )
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of an assistant's turn, its end included. For text that no engine sampled, such as a scripted one."""
        guarded = self._control.may_stand_in("assistant", text)
        pieces = self._control.pieces("assistant", text, [(0, len(text))]) if guarded else [text]
        return (*(id for piece in pieces for id in self.tokenizer.encode(piece, add_special_tokens=False)), self.end_id)

    def _guarded_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt's ids where a message holds control tokens, or parts of them, that are not its to use.

        They wait behind placeholders while the template writes the dialogue, so that it neither acts on them nor hides
        where they came from. Then they are put back, and the text is cut inside each of them that would be read.
        """
        hidden: list[str] = []
        shown: list[Message] = []
        for role, content in messages:
            parts, place = [], 0
            for start, end in self._control.spans(role, content):
                parts += [content[place:start], f"{self._mark}{len(hidden)};"]
                hidden.append(content[start:end])
                place = end
            shown.append(Message(role, "".join((*parts, content[place:]))))
        written = self.tokenizer.apply_chat_template(_plain(shown), tokenize=False, **_AS_PROMPT)
        text: list[str] = []
        marked: list[Span] = []
        length = 0
        for number, part in enumerate(re.split(f"{self._mark}([0-9]+);", written)):
            is_hidden = number % 2 == 1
            text.append(hidden[int(part)] if is_hidden else part)
            if is_hidden:
                marked.append((length, length + len(text[-1])))
            length += len(text[-1])
        ids: list[int] = []
        for piece in self._control.pieces("user", "".join(text), marked):
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
            if len(ids) > self.max_context:
                break  # too long, however much follows
        return tuple(ids)

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block, as the templates of some thinking models have it."""
        return self.tokenizer.decode(list(prompt_ids[-8:])).rstrip().endswith("<think>")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [message._asdict() for message in messages]


def check_model_path(model: str) -> None:
    """Looks whether a model folder exists, before a hub is asked for a repository of that name.

    Raises:
        FileNotFoundError: ``model`` looks like a path and no model is there.
    """
    path = Path(model)
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if (looks_like_path or path.is_dir()) and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"no model in {model!r}: the folder {'lacks config.json' if path.is_dir() else 'does not exist'}. Give a "
            "Hugging Face folder or name, or 'tiny' for the model shipped with this package"
        )
