"""Logged dialogues: read into the replay buffer, and written in the same form by a run.

One row is one episode, in JSONL or parquet::

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, {"role": "assistant", ...}, ...],
     "rewards": [0.0, 1.0], "terminated": true, "truncated": false, "success": true, "task_id": "..."}

Assistant messages are the actions, by whatever policy; user and tool messages are what the environment said. ``rewards`` has
one number an action; ``reward`` in its place is paid at the end. Without ``terminated`` and ``truncated`` an episode counts as
terminated. ``success`` and ``task_id`` may be missing. How messages and a column ``tools`` are read, ``messages`` says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_data import OfflineData

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.envs.answers import AnswerError, reward_of
from rllib_nlac.envs.rows import Row, id_field, read_rows, short_id
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import ENVIRONMENT, UNLEARNED_STEPS, answer_at, environment_of, step_outputs, unlearned_steps
from rllib_nlac.inputs.examples import data_files
from rllib_nlac.inputs.texts import readable
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.replay.messages import TOO_LONG, UNLEARNED, Write, add_message, notice, read_messages, tools_of
from rllib_nlac.types import ANSWER, TOOLS, Generation, Message, Seen, dialogue_after, goes_on

NAMES = ("task_id", ENVIRONMENT)
INPUT = "input"  # begins the names of episodes that were read

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dialogue:
    """A logged episode.

    Attributes:
        system_prompt: May be empty.
        answers: What the environment said, as messages: one more than there are actions.
        actions: What the agent said.
        learned: Which actions are learned from.
        rewards: One for each action.
        terminated: The task was decided.
        truncated: A limit ended the episode.
        success: None where the log does not say.
        task_id: Likewise.
        notes: What was not read as it stands, see ``read_messages``.
        environment: Registered name of the environment where a task set played several; its prompts are asked.
        tools: Schemas of what the agent could call.
    """

    system_prompt: str
    answers: tuple[tuple[Message, ...], ...]
    actions: tuple[str, ...]
    learned: tuple[bool, ...]
    rewards: tuple[float, ...]
    terminated: bool
    truncated: bool
    success: bool | None = None
    task_id: str | None = None
    notes: Counter[str] = field(default_factory=Counter)
    environment: str | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def observations(self) -> tuple[str, ...]:
        """The answers as texts."""
        return tuple("\n".join(message.content for message in answer) for answer in self.answers)


def parse_dialogue(row: Row, thinks: bool = False, write: Write | None = None) -> Dialogue:
    """Reads a row; ``thinks`` and ``write`` are those of ``read_messages``.

    Raises:
        ValueError: It is malformed; its file and line are named.
    """
    fields = {key: value for key, value in row.fields.items() if value is not None}
    tools = tools_of(row)
    messages, notes = read_messages(row, thinks, bool(tools), write)
    system, answers, actions, learned = "", [list[Message]()], list[str](), list[bool]()
    for number, (message, is_learned) in enumerate(messages):
        if message.role == "system" and number == 0:
            system = message.content
        elif message.role == "assistant":
            actions.append(message.content)
            learned.append(is_learned)
            answers.append([])
        else:
            # A later system message is the environment's, too.
            add_message(answers[-1], message._replace(role="user") if message.role == "system" else message)
    if not actions:
        raise ValueError(f"{row.place}: no message is the assistant's, so there is nothing to learn from")
    flags = {key: fields.get(key) for key in ("terminated", "truncated", "success")}
    for key, value in flags.items():
        if value is not None and not isinstance(value, bool | np.bool_):
            raise ValueError(f"{row.place}: {key!r} must be true or false, and it is {value!r:.80}")
    terminated, truncated = bool(flags["terminated"]), bool(flags["truncated"])
    if terminated and truncated:
        raise ValueError(f"{row.place}: an episode is either terminated or truncated, and this one is both")
    if flags["terminated"] is False and not truncated:
        raise ValueError(
            f"{row.place}: 'terminated' is false and 'truncated' is not true, and only episodes that have ended can be learned "
            "from: say truncated: true where one was cut off"
        )
    task, environment = (None if name is None else readable(name)[0] for name in (id_field(row, key) for key in NAMES))
    return Dialogue(
        system,
        tuple(tuple(answer) or (Message("user", ""),) for answer in answers),
        tuple(actions),
        tuple(learned),
        _rewards(row, fields, len(actions)),
        terminated or not truncated,
        truncated,
        None if flags["success"] is None else bool(flags["success"]),
        task,
        notes,
        environment,
        tools,
    )


def _rewards(row: Row, fields: Mapping[str, Any], count: int) -> tuple[float, ...]:
    if ("rewards" in fields) == ("reward" in fields):
        raise ValueError(f"{row.place}: either 'rewards', one for each action, or 'reward', paid at the end, must be given")
    values = fields.get("rewards", [*[0.0] * (count - 1), fields.get("reward")])
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{row.place}: there are {count} actions, and 'rewards' is {values!r:.60}")
    if (flag := next((value for value in values if isinstance(value, bool)), None)) is not None:
        raise ValueError(f"{row.place}: a reward must be a finite number, and one is {flag}")
    try:
        return tuple(reward_of(value, "a reward") for value in values)
    except AnswerError as error:
        raise ValueError(f"{row.place}: {error}") from error


def to_episode(
    dialogue: Dialogue,
    name: str,
    chat: Chat,
    prompts: PromptSet,
    action_format: str,
    room: int,
    history_turns: int | None = None,
) -> SingleAgentEpisode:
    """A dialogue as an EnvRunner would have recorded it; log-probabilities are NaN, since nobody knows them.

    Args:
        dialogue: The dialogue.
        name: The episode's id.
        chat: Writes the prompts.
        prompts: Say how a dialogue begins.
        action_format: As in the config.
        room: Tokens that an action may need.
        history_turns: As in the config.

    Raises:
        PromptTooLong: A turn does not fit the model's context.
    """
    episode = SingleAgentEpisode(id_=name, observation_space=TextSpace(), action_space=TextSpace())
    info = {"system_prompt": dialogue.system_prompt, "task_id": dialogue.task_id}
    episode.custom_data[UNLEARNED_STEPS] = [t for t, learned in enumerate(dialogue.learned) if not learned]
    first = info if dialogue.environment is None else {**info, ENVIRONMENT: dialogue.environment}
    observations, tools = dialogue.observations, list(dialogue.tools)
    episode.add_env_reset(observations[0], {**first, TOOLS: tools} if tools else first)
    messages = prompts.state(dialogue.system_prompt, observations[0], action_format, tools)
    seen: Seen | None = None
    for t, (action, answer) in enumerate(zip(dialogue.actions, dialogue.answers[1:], strict=True)):
        (prompt,) = chat.prompts([Wanted(messages, room, seen)])
        if isinstance(prompt, PromptTooLong):
            raise prompt
        ids = chat.encode_turn(prompt.ids, action)
        if len(prompt.ids) + len(ids) > chat.max_context:
            raise PromptTooLong(
                f"a logged answer of {len(ids)} tokens after a prompt of {len(prompt.ids)} exceeds the context of "
                f"{chat.max_context}"
            )
        generation = Generation(prompt.ids, ids, np.full(len(ids), np.nan, np.float32), True, 0)
        last = t == len(dialogue.actions) - 1
        # The last observation is in no prompt of these; what no prompt could hold of it would only fill the buffer.
        episode.add_env_step(
            observations[t + 1][: chat.max_characters],
            action,
            dialogue.rewards[t],
            {
                **info,
                **({"success": dialogue.success} if last else {}),
                **({ANSWER: [message.row for message in answer]} if tools and not last else {}),
            },
            terminated=last and dialogue.terminated,
            truncated=last and dialogue.truncated,
            extra_model_outputs=step_outputs(generation, messages),
        )
        state, messages = messages, dialogue_after(messages, action, answer, history_turns)
        seen = generation.seen if goes_on(messages, state) else None
    return episode


class DialogueData(OfflineData):
    """RLlib's ``offline_data_class``: the dialogues that ``config.input_`` names.

    Args:
        config: Configuration of the algorithm.
    """

    def __init__(self, config: Any) -> None:  # RLlib's own would read the files as steps of arrays
        self.config = config
        self.notes: Counter[str] = Counter()  # of the dialogues that were read last
        self.chat: Chat | None = None
        self.fingerprint = ""  # tells the dialogues that were read last from others

    def dialogues(self) -> list[Dialogue]:
        """All rows, in the order of files and lines.

        Raises:
            ValueError: A row is malformed, or there is none; file and line are named.
            FileNotFoundError: A name matches no file.
        """
        manner = () if self.chat is None else (self.chat.thinks, self.chat.template.turn)
        dialogues = [parse_dialogue(row, *manner) for row in read_rows(input_files(self.config.input_))]
        if not dialogues:
            raise ValueError(f"config.input_ {self.config.input_!r}: there are no dialogues")
        return dialogues

    @property
    def notice(self) -> str | None:
        """What a person should know of the dialogues that were read last."""
        return notice(self.notes)

    def episodes(self, chat: Chat, prompts: PromptSet) -> list[SingleAgentEpisode]:
        """Those that fit the model's context and have a turn to learn from; ``notice`` tells of the others.

        Raises:
            ValueError: There is none.
        """
        episodes, digest, last = [], hashlib.sha256(), ""
        self.notes, self.chat = Counter(), chat
        for number, dialogue in enumerate(self.dialogues()):
            digest.update(repr(dialogue).encode())
            self.notes += dialogue.notes
            if not any(dialogue.learned):
                self.notes[UNLEARNED] += 1
                continue
            own = prompts if dialogue.environment is None else self.config.prompts_for(dialogue.environment)
            try:
                episode = to_episode(
                    dialogue,
                    f"{INPUT}-{number:010d}",
                    chat,
                    own,
                    self.config.action_format,
                    self.config.model_defaults.max_action_tokens,
                    self.config.history_turns,
                )
                episodes.append(episode)
            except PromptTooLong as error:
                self.notes[TOO_LONG] += 1
                last = f"; of those that are too long the last one: {error}"
        self.fingerprint = digest.hexdigest()
        if not episodes:
            raise ValueError(f"no dialogue is left to learn from: {self.notice}{last}")
        return episodes


def input_files(names: str | Sequence[str]) -> list[str]:
    """The files that ``input_`` names: files, patterns or folders of them.

    Raises:
        FileNotFoundError: A name matches none.
    """
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser().absolute()
        folder = [str(p) for p in path.iterdir() if p.suffix in (".jsonl", ".ndjson", ".parquet")] if path.is_dir() else []
        matches = folder or [str(Path(file).absolute()) for file in data_files(name) if not Path(file).is_dir()]
        if not matches:
            raise FileNotFoundError(f"config.input_: no JSONL or parquet file at {name!r}")
        found += sorted(matches)
    return found


def write_dialogues(path: Path, episodes: Sequence[SingleAgentEpisode]) -> None:
    """Writes whole episodes as JSONL, in a file that is complete or not there.

    Where it cannot be written a warning says so, and the next one is tried: a record is not worth a run.

    Args:
        path: Path of the file; its folder is made.
        episodes: As an EnvRunner returns them.
    """
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            for episode in episodes:
                file.write(json.dumps(as_row(episode), ensure_ascii=False) + "\n")
        unfinished.replace(path)
    except OSError as error:
        logger.warning("config.output: %d episodes were not recorded: cannot write %s: %s", len(episodes), path, error)
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def as_row(episode: SingleAgentEpisode) -> dict[str, Any]:
    """An episode as a row."""
    first, last = episode.get_infos(0), episode.get_infos(-1)
    system = first.get("system_prompt") or ""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    unlearned = unlearned_steps(episode)
    messages.append({"role": "user", "content": episode.get_observations(0)})
    for t, action in enumerate(episode.get_actions()):
        weight = {"weight": 0} if t in unlearned else {}
        messages.append({"role": "assistant", "content": action, **weight})
        messages += [message.row for message in answer_at(episode, t)]
    success = last.get("success")
    return {
        "messages": messages,
        "rewards": [float(reward) for reward in episode.get_rewards()],
        "terminated": bool(episode.is_terminated),
        "truncated": bool(episode.is_truncated and not episode.is_terminated),  # some environments say both
        "success": None if success is None else bool(success),
        "task_id": short_id(first.get("task_id")),
        **({ENVIRONMENT: name} if (name := environment_of(episode)) else {}),
        **({TOOLS: tools} if (tools := first.get(TOOLS)) else {}),
    }
