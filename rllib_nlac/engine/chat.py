"""The boundary of text and tokens: all others give messages and get ids, or give ids and get text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_parsing.response_templates import load_response_template

from rllib_nlac.engine.model_folder import check_tokenizer_files, check_vocabulary, read_config
from rllib_nlac.engine.template import ChatTemplate, Written
from rllib_nlac.inputs.tool_calls import Call
from rllib_nlac.types import Generation, Message, Seen, turns_of

# A text of more characters for each token of the context is not tokenized to find out that it is too long.
MOST_CHARACTERS_PER_TOKEN = 64

TOO_LONG = (
    "raise max_context, or lower history_turns, the environment's max_turns or texts, or the answers' limits (max_..._tokens)"
)


class PromptTooLong(ValueError):
    """A prompt and the room for its answer do not fit the model's context window."""


class Wanted(NamedTuple):
    """A prompt that is wanted.

    Attributes:
        messages: The dialogue, the last message not the assistant's.
        room: Tokens that the answer may need.
        seen: What an engine has seen of it.
    """

    messages: tuple[Message, ...]
    room: int = 0
    seen: Seen | None = None


class Prompt(NamedTuple):
    """A prompt's token ids.

    Attributes:
        ids: The ids.
        retokenised: Whether they were made anew although an engine has seen a part of them.
    """

    ids: tuple[int, ...]
    retokenised: bool = False


class Chat:
    """Turns messages into token ids and sampled ids into text.

    What a message says is plain text, whatever it holds: the control tokens of a prompt are those that the chat template
    writes. In the agent's own turns such added tokens stay as they are that are not special, as ``<think>``.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template and an end-of-turn token.
        max_context: The most tokens of prompt and answer together.
        end_ids: Other tokens than the tokenizer's ``eos_token`` by which the model ends a turn.
        tool_template: How tool calls are read, as transformers' ``parse_response`` has it; None takes the tokenizer's own, or
            where it has none ``read_calls``.

    Attributes:
        end_id: Token id that ends a turn in a dialogue: the special token that the template writes there, whether or not the
            model's files name it, or else ``eos_token``.
        end_ids: All token ids that end an answer.

    Raises:
        ValueError: The tokenizer has no chat template or no end-of-sequence token, or ``tool_template`` is malformed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_context: int,
        end_ids: Sequence[int] = (),
        tool_template: Mapping[str, Any] | None = None,
    ) -> None:
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
        self.template = ChatTemplate(tokenizer)
        if tool_template is not None:
            try:
                load_response_template(dict(tool_template))
            except (ValueError, TypeError) as error:
                raise ValueError(f"tool_template: {error}; see transformers' documentation of response templates") from None
        self._tool_template = tool_template or getattr(tokenizer, "response_template", None)
        # Of a reasoning block, where the tokenizer calls them special and would leave them out.
        self._thinking_ids = {id for id in self.template.control.thinking_ids if not self._text([id])}
        named = (tokenizer.eos_token_id, *end_ids)
        self.end_id: int = self._end_of_a_turn(named)
        self.end_ids = tuple(dict.fromkeys((*named, self.end_id)))

    def _end_of_a_turn(self, named: Sequence[int]) -> int:
        """The first token behind a turn that is named as an end, or that is special and has nothing but spaces before it."""
        behind = self.template.behind_a_turn
        if (end := next((id for id in behind if id in named), None)) is not None:
            return end
        first = next((id for id in behind if self._text([id], keep=True).strip()), None)
        return first if first in self.template.control.special_ids else named[0]

    @property
    def ends(self) -> str:
        """The texts of the tokens that end an answer, for people."""
        return ", ".join(str(self.tokenizer.convert_ids_to_tokens(id)) for id in self.end_ids)

    @classmethod
    def from_pretrained(
        cls, model: str, max_context: int | None = None, tool_template: Mapping[str, Any] | None = None
    ) -> Chat:
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
        ends = getattr(config.get_text_config(), "eos_token_id", None)
        return cls(tokenizer, max_context or longest, (*_end_ids(model), *_ids(ends)), tool_template)

    def prompt_ids(self, messages: Sequence[Message], room: int = 0) -> tuple[int, ...]:
        """Token ids of a prompt that the assistant answers next.

        Args:
            messages: The dialogue, the last message not the assistant's.
            room: Tokens that the answer may need.

        Raises:
            PromptTooLong: Prompt and room exceed ``max_context``.
        """
        (prompt,) = self.prompts([Wanted(tuple(messages), room)])
        if isinstance(prompt, PromptTooLong):
            raise prompt
        return prompt.ids

    def prompts(self, wanted: Sequence[Wanted]) -> list[Prompt | PromptTooLong]:
        """Prompts, encoded in one call; in the place of one that exceeds the context with its room is an error.

        What an engine has seen stays as it is: ids of a prompt, and of the turn that was sampled behind it, and only what the
        environment or an instruction adds is encoded. Where the template shows the former dialogue otherwise than it was seen,
        or the turn holds control tokens or is none of the dialogue, all is encoded anew.
        """
        found: dict[int, Prompt | PromptTooLong] = {}
        before: list[tuple[int, ...]] = []
        written: list[Written] = []
        for place, (messages, _, seen) in enumerate(wanted):
            characters = sum(len(message.content) for message in messages)
            if characters > self.max_characters:
                found[place] = PromptTooLong(
                    f"a prompt of {characters} characters exceeds the context of {self.max_context}: {TOO_LONG}"
                )
                continue
            if seen is not None and seen.turn_ids is None:
                found[place] = Prompt(seen.prompt_ids)
                continue
            tail = self._extension(messages, seen) if seen is not None else None
            before.append(() if tail is None or seen is None else (*seen.prompt_ids, *self._open_turn(seen)))
            written.append(self.template.write(messages) if tail is None else tail)
        new = zip(before, self.template.encode(written), strict=True)
        prompts: list[Prompt | PromptTooLong] = []
        for place, (_, room, seen) in enumerate(wanted):
            prompt = found.get(place)
            if prompt is None:
                start, ids = next(new)
                prompt = Prompt((*start, *ids), seen is not None and not start)
            if isinstance(prompt, Prompt) and len(prompt.ids) + room > self.max_context:
                prompt = PromptTooLong(
                    f"a prompt of {len(prompt.ids)} tokens with room for {room} more exceeds the context of "
                    f"{self.max_context}: {TOO_LONG}"
                )
            prompts.append(prompt)
        return prompts

    def _extension(self, messages: tuple[Message, ...], seen: Seen) -> Written | None:
        """What is to be encoded behind what was seen; None where that does not begin this prompt."""
        turn = self._open_turn(seen)
        turns = turns_of(messages)
        if not turns or not self.template.control.special_ids.isdisjoint(turn):
            return None
        is_said = self.opened(seen.prompt_ids, self.decode(turn)) == messages[turns[-1]].content
        return self.template.extension(messages) if is_said else None

    def _open_turn(self, seen: Seen) -> tuple[int, ...]:
        """A turn's ids without their end, which the template writes, also where the turn was cut off."""
        return tuple(self._without_end(seen.turn_ids or ()))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of an assistant's turn, its end included. For text that no engine sampled, such as a scripted one."""
        control = self.template.control
        guarded = control.may_stand_in("assistant", text)
        pieces = control.pieces("assistant", text, [(0, len(text))]) if guarded else [text]
        return (*(id for piece in pieces for id in self.tokenizer.encode(piece, add_special_tokens=False)), self.end_id)

    def encode_turn(self, prompt_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """As ``encode``, behind a prompt that may end with the ``<think>`` with which the text begins."""
        return self.encode(text.removeprefix("<think>").lstrip("\n") if self.opens_thinking(prompt_ids) else text)

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block, as the templates of some thinking models have it."""
        return self.tokenizer.decode(list(prompt_ids[-8:])).rstrip().endswith("<think>")

    @functools.cached_property
    def thinks(self) -> bool:
        """Whether the template has the model reason in a block of its own before it answers."""
        if len(self.template.control.thinking_ids) < 2:
            return False
        prompt = self.tokenizer.decode(list(self.prompt_ids((Message("user", "Hello."),)))[-8:])
        opens, closes = prompt.rfind("<think>"), prompt.rfind("</think>")
        return opens > closes if max(opens, closes) >= 0 else "enable_thinking" in str(self.tokenizer.chat_template)

    def said(self, generation: Generation) -> str:
        """Text of an answer, to be parsed."""
        return self.opened(generation.prompt_ids, self.decode(generation.token_ids))

    def opened(self, prompt_ids: Sequence[int], text: str) -> str:
        """An answer's text, with the ``<think>`` that its prompt ends with.

        So no parser takes what is all reasoning for an answer, and a template finds both marks of a thought that it leaves out
        of later prompts.
        """
        return f"<think>{text}" if "<think>" not in text and self.opens_thinking(prompt_ids) else text

    def with_calls(self, generation: Generation, action: str) -> str:
        """An action whose calls are as ``read_calls`` reads them, also of a model that writes them otherwise."""
        if self._tool_template is None:
            return action
        ids = self._without_end(generation.token_ids), generation.prompt_ids
        text, prefix = (self.tokenizer.decode(list(part)) for part in ids)
        try:
            parsed = self.tokenizer.parse_response(text, dict(self._tool_template), prefix=prefix)
            calls = [Call(**call["function"]) for call in parsed.get("tool_calls", ())]
        except (ValueError, TypeError, KeyError):  # a call that is cut off, say
            return action
        return "\n".join([*filter(None, [parsed.get("content")]), *map(str, calls)]) if calls else action

    def invents_a_turn(self, generation: Generation) -> bool:
        """Whether an answer holds special tokens before its end, as of a model that goes on with what another says."""
        return not self.template.control.special_ids.isdisjoint(self._without_end(generation.token_ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without the end of the turn and without special tokens but those of a reasoning block."""
        runs = itertools.groupby(self._without_end(ids), self._thinking_ids.__contains__)
        return "".join(self._text(run, keep=is_thinking) for is_thinking, run in runs).strip()

    def _text(self, ids: Iterable[int], keep: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=not keep)

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.end_ids else ids


def _end_ids(model: str) -> tuple[int, ...]:
    """What the model itself says that it stops at, in generation_config.json."""
    try:
        return _ids(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:  # there is none
        return ()


def _ids(said: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if said is None else (said,) if isinstance(said, int) else tuple(said)


def check_model_path(model: str) -> None:
    """Looks whether a model folder exists, before a hub is asked for a repository of that name.

    Raises:
        FileNotFoundError: ``model`` looks like a path and no model is there.
    """
    path = Path(model)
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"no model in {model!r}: the folder holds an adapter alone. Export the whole model: "
            "rllib export --merge CHECKPOINT FOLDER"
        )
    if (looks_like_path or path.is_dir()) and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"no model in {model!r}: the folder {'lacks config.json' if path.is_dir() else 'does not exist'}. Give a "
            "Hugging Face folder or name, a checkpoint or the folder of a run that wrote one, 'smollm2' for a small pretrained "
            "model, or 'tiny' for the model shipped with this package"
        )
