"""An agent's harness as the environment: a program that calls a chat endpoint is played unchanged."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from rllib_nlac.envs.adapters.harness_process import OWN_VARIABLES, Endpoint, Episode, shared_endpoint
from rllib_nlac.envs.base import EpisodeLost, Reply, TaskId, TextEnv, check_number, variables_for
from rllib_nlac.envs.rows import Row, all_rows, files_of
from rllib_nlac.inputs.tool_calls import Call, read_calls

MAX_TASK = 100_000  # bytes of a row: Linux takes 128 KiB in one environment variable


@lru_cache(maxsize=8)
def _load(files: tuple[str, ...]) -> list[tuple[Row, str]]:
    """All rows, and each as JSON; the slots of an EnvRunner share them."""
    rows = [(row, json.dumps(dict(row.fields), default=str)) for row in all_rows(files)]
    for row, text in rows:
        if len(text) > MAX_TASK:
            raise ValueError(f"{row.place}: {len(text)} bytes as JSON, and NLAC_TASK holds {MAX_TASK}: let the row name a file")
    return rows


class Harness(TextEnv[tuple[str, int]]):
    """A program that calls an OpenAI-compatible endpoint, such as an agent's harness, played unchanged.

    Each episode starts the command, with ``OPENAI_BASE_URL`` set to an address of its own. What it asks there is the
    observation, what the agent says is the answer. In the end it prints its reward, as ``{"reward": 1.0, "success": true}``.
    A key ``text`` beside these is the last observation.

    The dialogue is that of the agent: its turns as they were sampled, however the command words them when it sends them
    back, and the other messages. A request that changes these, leaves some out or offers other tools is no next step of that
    dialogue. Then the episode is left out and counted, as ``stop_reason_history_edited``, and so is one whose command fails,
    takes too long or gives no reward.

    Args:
        command: Program and arguments. A shell can put variables into them: ``[sh, -c, "my_agent --url $OPENAI_BASE_URL"]``.
        cwd: The folder that it runs in.
        env: Environment variables of the command; None as a value takes that of the trainer. It sees no other variable but
            PATH, HOME, TMPDIR (a folder of the episode), LANG, NO_PROXY, ``OPENAI_...`` and ``NLAC_...``.
        reward: "stdout_json": it prints the reward as its last line; "file": it writes it to the file NLAC_REWARD_FILE.
        train_files: JSONL or parquet files of the split "train". A row reaches the command as JSON in NLAC_TASK; without files
            a task is NLAC_SEED alone.
        val_files: Those of the split "eval".
        start_timeout_s: How long the command may take until its first request.
        turn_timeout_s: How long it may take from an answer to its next request, or to its end.
        max_turns: Answers per episode; a command that asks for more is killed. Let it be no higher than a limit of the
            command's own, at which some ask for a summary in another dialogue.
        split: "train" or "eval".

    Raises:
        ValueError: The program or folder does not exist, a variable is missing, or a key has another value than these.
    """

    row_schema = None  # a row of a task file may not choose this environment, so none can name a command

    def __init__(
        self,
        command: Sequence[str],
        cwd: str = ".",
        env: Mapping[str, str | int | float | None] | None = None,
        reward: str = "stdout_json",
        train_files: str | Sequence[str] = (),
        val_files: str | Sequence[str] = (),
        start_timeout_s: float = 120.0,
        turn_timeout_s: float = 120.0,
        max_turns: int = 30,
        split: str = "train",
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError(f"env_config.command is {command!r:.80} and must be a list of texts, as in [python, my_agent.py]")
        if not os.path.isdir(cwd):
            raise ValueError(f"env_config.cwd: there is no folder {cwd!r}")
        if reward not in ("stdout_json", "file"):
            raise ValueError(f"env_config.reward is {reward!r:.80} and must be stdout_json or file")
        check_number("start_timeout_s", start_timeout_s, 0)
        check_number("turn_timeout_s", turn_timeout_s, 0)
        self._command, self._cwd, self._rewards = list(command), os.path.abspath(cwd), reward == "file"
        self._variables = variables_for(env, "env_config.env")
        if taken := [name for name in OWN_VARIABLES if name in self._variables]:
            raise ValueError(f"env_config.env sets {taken[0]}, which this environment sets itself: leave it out")
        program = os.path.join(self._cwd, command[0]) if "/" in command[0] else command[0]
        if shutil.which(program, path=self._variables.get("PATH")) is None:
            raise ValueError(f"env_config.command: there is no program {program!r}{'' if '/' in program else ' on the PATH'}")
        self._limits = {"start_timeout_s": start_timeout_s, "turn_timeout_s": turn_timeout_s}
        self._rows = _load(files_of(split, train_files, val_files)) if train_files or val_files else []
        self._episode: Episode | None = None
        self._endpoint: Endpoint | None = None
        self._ends: Any = None  # ends the episode, once, also where nobody calls close()
        self._system = ""
        self._asked: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of the tools called, by the ids of the calls

    @property
    def system_prompt(self) -> str:
        return self._system

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._asked.get("tools") or []

    def sample_task(self, spec: str | None) -> TaskId[tuple[str, int]]:
        number, seed = (int(self.np_random.integers(high)) for high in (len(self._rows) or 2**31, 2**31))
        if spec is not None:
            number = int(spec) if str(spec).isdecimal() else -1
        if not 0 <= number < (len(self._rows) or 2**31):
            kind = f"the rows 0 to {len(self._rows) - 1}" if self._rows else "seeds below 2**31"
            raise ValueError(f"task {spec!r:.80} does not exist; tasks are {kind}")
        return TaskId(str(number), (self._rows[number][1], seed) if self._rows else ("", number))

    def begin(self, task: tuple[str, int]) -> str:
        self._end()
        self._endpoint = shared_endpoint()  # held between episodes, too
        row, seed = task
        variables = {**self._variables, "NLAC_SEED": str(seed), **({"NLAC_TASK": row} if row else {})}
        self._episode = Episode(self._command, self._cwd, variables, self._rewards)
        self._ends, self._names = weakref.finalize(self, self._episode.end), {}
        try:
            asked = self._episode.wait(self._limits["start_timeout_s"], "start_timeout_s")
            if asked is None:
                raise self._episode.lost("harness_no_request", "ended before it made a request to $OPENAI_BASE_URL")
        except EpisodeLost:
            self._end()
            raise
        self._asked = asked
        self._system = "\n\n".join(said["content"] for said in asked["messages"] if said["role"] == "system")
        opening = [said for said in asked["messages"] if said["role"] != "system"]
        if all(said["role"] == "user" for said in opening):
            return "\n\n".join(said["content"] for said in opening)
        return "\n\n".join(
            f"{said['role'].title()}: {said['content']}" for said in opening
        )  # examples, before the agent speaks

    def reply(self, task: tuple[str, int], action: str) -> Reply:
        assert self._episode is not None
        ended = True
        try:
            self._episode.answer(self._message(action))
            asked = self._episode.wait(self._limits["turn_timeout_s"], "turn_timeout_s")
            if asked is None:
                result = self._episode.result()
                usual = "The task is solved." if result["success"] else "The task has failed."
                return Reply(str(result["text"] or usual), result["reward"], success=result["success"])
            news = self._news(asked)
            self._asked, ended = asked, self._turn >= self.max_turns
            return Reply(news[0]["content"]) if [said["role"] for said in news] == ["user"] else Reply("", messages=news)
        finally:
            if ended:
                self._end()

    def _message(self, action: str) -> dict[str, Any]:
        """A turn as the message of an answer. Calls are made of it where tools are offered and each can be read."""
        content, calls = read_calls(action) if self.tools else (action, [])
        if not calls or not all(isinstance(call, Call) for call in calls):
            return {"role": "assistant", "content": action}
        made = []
        for number, call in enumerate(call for call in calls if isinstance(call, Call)):
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            made.append({"id": f"call_{self._turn}_{number}", "type": "function", "function": function})
            self._names[made[-1]["id"]] = call.name  # type: ignore[index]
        return {"role": "assistant", "content": content or None, "tool_calls": made}

    def _news(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of a request that are new to the agent.

        Raises:
            EpisodeLost: It is no next step of the dialogue.
        """
        assert self._episode is not None
        before, after = _outline(self._asked["messages"]), _outline(asked["messages"])
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        if (asked.get("tools") or []) != self.tools:
            raise self._episode.lost("history_edited", "offers other tools than in its request before")
        if common < len(before) or len(after) < len(before) + 2 or after[common][0] != "assistant":
            was = f"{before[common]!s:.100}" if common < len(before) else "the agent's turn and something new"
            now = f"{after[common]!s:.100}" if common < len(after) else "nothing"
            raise self._episode.lost("history_edited", f"sends another dialogue: message {common + 1} was {was} and is {now}")
        count = sum(role != "assistant" for role, _ in after[common:])
        known = {tool["function"]["name"] for tool in self.tools}
        news: list[dict[str, Any]] = []
        for said in [said for said in asked["messages"] if said["role"] != "assistant"][-count:]:
            if said["role"] == "tool":
                ours = {"tool_call_id": said["id"], "name": self._names[said["id"]]} if said["id"] in self._names else {}
                news.append({"role": "tool", "content": said["content"], **(ours if ours.get("name") in known else {})})
            else:
                news.append({"role": "user", "content": said["content"]})
        return news

    def _end(self) -> None:
        if self._ends is not None:
            self._ends()

    def close(self) -> None:
        self._end()
        self._endpoint = self._episode = None


def _outline(messages: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Roles and texts of a dialogue; a run of the agent's messages is one turn, whatever its words."""
    turns = [(said["role"], "" if said["role"] == "assistant" else said["content"]) for said in messages]
    return [turn for turn, before in zip(turns, [None, *turns], strict=False) if turn != before or turn[0] != "assistant"]
