"""Conversations for supervised fine-tuning: rows of JSONL or parquet become token sequences.

One row is one conversation, as other trainers read them::

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, {"role": "assistant", ...}]}

Assistant messages are trained, each under the dialogue before it; how they are read, ``messages`` says. User messages that
follow each other are read as one. Rows that follow each other with the same ``group``, such as those of one episode, stay
together when rows are drawn: what they begin with alike is then computed once. Other columns are ignored.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.rllib.offline.offline_data import OfflineData

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.envs.rows import Row, id_field, read_rows
from rllib_nlac.inputs.tool_calls import tools_message
from rllib_nlac.learner.batch import POLICY, TrainingSequence
from rllib_nlac.replay.dialogues import input_files
from rllib_nlac.replay.messages import TOO_LONG, UNLEARNED, Write, add_message, notice, read_messages, tools_of
from rllib_nlac.types import Message, Seen


@dataclass(frozen=True)
class Conversation:
    """One row.

    Attributes:
        place: Where it was read, as in "chats.jsonl, line 7".
        messages: The dialogue; it begins with a system or user message.
        trained: Places of the assistant messages that are trained.
        group: Rows that follow each other with the same one stay together; None stands alone.
        notes: What was not read as it stands, see ``read_messages``.
    """

    place: str
    messages: tuple[Message, ...]
    trained: tuple[int, ...]
    group: str | None = None
    notes: Counter[str] = field(default_factory=Counter)


def parse_conversation(row: Row, thinks: bool = False, write: Write | None = None) -> Conversation:
    """Reads a row; ``thinks`` and ``write`` are those of ``read_messages``.

    Raises:
        ValueError: It is malformed; the message names file and line.
    """
    messages: list[Message] = []
    trained: list[int] = []
    tools = tools_of(row)
    given, notes = read_messages(row, thinks, bool(tools), write)
    for number, (message, learned) in enumerate(given):
        before = messages[-1].role if messages else ""
        if message.role == "system" and number:
            raise ValueError(f"{row.place}: message {number} is a system message, and only the first may be one")
        if message.role == "assistant" and before in ("", "system", "assistant"):
            raise ValueError(f"{row.place}: message {number} is the assistant's, and no user or tool message is before it")
        if learned:
            if not message.content.strip():
                raise ValueError(f"{row.place}: message {number} is trained, and its content is empty")
            trained.append(len(messages))
        add_message(messages, message)
    if not any(message.role == "assistant" for message in messages):
        raise ValueError(f"{row.place}: no message is the assistant's, so there is nothing to learn from")
    if tools:  # before all others, whose places move by one
        messages, trained = [tools_message(tools), *messages], [place + 1 for place in trained]
    return Conversation(row.place, tuple(messages), tuple(trained), id_field(row, "group"), notes)


def sequences_of(conversation: Conversation, chat: Chat) -> list[TrainingSequence]:
    """The trained turns of a conversation, each under the prompt that an engine would be given.

    Raises:
        PromptTooLong: A turn does not fit the model's context.
    """
    sequences: list[TrainingSequence] = []
    seen: Seen | None = None
    messages = conversation.messages
    for place, message in enumerate(messages):
        if message.role != "assistant" or place > conversation.trained[-1]:
            continue
        (prompt,) = chat.prompts([Wanted(messages[:place], 0, seen)])
        if isinstance(prompt, PromptTooLong):
            raise prompt
        ids = chat.encode_turn(prompt.ids, message.content)
        if len(prompt.ids) + len(ids) > chat.max_context:
            raise PromptTooLong(
                f"{conversation.place}: an answer of {len(ids)} tokens after a prompt of {len(prompt.ids)} exceeds the context "
                f"of {chat.max_context}: raise max_context"
            )
        if place in conversation.trained:
            # Each token of a gradient step counts alike.
            origin, weight = f"{conversation.place}, message {place}", float(len(ids))
            sequences.append(TrainingSequence(prompt.ids, ids, POLICY, 0, 0, weight, origin=origin))
        seen = Seen(prompt.ids, ids)
    return sequences


class ConversationData(OfflineData):
    """RLlib's ``offline_data_class``: the conversations that ``config.input_`` names.

    Args:
        config: Configuration of the algorithm.

    Attributes:
        notes: What was not read as it stands in the files, and how often.
        fingerprint: Tells the conversations that were read from others.
    """

    def __init__(self, config: Any) -> None:  # RLlib's own would read the files as steps of arrays
        self.config = config
        self.notes: Counter[str] = Counter()
        self.fingerprint = ""

    @property
    def notice(self) -> str | None:
        """What a person should know of the conversations that were read last."""
        return notice(self.notes)

    def sequences(self, chat: Chat) -> list[list[TrainingSequence]]:
        """The trained turns of every group of conversations that fit the context, in the order of files and lines.

        Raises:
            ValueError: A row is malformed, or there is none to learn from.
            FileNotFoundError: A name matches no file.
        """
        digest, found, last = hashlib.sha256(), list[list[TrainingSequence]](), ""
        group: str | None = None
        self.notes = Counter()
        for row in read_rows(input_files(self.config.input_)):
            conversation = parse_conversation(row, chat.thinks, chat.template.turn)
            digest.update(repr((conversation.messages, conversation.trained)).encode())
            self.notes += conversation.notes
            if not conversation.trained:
                self.notes[UNLEARNED] += 1
                continue
            try:
                turns = sequences_of(conversation, chat)
                if found and conversation.group is not None and conversation.group == group:
                    found[-1] += turns
                else:
                    found.append(turns)
                group = conversation.group
            except PromptTooLong as error:
                self.notes[TOO_LONG] += 1
                last = f"; of those that are too long the last one: {error}"
        self.fingerprint = digest.hexdigest()
        if not found:
            why = self.notice or f"config.input_: {self.config.input_!r} holds no conversation"
            raise ValueError(f"no conversation is left to learn from: {why}{last}")
        return found


def epochs(count: int, start: int, size: int, seed: int) -> tuple[list[int], float]:
    """Places of the next items of an endless, shuffled pass over ``count`` items.

    Args:
        count: Number of items.
        start: Number of items that were drawn before.
        size: Number of items to draw.
        seed: Seeds the order of every pass.

    Returns:
        The places, and how many passes are done after them.
    """
    orders: dict[int, Sequence[int]] = {}
    places = []
    for number in range(start, start + size):
        which, at = divmod(number, count)
        if which not in orders:
            orders[which] = np.random.default_rng([seed, which]).permutation(count).tolist()
        places.append(orders[which][at])
    return places, (start + size) / count
