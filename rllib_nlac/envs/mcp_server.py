"""Servers of tools by the Model Context Protocol (MCP): started or connected to, asked, and left.

All of a process are talked to on one event loop in a thread of its own. The only file that imports ``mcp``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from importlib.util import find_spec
from typing import Any

from rllib_nlac.envs.answers import check_tools
from rllib_nlac.envs.base import EpisodeLost, check_number, variables_for
from rllib_nlac.inputs.tool_calls import ToolError
from rllib_nlac.names import unknown_key

WHERE = "env_config.tools.mcp"
END_S = 10.0  # for a server's end; one that does not end by itself is killed sooner
MOST_BLOCKS_SAID = 2048  # of 512 bytes, of what a server writes to its standard error

_shared: dict[str, McpServer] = {}
_shared_lock = threading.Lock()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _forget() -> None:
    """In a process that was forked: threads stay behind, and so does the loop."""
    _loop.cache_clear()
    _shared.clear()


os.register_at_fork(after_in_child=_forget)


class McpServer:
    """A server and its tools. One that is lost is started again by the next ``start``.

    The environments of a process that name the same server share it, for most servers keep nothing of a call. ``per_episode``
    is for those that do, such as a database or an interpreter: what one episode changes must not be seen by another.

    Args:
        command: Program and arguments of a server that talks by standard input and output. It sees the environment variables
            HOME, LOGNAME, PATH, SHELL, TERM and USER, and those of ``env``.
        env: Environment variables of ``command``. A value of null takes that of this process, so that secrets stand in no file.
        url: Address of a server that is running, which talks by streamable HTTP; in place of ``command``.
        per_episode: Whether each episode has a server, or a connection to it, of its own.
        timeout_s: Seconds that the start and each call may take.
        max_result_characters: What is longer is cut, and the agent is told so.

    Attributes:
        tools: Schemas of its tools, as OpenAI's API has them.

    Raises:
        ValueError: A setting is malformed, or the server does not start.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        env: Mapping[str, Any] | None = None,
        url: str = "",
        per_episode: bool = False,
        timeout_s: float = 60.0,
        max_result_characters: int = 20_000,
    ) -> None:
        if find_spec("mcp") is None:
            raise ValueError(f"{WHERE} needs the package mcp: pip install 'mcp>=2'")
        if isinstance(command, str) or not all(isinstance(part, str) for part in command) or bool(command) is bool(url):
            raise ValueError(
                f'{WHERE} must have either a command, a list as in ["python", "my_server.py"], or a url, as in '
                f"http://localhost:8000/mcp; it has {command!r:.80} and {url!r:.80}"
            )
        if command and shutil.which(command[0]) is None:
            raise ValueError(f"{WHERE}.command is {command[0]!r:.80}, and there is no such program")
        check_number("tools.mcp.timeout_s", timeout_s, 0.001)
        check_number("tools.mcp.max_result_characters", max_result_characters, 1, whole=True)
        self._command, self._url, self.per_episode = list(command), url, per_episode
        self._env = variables_for(env, f"{WHERE}.env")
        self._timeout_s, self._max_characters = timeout_s, max_result_characters
        self.tools: list[dict[str, Any]] = []
        self._users, self._lock = 1, threading.Lock()
        self._up: tuple[Any, asyncio.Event] | None = None  # the client, and what ends it
        self._life: Future[None] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (standard error)
        try:
            self.start()
        except EpisodeLost as error:
            raise ValueError(f"{WHERE}: {error}") from None

    @classmethod
    def of(cls, settings: Any) -> McpServer:
        """The server that ``env_config.tools`` describes, which ``close`` gives back."""
        given = settings.get("mcp") if isinstance(settings, Mapping) and set(settings) == {"mcp"} else None
        if not isinstance(given, Mapping):
            raise ValueError(
                f"env_config.tools must be {{mcp: {{command: [...]}}}} or {{mcp: {{url: ...}}}}, not {settings!r:.60}"
            )
        known = inspect.signature(cls).parameters
        for key in given:
            if key not in known:
                raise ValueError(f"{WHERE}: {unknown_key(key, known)}")
        if given.get("per_episode"):
            return cls(**given)
        key = json.dumps(given, sort_keys=True, default=str)
        with _shared_lock:
            if key in _shared:
                _shared[key]._users += 1
            else:
                _shared[key] = cls(**given)
            return _shared[key]

    def start(self) -> None:
        """Connects, unless it is connected.

        Raises:
            EpisodeLost: The server does not start, or has no tools that a chat template can show.
        """
        with self._lock:
            if self._up is not None:
                return
            ready: Future[tuple[Any, asyncio.Event]] = Future()
            self._life = asyncio.run_coroutine_threadsafe(self._live(ready), _loop())
            try:
                self._up = ready.result()
            except Exception as error:
                raise self._lost("does not start", error) from None

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call, as text.

        Raises:
            ToolError: The tool says that it is an error, or the server answers too late, or something that is no result.
            EpisodeLost: The server is gone.
        """
        if (up := self._up) is None:
            raise self._lost("is gone", None)
        return asyncio.run_coroutine_threadsafe(self._call(up, name, arguments), _loop()).result()

    def stop(self) -> None:
        """Ends the connection, and a server that was started by it."""
        if self._life is not None:
            self._leave(self._up)
            wait([self._life], END_S)

    def close(self) -> None:
        """Says that one of those who share it needs it no more; the last one stops it."""
        with _shared_lock:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, server in _shared.items() if server is self]:
                del _shared[key]
        self.stop()

    async def _live(self, ready: Future[tuple[Any, asyncio.Event]]) -> None:
        """One connection, from its beginning to its end, which must be in the same task."""
        import anyio
        from mcp import Client

        try:
            with anyio.fail_after(self._timeout_s) as limit:
                async with Client(self._transport()) as client:
                    tools, page = [], await client.list_tools()
                    tools += page.tools
                    while page.next_cursor:
                        page = await client.list_tools(cursor=page.next_cursor)
                        tools += page.tools
                    self.tools = [_schema(tool) for tool in tools]
                    check_tools(self.tools)
                    limit.deadline = math.inf
                    over = asyncio.Event()
                    ready.set_result((client, over))
                    await over.wait()
        except Exception as error:  # after its beginning, one of its end, which its calls have noticed
            if not ready.done():
                ready.set_exception(error)

    def _transport(self) -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        if self._url:
            return self._url
        parameters = StdioServerParameters(command=self._command[0], args=self._command[1:], env=self._env)
        return stdio_client(parameters, self._said)  # type: ignore[arg-type]  # it asks for its number alone

    async def _call(self, up: tuple[Any, asyncio.Event], name: str, arguments: Mapping[str, Any]) -> str:
        import anyio

        if os.fstat(self._said.fileno()).st_blocks > MOST_BLOCKS_SAID:
            os.ftruncate(self._said.fileno(), 0)
        try:
            with anyio.fail_after(self._timeout_s):
                result = await up[0].call_tool(name, dict(arguments))
        except Exception as error:
            try:  # whoever lists its tools is there
                with anyio.fail_after(self._timeout_s):
                    await up[0].list_tools(cache_mode="bypass")
            except Exception:
                self._leave(up)
                raise self._lost("is gone", error) from None
            late = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else f"{error}"
            raise ToolError(self._cut(f"{name}: {late}")) from None
        text = self._cut(_text(result))
        if result.is_error:
            raise ToolError(text)
        return text

    def _leave(self, up: tuple[Any, asyncio.Event] | None) -> None:
        if up is not None:
            self._up = None if self._up is up else self._up
            _loop().call_soon_threadsafe(up[1].set)

    def _lost(self, what: str, error: BaseException | None) -> EpisodeLost:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        cause = "" if error is None else f" ({type(error).__name__}: {error!s:.300})"
        said = os.pread(self._said.fileno(), 300, max(os.fstat(self._said.fileno()).st_size - 300, 0)).decode(errors="replace")
        tail = f"; the last that it wrote to its standard error is {said.strip()!r}" if said.strip() else ""
        return EpisodeLost("mcp_server_lost", f"the MCP server {self._url or ' '.join(self._command)} {what}{cause}{tail}")

    def _cut(self, text: str) -> str:
        limit = self._max_characters
        return text if len(text) <= limit else f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(result: Any) -> str:
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_block(block) for block in result.content)


def _block(block: Any) -> str:
    """A part of a result; what is no text is named."""
    resource = getattr(block, "resource", block)
    text = getattr(resource, "text", None)
    if text is not None:
        return str(text)
    about = [getattr(block, "type", "part"), getattr(resource, "mime_type", None), getattr(resource, "uri", None)]
    return f"[{', '.join(str(part) for part in about if part)}: not shown]"
