"""Conversations for supervised fine-tuning: rows of JSONL or parquet become token sequences.

One row is one conversation, as other trainers read them::

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, {"role": "assistant", ...}]}

Assistant messages are trained, each under the dialogue before it. ``"weight": 0`` in one leaves it out. User and tool messages
that follow each other are read as one. Rows that follow each other with the same ``group``, such as those of one episode, stay
together when rows are drawn: what they begin with alike is then computed once. Other columns are ignored.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.rllib.offline.offline_data import OfflineData

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.envs.rows import Row, id_field, read_rows
from rllib_nlac.envs.spaces import MAX_TEXT_LENGTH
from rllib_nlac.inputs.texts import readable
from rllib_nlac.learner.batch import POLICY, TrainingSequence
from rllib_nlac.replay.dialogues import ROLES, input_files
from rllib_nlac.types import Message, Seen

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversation:
    """One row.

    Attributes:
        place: Where it was read, as in "chats.jsonl, line 7".
        messages: The dialogue; it begins with a system or user message.
        trained: Places of the assistant messages that are trained.
        group: Rows that follow each other with the same one stay together; None stands alone.
        num_replaced: Characters that no tokenizer reads, for which U+FFFD stands.
    """

    place: str
    messages: tuple[Message, ...]
    trained: tuple[int, ...]
    group: str | None = None
    num_replaced: int = 0


def parse_conversation(row: Row) -> Conversation:
    """Reads a row.

    Raises:
        ValueError: It is malformed; the message names file and line.
    """
    given = row.fields.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError(f"{row.place}: 'messages' must be a list of messages, and it is {given!r:.60}")
    messages: list[Message] = []
    trained: list[int] = []
    num_replaced = 0
    for number, message in enumerate(given):
        role, content = _role_and_content(row, number, message)
        content, replaced = readable(content)
        num_replaced += replaced
        before = messages[-1].role if messages else ""
        if role == "system" and number:
            raise ValueError(f"{row.place}: message {number} is a system message, and only the first may be one")
        if role == "assistant":
            if before in ("", "system", "assistant"):
                raise ValueError(f"{row.place}: message {number} is the assistant's, and no user or tool message is before it")
            if _weight(row, number, message):
                trained.append(len(messages))
        if before == "user" and role in ("user", "tool"):
            messages[-1] = Message("user", f"{messages[-1].content}\n{content}")
        else:
            messages.append(Message("user" if role == "tool" else role, content))
    if not trained:
        raise ValueError(f"{row.place}: no message of the assistant's is trained, so there is nothing to learn from")
    return Conversation(row.place, tuple(messages), tuple(trained), id_field(row, "group"), num_replaced)


def _role_and_content(row: Row, number: int, message: Any) -> tuple[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if isinstance(content, list):  # parts, as of a model that reads pictures too
        texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    if role not in ROLES:
        raise ValueError(f"{row.place}: message {number} must have a role of {', '.join(ROLES)}, and it has {role!r:.60}")
    if not isinstance(content, str) or (role == "assistant" and not content.strip()):
        raise ValueError(f"{row.place}: message {number} must have a content, a text that is not empty, not {content!r:.60}")
    if len(content) > MAX_TEXT_LENGTH:
        raise ValueError(f"{row.place}: message {number} has {len(content)} characters, and may have {MAX_TEXT_LENGTH}")
    return str(role), content


def _weight(row: Row, number: int, message: Mapping[str, Any]) -> bool:
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"{row.place}: message {number} has the weight {weight!r:.60}, and it must be 0 or 1")
    return weight != 0


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
        ids = chat.encode(message.content)
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
        num_too_long: Conversations that exceed the context and are left out.
        fingerprint: Tells the conversations that were read from others.
    """

    def __init__(self, config: Any) -> None:  # RLlib's own would read the files as steps of arrays
        self.config = config
        self.num_too_long = 0
        self.fingerprint = ""

    def sequences(self, chat: Chat) -> list[list[TrainingSequence]]:
        """The trained turns of every group of conversations that fit the context, in the order of files and lines.

        Raises:
            ValueError: A row is malformed, there is none, or none fits.
            FileNotFoundError: A name matches no file.
        """
        digest, found, num_replaced, last = hashlib.sha256(), list[list[TrainingSequence]](), 0, ""
        group: str | None = None
        self.num_too_long = 0
        for row in read_rows(input_files(self.config.input_)):
            conversation = parse_conversation(row)
            digest.update(repr((conversation.messages, conversation.trained)).encode())
            num_replaced += conversation.num_replaced
            try:
                turns = sequences_of(conversation, chat)
                if found and conversation.group is not None and conversation.group == group:
                    found[-1] += turns
                else:
                    found.append(turns)
                group = conversation.group
            except PromptTooLong as error:
                self.num_too_long, last = self.num_too_long + 1, str(error)
        self.fingerprint = digest.hexdigest()
        if not found:
            none = f"none of {self.num_too_long} fits the model; the last one: {last}" if last else "there are no conversations"
            raise ValueError(f"config.input_ {self.config.input_!r}: {none}")
        if self.num_too_long or num_replaced:
            logger.warning(
                "config.input_: %d conversations exceed the context and are left out; %d characters that no tokenizer reads "
                "were replaced",
                self.num_too_long,
                num_replaced,
            )
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
