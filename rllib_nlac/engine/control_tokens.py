"""Control tokens in texts that have no right to them: where they stand, and where to cut a text so that none is read.

A tokenizer reads a control token wherever its text stands, whoever wrote it. A text that is cut inside every such place and
encoded piece by piece keeps all its characters and yields no control token there, with any tokenizer.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
_MARKER = re.compile(r"[<\[({].+[>\])}]", re.DOTALL)
# Of HTML, for which some vocabularies have tokens.
_ELEMENT = re.compile(
    r"</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|t[drh]|table|tbody|tfoot|thead"
    r"|u|ul)>"
)
_THINKING = ("<think>", "</think>")  # what this package's parsers read
_ASCII = "".join(map(chr, range(1, 128)))


class ControlTokens:
    """The control tokens of a tokenizer.

    These are its special tokens, and of its other added tokens those that mark a part of a dialogue, such as ``<tool_call>``.
    ``<think>`` and ``</think>`` are of the latter, special or not. Added words, runs of spaces and elements of HTML that the
    chat template does not use are plain text.

    Args:
        tokenizer: Fast or slow, of any kind.

    Attributes:
        special_ids: Ids that no text holds, not even a turn of the agent.
        thinking_ids: Those that begin and end a reasoning block, special or not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        special: dict[str, int] = {}
        others: dict[str, int] = {}
        for id, token in tokenizer.added_tokens_decoder.items():
            is_special = token.special or token.content in tokenizer.all_special_tokens
            if is_special and token.content not in _THINKING:
                special[token.content] = id
            elif is_special or _marks_a_part(token.content, template):
                others[token.content] = id
        # The agent's own turns may hold the others: there they are what it sampled.
        self._of_agent = _Strings(special)
        self.special_ids = self._of_agent.ids
        self.thinking_ids = {id for text, id in (special | others).items() if text in _THINKING}
        self._of_others = _Strings(special | others)
        self._names = {id: text for text, id in (special | others).items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer: Any = backend.normalizer if backend is not None else None
        self._changes_ascii = self._normalizer is not None and self._normal(_ASCII).replace("▁", " ").strip() != _ASCII.strip()

    def may_stand_in(self, role: str, text: str) -> bool:
        """Whether a message may hold a control token or a part of one; False for nearly every text, and then at once."""
        strings = self._strings(role)
        return strings.may_stand_in(text) or (self._is_folded(text) and strings.pattern.search(self._normal(text)) is not None)

    def spans(self, role: str, text: str) -> list[Span]:
        """Where a message holds control tokens, or begins or ends with a part of one; in order, none overlapping."""
        strings = self._strings(role)
        found = [match.span() for match in strings.pattern.finditer(text)] + list(strings.parts(text))
        if self._is_folded(text):
            found += [span for id, span in self._read(text) if id in strings.ids]
        return _merged(found)

    def pieces(self, role: str, text: str, marked: Sequence[Span]) -> list[str]:
        """Cuts a text inside every control token that takes a character from a marked place.

        Args:
            role: Whose control tokens count; of a whole dialogue "user", for whom all do.
            text: The text.
            marked: Places that hold no control token by right; in order, none overlapping.
        """
        starts, strings = [start for start, _ in marked], self._strings(role)

        def is_marked(start: int, end: int) -> bool:
            place = bisect_right(starts, end - 1) - 1  # the last that begins before the end
            return place >= 0 and marked[place][1] > start

        cuts, place = [0], 0
        while match := strings.pattern.search(text, place):
            place = match.end()
            if is_marked(*match.span()):
                place = match.start() + 1
                cuts.append(place)
        cuts.append(len(text))
        if self._is_folded(text):
            cuts = self._cut_where_read(text, cuts, is_marked, strings)
        return [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]

    def _cut_where_read(
        self, text: str, cuts: list[int], is_marked: Callable[[int, int], bool], strings: _Strings
    ) -> list[int]:
        """Cuts also inside what the tokenizer's normalizer makes a control token of, such as full-width letters."""
        while True:
            found = {
                start + a + 1
                for start, end in itertools.pairwise(cuts)
                for id, (a, b) in self._read(text[start:end])
                if id in strings.ids and b - a > 1 and is_marked(start + a, start + b)
            }
            if not found:
                return cuts
            cuts = sorted(found.union(cuts))

    def _strings(self, role: str) -> _Strings:
        return self._of_agent if role == "assistant" else self._of_others

    def _is_folded(self, text: str) -> bool:
        """Whether the tokenizer may see other characters than these."""
        return self._normalizer is not None and (self._changes_ascii or not text.isascii())

    def _normal(self, text: str) -> str:
        return str(self._normalizer.normalize_str(text))

    def _read(self, text: str) -> Iterator[tuple[int, Span]]:
        """The control tokens that are read in a text, each with its place, spaces at its ends left out."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if id not in self._names:
                continue
            core = text[start:end]
            name = self._normal(self._names[id]).strip("▁ ")
            if name in self._normal(core):  # the unknown token, say, stands for characters that do not name it
                yield id, (start + len(core) - len(core.lstrip()), end - len(core) + len(core.rstrip()))


class _Strings:
    """Some control tokens' texts, as they are looked for."""

    def __init__(self, ids: dict[str, int]) -> None:
        longest_first = sorted(ids, key=len, reverse=True)
        self.ids = frozenset(ids.values())
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = max(map(len, ids), default=0)
        self._all = "\0".join(["", *ids, ""])
        self._firsts, self._lasts = {text[0] for text in ids}, {text[-1] for text in ids}
        self._edges = tuple(self._firsts | self._lasts)

    def may_stand_in(self, text: str) -> bool:
        if not any(edge in text for edge in self._edges):
            return len(text) <= self._longest and self._is_infix(text)
        return self.pattern.search(text) is not None or any(True for _ in self.parts(text))

    def parts(self, text: str) -> Iterator[Span]:
        """Places at a text's ends that a neighbour could complete to a control token."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if end - begin <= self._longest and self._is_infix(text):
            yield begin, end
            return
        for place in range(max(end - self._longest, begin), end):
            if text[place] in self._firsts and f"\0{text[place:end]}" in self._all:
                yield place, end
                break
        for place in range(min(begin + self._longest, end), begin, -1):
            if text[place - 1] in self._lasts and f"{text[begin:place]}\0" in self._all:
                yield begin, place
                break

    def _is_infix(self, text: str) -> bool:
        return (core := text.strip()) != "" and core in self._all


def _marks_a_part(text: str, template: str) -> bool:
    """Whether an added token that is not special marks a part of a dialogue."""
    if not _MARKER.fullmatch(text.strip()):
        return False
    return not _ELEMENT.fullmatch(text.strip()) or text.strip() in _THINKING or text.strip() in template


def _merged(spans: Collection[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
