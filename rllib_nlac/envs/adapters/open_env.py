"""OpenEnv's environments (github.com/huggingface/OpenEnv), by the wire protocol of their servers, without their package."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from rllib_nlac.envs.answers import AnswerError, reward_of, truth_of
from rllib_nlac.envs.base import EpisodeLost, Reply, TaskId, check_number
from rllib_nlac.envs.spaces import MAX_TEXT_LENGTH
from rllib_nlac.envs.tools import ForeignToolEnv, ToolError
from rllib_nlac.inputs import plain_json
from rllib_nlac.inputs.tool_calls import Call

MAX_FRAME = 8 << 20  # bytes
MAX_SCHEMA = 20_000  # characters of tools or of an action's schema in the system prompt
FAILED, FULL = "openenv_failed", "openenv_full"
AGENTS_OWN = ("VALIDATION_ERROR", "EXECUTION_ERROR", "INVALID_JSON")  # what an action may have caused
CALL = "Each turn is one tool call."


class OpenEnv(ForeignToolEnv[dict[str, Any]]):
    """An environment behind a server of OpenEnv.

    An action with one required field is the turn's text. Any other action is a JSON object, and the system prompt shows its
    schema. Where the server offers MCP tools, an action is a call of one. A server that lists tasks is asked for those of
    ``split``; otherwise a seed makes the task.

    What the server refuses of an action is answered in words and costs a turn. Where the server fails, is full or closes the
    connection, the episode is left out and counted (``stop_reason_openenv_failed``, ``stop_reason_openenv_full``), and the next
    one connects again. A server needs ``max_concurrent_envs`` of at least as many environments as a run has.

    Args:
        url: Address of the server, as in ``http://localhost:8000``.
        observation_key: Field of the observation that the agent reads. None shows the only field, or all of them as JSON.
        headers_env: Headers of every request, each with the environment variable that holds its value.
        timeout_s: Seconds that the server may take for an answer.
        reset_args: Further arguments of the server's ``reset``.
        split: Name of the tasks to play, where the server lists tasks.
        system_prompt: Text before what is said of the actions.
        max_turns: Actions per episode.
        success_return: Return from which an episode that the server ends counts as a success.

    Raises:
        ValueError: An argument is wrong, the server does not answer, or it has no tasks of this split.
    """

    def __init__(
        self,
        url: str = "",
        observation_key: str | None = None,
        headers_env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        reset_args: Mapping[str, Any] | None = None,
        split: str = "train",
        system_prompt: str = "",
        max_turns: int = 50,
        success_return: float = 1.0,
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        check_number("timeout_s", timeout_s, 0.001)
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(f"env_config.url is {url!r:.80} and must be the server's address, as in http://localhost:8000")
        self.url, self._key, self._timeout_s = url.rstrip("/"), observation_key, timeout_s
        self._reset_args, self._success_return = dict(reset_args or {}), success_return
        self._headers = {}
        for name, variable in (headers_env or {}).items():
            if not os.environ.get(variable):
                raise ValueError(f"env_config.headers_env: {name} needs the environment variable {variable}, which is not set")
            self._headers[name] = os.environ[variable]
        self._socket: Any = None
        self._return = 0.0
        schema = self._http("/schema")
        self._schema = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(self._schema, dict) or not isinstance(self._schema.get("properties", {}), dict):
            raise ValueError(f"env_config.url: {self.url}/schema has no schema of an action: is it a server of OpenEnv?")
        fields = self._schema.get("properties", {})
        self.has_tools = "tool_name" in fields
        required = self._schema.get("required")
        self._field = required[0] if isinstance(required, list) and len(required) == 1 and required[0] in fields else None
        self._is_text = self._field is not None and (fields[self._field] or {}).get("type") == "string"
        self._num_tasks = self._count_tasks()
        self._prompt = system_prompt

    @property
    def system_prompt(self) -> str:
        if self.has_tools:
            acting = self.with_tools(CALL)[:MAX_SCHEMA]
        elif self._field is not None:
            acting = ""
        else:
            acting = f"Each turn is one JSON object of this schema and nothing else: {json.dumps(self._schema)[:MAX_SCHEMA]}"
        return f"{self._prompt}\n\n{acting}".strip()

    def _http(self, path: str, body: Any = None, may_be_missing: bool = False) -> Any:
        """The server's answer to a request; None where it has no such thing and need not have."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return plain_json.loads(answer.read(MAX_FRAME).decode())
        except urllib.error.HTTPError as error:
            error.close()
            if may_be_missing and error.code in (404, 405, 501):
                return None
            raise ValueError(f"env_config.url: {self.url}{path} answers {error.code} {error.reason!s:.80}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"env_config.url: {self.url}{path} gives no answer: {error!s:.200}") from None

    def _count_tasks(self) -> int | None:
        """How many tasks the split has; None where the server lists none."""
        names = self._http("/list_environments", may_be_missing=True)
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            return None
        place = "/" + urllib.parse.quote(names[0], safe="")
        splits = self._http(f"{place}/splits", may_be_missing=True)
        if not isinstance(splits, list) or not splits:
            return None
        known = [split.get("name") for split in splits if isinstance(split, dict)]
        if self.split not in known:
            raise ValueError(f"env_config.split is {self.split!r}, and the server has {', '.join(map(repr, known))[:200]}")
        said = self._http(f"{place}/num_tasks", {"split": self.split})
        count = said.get("num_tasks") if isinstance(said, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"env_config.split {self.split!r}: the server says that it has {count!r:.40} tasks")
        return count

    def sample_task(self, spec: str | None) -> TaskId[dict[str, Any]]:
        limit = self._num_tasks or 2**31
        name = f"{self.split}/" if self._num_tasks else ""
        number = str(spec).removeprefix(name) if spec is not None else str(self.np_random.integers(limit))
        if not number.isdecimal() or len(number) > 10 or int(number) >= limit:
            raise ValueError(f"no task is called {spec!r:.80}; they are {name}0 to {name}{limit - 1}")
        chosen = {"split": self.split, "index": int(number), "seed": 0} if self._num_tasks else {"seed": int(number)}
        return TaskId(f"{name}{int(number)}", chosen)

    def begin(self, task: dict[str, Any]) -> str:
        self._return = 0.0
        if self._socket is None:
            self._connect()
        if self.has_tools:
            self.offer(_read_tools(self._observation("step", {"type": "list_tools"})[0].get("tools")))
        observation, _, done = self._observation("reset", {**self._reset_args, **task})
        if done:
            raise EpisodeLost(FAILED, f"{self.url}: the episode was over before the first action")
        return self._text(observation)

    def act(self, task: dict[str, Any], action: str, call: Call | None) -> Reply:
        observation, reward, done = self._observation("step", self._action(action, call))
        self._return += reward
        return Reply(self._text(observation), reward, success=self._return >= self._success_return if done else None)

    def _action(self, text: str, call: Call | None) -> dict[str, Any]:
        if call is not None:
            return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        if self.has_tools:
            raise ToolError(CALL)
        if self._field is not None and self._is_text:
            return {self._field: text}
        try:
            action = plain_json.loads(text)
        except ValueError as error:
            raise ToolError(f"the action must be JSON and nothing else: {error}") from None
        if self._field is not None:
            return {self._field: action}
        if not isinstance(action, dict):
            raise ToolError("the action must be a JSON object")
        return action

    def _observation(self, kind: str, data: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        """Observation, reward and end of a step or reset.

        Raises:
            ToolError: The server refuses the action.
            EpisodeLost: The server fails.
        """
        frame = self._exchange(kind, data)
        body = frame.get("data")
        if not isinstance(body, dict):
            raise self._lost(f"a frame without data: {frame!r:.200}")
        if frame.get("type") == "error":
            said, code = f"{body.get('message')!s:.300}", body.get("code")
            if code in AGENTS_OWN and kind == "step" and data.get("type") != "list_tools":
                listed = body.get("errors")
                errors = [each for each in listed[:3] if isinstance(each, dict)] if isinstance(listed, list) else []
                raise ToolError(". ".join([said, *(f"{each.get('loc')!s:.80}: {each.get('msg')!s:.200}" for each in errors)]))
            raise self._lost(f"{code!s:.40}: {said}", FULL if code == "CAPACITY_REACHED" else FAILED)
        observation = body.get("observation")
        if frame.get("type") != "observation" or not isinstance(observation, dict):
            raise self._lost(f"no observation: {frame!r:.200}")
        try:
            reward = 0.0 if body.get("reward") is None else reward_of(body["reward"])
            return observation, reward, truth_of(body.get("done", False), "done")
        except AnswerError as error:
            raise self._lost(str(error)) from None

    def _connect(self) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        try:
            self._socket = connect(
                f"ws{self.url.removeprefix('http')}/ws",
                additional_headers=self._headers,
                open_timeout=self._timeout_s,
                close_timeout=1,
                max_size=MAX_FRAME,
            )
        except (OSError, WebSocketException) as error:
            raise self._lost(f"no connection: {type(error).__name__}: {error!s:.200}") from None

    def _exchange(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends a frame and reads the answer."""
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed):  # why it was closed, as by a full server, can still be read
                self._socket.send(json.dumps({"type": kind, "data": data}))
            frame = plain_json.loads(self._socket.recv(timeout=self._timeout_s))
        except (OSError, ConnectionClosed, ValueError) as error:  # TimeoutError is an OSError
            raise self._lost(f"{type(error).__name__}: {error!s:.200}") from None
        if not isinstance(frame, dict):
            raise self._lost(f"a frame that is no object: {frame!r:.80}")
        return frame

    def _lost(self, cause: str, reason: str = FAILED) -> EpisodeLost:
        """The error to raise; a late answer must not be taken for the next one's, so the connection ends."""
        self.close()
        return EpisodeLost(reason, f"{self.url}: {cause}")

    def _text(self, observation: dict[str, Any]) -> str:
        if self._key is not None:
            if self._key not in observation:
                raise self._lost(f"the observation has no {self._key!r} (observation_key), but {sorted(observation)!s:.200}")
            shown: Any = observation[self._key]
        elif self.has_tools and "result" in observation:
            error = observation.get("error")
            shown = f"Error: {error.get('message')}" if isinstance(error, dict) else _result(observation["result"])
        else:
            fields = {name: value for name, value in observation.items() if name not in ("metadata", "reward", "done")}
            shown = next(iter(fields.values())) if len(fields) == 1 else fields or ""
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        if len(text) > MAX_TEXT_LENGTH:
            raise self._lost(f"an observation of {len(text)} characters; at most {MAX_TEXT_LENGTH} are read")
        return text

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with contextlib.suppress(Exception):
                socket.send(json.dumps({"type": "close"}))
            socket.close()


def _read_tools(listed: Any) -> list[dict[str, Any]]:
    """Tools as OpenAI's API has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": f"{tool.get('description')!s}",
                "parameters": tool.get("input_schema") or {},
            },
        }
        for tool in (listed if isinstance(listed, list) else [])
        if isinstance(tool, dict) and isinstance(tool.get("name"), str)
    ]


def _result(result: Any) -> Any:
    """What a tool said: the texts of MCP's result, or the result itself."""
    content = result.get("content") if isinstance(result, dict) else None
    if not isinstance(content, list):
        return result
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else result
