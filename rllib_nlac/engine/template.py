"""A chat template at work: dialogues become texts, and texts become token ids without a control token that is not theirs.

A longer dialogue is written whole and encoded from where the former prompt and the turn after it end, so that what was
sampled is never encoded again. Writing costs a hundredth of what encoding does.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from rllib_nlac.engine.control_tokens import ControlTokens, Span
from rllib_nlac.inputs.tool_calls import Call
from rllib_nlac.types import TOOL, TOOLS, Message, turns_of

# For templates that have no words of their own for tools.
HOW_TO_CALL = (
    "You may call the tools that are listed below. A call is a JSON object with name and arguments, in tags, as in\n"
    '<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>\n'
    "What it returns comes in <tool_response> tags. Tools, with their arguments as JSON schemas:"
)
MOST_CHARACTERS_KEPT = 4_000_000  # of dialogues written last: the next turn's begins with one of them, or several roles' do


class Written(NamedTuple):
    """A prompt as the template writes it.

    Attributes:
        text: With everything that the messages say.
        marked: Places that hold no control token by right; in order, none overlapping.
    """

    text: str
    marked: Sequence[Span] = ()

    def after(self, place: int) -> Written:
        """What follows a place."""
        return Written(self.text[place:], [(start - place, end - place) for start, end in self.marked if start >= place])


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.

    Attributes:
        opening: The spaces that the template writes between a prompt and the answer to it, which an answer brings itself; None
            where no dialogue can be extended, and why is in ``obstacle``.
        obstacle: Empty where there is none.
        header: What stands before an answer in a dialogue and is missing at the end of a prompt, as of a template that knows no
            ``add_generation_prompt``; every prompt ends with it. Empty for other templates.
        behind_a_turn: The token ids that it writes between a turn of the agent's and the message that follows, and of that
            message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.control = ControlTokens(tokenizer)
        self._recent: dict[tuple[Message, ...], Written] = {}
        self._num_characters = 0
        self._mark = f"\ue000{secrets.token_hex(16)}:"  # of a placeholder; no text can know it, and no ids depend on it
        self._folds_system = False  # into the message behind it
        self.header = ""
        self._folds_system = not self._takes_system()
        self.header = self._find_header()
        self.opening, self.obstacle = self._find_opening()
        self.behind_a_turn = self._find_end()

    def write(self, messages: Sequence[Message], num_harmless: int = 0) -> Written:
        """The text of a prompt, of whose messages the first so many are known to hold no part of a control token.

        Control tokens, or parts of them, that are not a message's to use wait behind placeholders while the template writes
        the dialogue, so that it neither acts on them nor hides where they came from.
        """
        if not any(self.control.may_stand_in(message.role, message.content) for message in messages[num_harmless:]):
            return Written(self._apply(messages))
        hidden: list[str] = []
        shown: list[Message] = []
        for message in messages:
            content = message.content
            parts, place = [], 0
            for start, end in self.control.spans(message.role, content):
                parts += [content[place:start], f"{self._mark}{len(hidden)};"]
                hidden.append(content[start:end])
                place = end
            shown.append(message._replace(content="".join((*parts, content[place:]))))
        text: list[str] = []
        marked: list[Span] = []
        length = 0
        for number, part in enumerate(re.split(f"{self._mark}([0-9]+);", self._apply(shown))):
            is_hidden = number % 2 == 1
            text.append(hidden[int(part)] if is_hidden else part)
            if is_hidden:
                marked.append((length, length + len(text[-1])))
            length += len(text[-1])
        return Written("".join(text), marked)

    def encode(self, texts: Sequence[Written]) -> list[tuple[int, ...]]:
        """Token ids of several texts, all in one call; each is cut inside every control token that is not its own."""
        pieces = [self.control.pieces("user", *text) if text.marked else [text.text] for text in texts]
        flat = [piece for own in pieces for piece in own]
        ids = iter(self._tokenizer(flat, add_special_tokens=False, return_attention_mask=False)["input_ids"] if flat else ())
        return [tuple(itertools.chain.from_iterable(itertools.islice(ids, len(own)))) for own in pieces]

    def extension(self, messages: Sequence[Message]) -> Written | None:
        """What the template writes behind the last turn, up to where the next one begins.

        Args:
            messages: A dialogue that ends with others' messages behind a turn of the assistant's.

        Returns:
            None where the longer dialogue does not begin with what the prompt before that turn showed, and the turn: the
            template leaves something out of former turns, such as their thoughts, or puts something before them.
        """
        last = turns_of(messages)[-1:]
        if self.opening is None or last in ([], [0], [len(messages) - 1]):
            return None
        before = self._written(messages[: last[0]])
        after = self._written(messages, 0 if before.marked else last[0])
        turn, place = self.opening + messages[last[0]].content, len(before.text)
        if not (after.text.startswith(before.text) and after.text.startswith(turn, place)):
            return None
        return after.after(place + len(turn))

    def _written(self, messages: Sequence[Message], num_harmless: int = 0) -> Written:
        """``write``, which the same messages cost once for a while."""
        key = tuple(messages)
        written = self._recent.get(key)
        if written is None:
            if self._num_characters > MOST_CHARACTERS_KEPT:
                self._recent.clear()
                self._num_characters = 0
            written = self._recent[key] = self.write(messages, num_harmless)
            self._num_characters += len(written.text)
        return written

    def _apply(self, messages: Sequence[Message]) -> str:
        rows, tools = [message.row for message in messages], None
        if rows and rows[0]["role"] == TOOLS:
            tools = json.loads(rows.pop(0)["content"])
            if self.tools_obstacle:
                rows, tools = _in_plain_text(rows, tools), None
        return self._render(rows, tools)

    def _render(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        for row in rows:
            said = row["content"].lstrip() if row["role"] == "assistant" else ""
            if said.startswith("<think>") and "</think>" not in said:
                row["content"] = ""  # a thought without an end is no answer
        if self._folds_system and rows and rows[0]["role"] == "system":
            told = rows.pop(0)["content"]
            if rows and rows[0]["role"] == "user":
                told = f"{told}\n\n{rows.pop(0)['content']}"
            rows.insert(0, {"role": "user", "content": told})
        # A template's "if tools" is wrong for an empty list in some, so that it is never one.
        text = self._tokenizer.apply_chat_template(rows, tools=tools or None, tokenize=False, add_generation_prompt=True)
        return str(text) + self.header

    @functools.cached_property
    def tools_obstacle(self) -> str:
        """Why tools are described in the system message, and their results told as user messages; empty where the template
        has places for both."""
        schema = {"name": "find_word", "description": "Finds words.", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": schema}]
        start = [{"role": "user", "content": "Guess my object."}]
        said = [{"role": "assistant", "content": "Is it big?"}]
        results = [{"role": TOOL, "content": text, "name": "find_word"} for text in ("A first one.", "A second one.")]
        for system in ([], [{"role": "system", "content": "Play."}]):
            try:
                before, after = (self._render([*system, *start, *more], tools) for more in ([], [*said, *results]))
            except (TemplateError, TypeError, ValueError) as error:
                if system and self._folds_system:
                    continue
                return f"its chat template takes no results of tools ({error!s:.100})"
            if any(text not in before for text in ("find_word", "Finds words.")):
                return "its chat template does not show the schemas of tools"
            if any(row["content"] not in after for row in results):
                return "its chat template does not show the results of tools"
        return ""

    def turn(self, content: str, calls: Sequence[Call]) -> str | None:
        """A turn that calls tools, as the template writes it; None where it cannot, or needs special tokens for it."""
        return self._turn(content, calls) if self._writes_calls else None

    @functools.cached_property
    def _writes_calls(self) -> bool:
        text = self._turn("", [Call("find_word", {"word": "a"})])
        return text is not None and not self.control.spans("assistant", text)

    def _turn(self, content: str, calls: Sequence[Call]) -> str | None:
        if self.tools_obstacle:
            return "\n".join([*filter(None, [content]), *map(str, calls)])
        functions = [{"type": "function", "id": f"call{n:05}", "function": call._asdict()} for n, call in enumerate(calls)]
        mark, start = "Is it big?", {"role": "user", "content": "Guess my object."}
        try:
            head, _, tail = self._render([{**start}, {"role": "assistant", "content": mark}]).rpartition(mark)
            text = self._render([{**start}, {"role": "assistant", "content": content, "tool_calls": functions}])
        except (TemplateError, TypeError, ValueError):
            return None
        # A template may write spaces before a text alone.
        is_framed = text.startswith(head.rstrip()) and text.endswith(tail) and all(call.name in text for call in calls)
        return text[len(head.rstrip()) : len(text) - len(tail)].strip() if is_framed else None

    def _takes_system(self) -> bool:
        """Whether the template has a place for a system message."""
        try:
            return "Play." in self._apply((Message("system", "Play."), Message("user", "Guess my object.")))
        except (TemplateError, TypeError, ValueError):
            return False

    def _find_header(self) -> str:
        """What every small dialogue has between a prompt and the answer to it; empty where that is nothing but spaces."""
        found = set()
        for messages in _probes():
            if len(messages[-2].content) < 2:
                continue  # a header holds that letter too
            try:
                before, after = self._apply(messages[:-2]), self._apply(messages)
            except (TemplateError, TypeError, ValueError):
                continue
            place = after.find(messages[-2].content, len(before))
            found.add(after[len(before) : place] if after.startswith(before) and place >= 0 else "")
        header = found.pop() if len(found) == 1 else ""
        return header if header.strip() else ""

    def _find_end(self) -> tuple[int, ...]:
        for messages in _probes():
            try:
                text = self._apply(messages)
            except (TemplateError, TypeError, ValueError):
                continue
            turn = messages[-2].content
            if (place := text.find(turn)) >= 0:
                return self.encode([Written(text[place + len(turn) :])])[0]
        return ()

    def _find_opening(self) -> tuple[str | None, str]:
        """Extends small dialogues, and compares what comes of it with the whole ones."""
        openings = set()
        for messages in _probes():
            try:
                before, after = self._apply(messages[:-2]), self._apply(messages)
            except (TemplateError, TypeError, ValueError):
                continue  # a system message, say, is not for every template
            turn = messages[-2].content
            place = after.find(turn, len(before))
            if not after.startswith(before) or place < 0 or after[len(before) : place].strip():
                continue
            openings.add(after[len(before) : place])
            whole, tail = self.encode([Written(after), Written(after[place + len(turn) :])])
            if whole[len(whole) - len(tail) :] != tail:
                return None, "its tokenizer encodes what follows a turn otherwise where the turn stands before it"
        if len(openings) == 1:
            return openings.pop(), ""
        return None, "its chat template shows a turn otherwise when the next one begins"


def _in_plain_text(rows: Sequence[dict[str, str]], tools: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A dialogue with tools for a template that knows none, in the form of Hermes' models, which ``read_calls`` reads too."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = f"{HOW_TO_CALL}\n<tools>\n{listed}\n</tools>"
    system = [rows[0]["content"]] if rows and rows[0]["role"] == "system" else []
    plain = [{"role": "system", "content": "\n\n".join((*system, told))}]
    for row in rows[len(system) :]:
        content = row["content"]
        if row["role"] == TOOL:
            content = f"<tool_response>\n{content}\n</tool_response>"
        if row["role"] != "assistant" and plain[-1]["role"] == "user":  # some templates want the two to take turns
            plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{content}"}
        else:
            plain.append({"role": "assistant" if row["role"] == "assistant" else "user", "content": content})
    return plain


def _probes() -> Iterator[tuple[Message, ...]]:
    """Small dialogues, with and without a system message, of one turn and of two."""
    said = Message("assistant", "Is it big?"), Message("user", "No.\nGuess 3 more.")
    again = Message("assistant", "a"), Message("user", "x 1")
    for system in ((), (Message("system", "Play."),)):
        start = (*system, Message("user", "Guess my object."))
        yield (*start, *said)
        yield (*start, *said, *again)
        yield (*start, *again, *said)
