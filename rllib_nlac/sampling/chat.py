"""The only module that knows both text and tokens: the chat template is applied here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rllib_nlac.sampling.model_folder import check_tokenizer_files, check_vocabulary, read_config
from rllib_nlac.types import Message


class PromptTooLong(ValueError):
    """A prompt and the room for its answer do not fit the model's context window."""


class Chat:
    """Turns messages into token ids and sampled ids into text.

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
        self.end_id: int = tokenizer.eos_token_id

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
        encoded = self.tokenizer.apply_chat_template(
            [message._asdict() for message in messages], tokenize=True, add_generation_prompt=True, return_dict=True
        )
        ids = tuple(encoded["input_ids"])
        if len(ids) + room > self.max_context:
            raise PromptTooLong(
                f"a prompt of {len(ids)} tokens with room for {room} more exceeds the context of {self.max_context}: "
                "raise max_context, or lower max_turns, max_new_tokens or the length of the environment's texts"
            )
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of an assistant's turn, its end included. For text that no engine sampled, such as a scripted one."""
        return (*self.tokenizer.encode(text, add_special_tokens=False), self.end_id)

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block, as the templates of some thinking models have it."""
        return self.tokenizer.decode(list(prompt_ids[-8:])).rstrip().endswith("<think>")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def check_model_path(model: str) -> None:
    """Says plainly that a model folder is missing, before a hub is asked for a repository of that odd name.

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
