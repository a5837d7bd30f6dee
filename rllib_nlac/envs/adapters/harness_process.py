"""A command that calls a chat endpoint, and the endpoint: one process an episode, one server on loopback for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rllib_nlac.envs.answers import AnswerError, reward_of, truth_of
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.inputs import plain_json

MAX_BODY = 32 << 20  # bytes of a request
MAX_OUTPUT = 64 << 10  # bytes of an output that are kept, the last ones
POLL_S, GRACE_S = 0.1, 1.0
ROUTE = "/v1/chat/completions"
OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "NLAC_SEED", "NLAC_TASK", "NLAC_REWARD_FILE")
HOW_TO_REWARD = '{"reward": 1.0, "success": true}'


class Refused(Exception):
    """A request that gets an error for an answer, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Episode:
    """A running command, and the requests that it makes.

    Args:
        command: Program and arguments.
        cwd: The folder that it runs in.
        variables: All of its environment variables but those that lead here.
        rewards: Whether it writes its reward to a file.
    """

    def __init__(self, command: Sequence[str], cwd: str, variables: Mapping[str, str], rewards: bool) -> None:
        self._name, self.refused, self.over = " ".join(command), "", False
        self._asked: tuple[dict[str, Any], Future[dict[str, Any] | None]] | None = None
        self._lock = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="rllib_nlac_harness_")
        self._reward_file = Path(self._folder, "reward.json") if rewards else None
        self.id = secrets.token_urlsafe(16)
        self._endpoint = shared_endpoint()
        base_url = self._endpoint.admit(self)
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "unused"}
        places = {"HOME": self._folder, "TMPDIR": self._folder, "NO_PROXY": "127.0.0.1", "LANG": "C.UTF-8"}
        if rewards:
            own["NLAC_REWARD_FILE"] = str(self._reward_file)
        try:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={"PATH": os.environ.get("PATH", os.defpath), **places, **variables, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self.over = True
            self._endpoint.dismiss(self)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ValueError(f"env_config.command {self._name!r:.200} cannot be started: {error}") from None
        assert self._process.stdout is not None and self._process.stderr is not None
        self._wake = os.pipe()
        self._pipes = self._process.stdout, self._process.stderr
        self._outputs = {pipe.fileno(): bytearray() for pipe in self._pipes}
        self._selector = selectors.DefaultSelector()
        for fd in (self._wake[0], *self._outputs):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)

    def ask(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Waits, in a thread of the server, for what the agent says; None where the episode is over.

        Raises:
            Refused: Another request still waits: a dialogue has one next turn.
        """
        with self._lock:
            if self.over:
                return None
            if self._asked is not None:
                raise Refused(400, "another request of this episode still waits: make one call at a time")
            future: Future[dict[str, Any] | None] = Future()
            self._asked = body, future
            os.write(self._wake[1], b".")
        return future.result()

    def answer(self, message: dict[str, Any] | None) -> None:
        """Answers the request that waits, if one does. It is forgotten first, so that the next may come at once."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].set_result(message)

    def wait(self, limit_s: float, what: str) -> dict[str, Any] | None:
        """The next request; None once the command has ended.

        Raises:
            EpisodeLost: Neither happens within ``limit_s``, the key ``what`` of the configuration.
        """
        until = time.monotonic() + limit_s
        while self._asked is None:
            if self._process.poll() is not None:
                self._read(0)
                return None
            if (left := until - time.monotonic()) <= 0:
                raise self.lost("harness_timeout", f"made no request and did not end within {limit_s:g} s (env_config.{what})")
            self._read(min(left, POLL_S))
        return self._asked[0]

    def _read(self, patience_s: float) -> None:
        """Takes in what the command has printed; a request and the command's end wake it, others that hold its pipes do not."""
        for key, _ in self._selector.select(patience_s):
            said = os.read(key.fd, MAX_OUTPUT)
            if (kept := self._outputs.get(key.fd)) is not None:
                kept += said
                del kept[:-MAX_OUTPUT]
                if not said:
                    self._selector.unregister(key.fd)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(POLL_S)

    def result(self) -> dict[str, Any]:
        """What the ended command says of its success.

        Raises:
            EpisodeLost: It failed, or says nothing that can be read.
        """
        code = self._process.returncode
        if code:
            raise self.lost("harness_failed", f"ended with {f'exit code {code}' if code > 0 else f'signal {-code}'}")
        if self._reward_file is None:
            (kept, _), where = self._outputs.values(), "as the last line of its output"
            text = kept.decode("utf-8", "replace").strip().rpartition("\n")[2]
        else:
            where, text = "to the file that NLAC_REWARD_FILE names", ""
            with contextlib.suppress(OSError), self._reward_file.open("rb") as file:
                text = file.read(MAX_OUTPUT).decode("utf-8", "replace")
        try:
            result = plain_json.loads(text)
            reward = reward_of(result["reward"])
            success = truth_of(result.get("success", reward >= 1.0), "success")
        except (ValueError, AnswerError, TypeError, KeyError) as error:
            kind = "no key 'reward'" if isinstance(error, KeyError) else error
            raise self.lost(
                "harness_no_reward", f"must write {HOW_TO_REWARD} {where}, and wrote {text!r:.80} ({kind})"
            ) from None
        return {"reward": reward, "success": success, "text": result.get("text")}

    def lost(self, reason: str, cause: str) -> EpisodeLost:
        """The error for an episode that ends through no fault of the agent, with what the command said last."""
        said = list(self._outputs.values())[1].decode("utf-8", "replace").strip()[-500:]
        refused = f"; a request was refused: {self.refused:.200}" if self.refused else ""
        return EpisodeLost(reason, f"the command {self._name!r:.150} {cause}{refused}{f'; stderr: {said}' if said else ''}")

    def end(self) -> None:
        """Kills what is left of the command and its process group, after a moment to end by itself; may be called again."""
        with self._lock:
            if self.over:
                return
            self.over = True
        self._endpoint.dismiss(self)
        del self._endpoint  # which stops with the last that holds it, whoever still holds this episode
        self.answer(None)
        for sent, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        self._selector.close()
        for fd in self._wake:
            os.close(fd)
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    episodes: dict[str, Episode]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that went away, as a killed one does."""


class Endpoint:
    """The server of all episodes of this process, in a thread. It stops when nobody holds this object any more."""

    def __init__(self) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.episodes = {}
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="harness", daemon=True).start()
        weakref.finalize(self, _stop, self._server).atexit = False

    def admit(self, episode: Episode) -> str:
        """Opens an address to an episode, and returns it as the base URL of an OpenAI client."""
        self._server.episodes[episode.id] = episode
        return f"http://127.0.0.1:{self._server.server_port}/{episode.id}/v1"

    def dismiss(self, episode: Episode) -> None:
        """Closes the address of an episode."""
        self._server.episodes.pop(episode.id, None)


def _stop(server: _Server) -> None:
    def stop() -> None:
        server.shutdown()
        server.server_close()

    threading.Thread(target=stop, daemon=True).start()  # a finalizer may run in the server's own thread


_LOCK = threading.RLock()
_shared: weakref.ref[Endpoint] | None = None


def shared_endpoint() -> Endpoint:
    """The endpoint of this process; whoever needs it holds it."""
    global _shared
    with _LOCK:
        if (endpoint := _shared() if _shared is not None else None) is None:
            endpoint = Endpoint()
            _shared = weakref.ref(endpoint)
        return endpoint


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is one packet

    def do_POST(self) -> None:
        episode = None
        try:
            name, slash, route = self.path.lstrip("/").partition("/")
            episode = self.server.episodes.get(name)  # type: ignore[attr-defined]
            length = self.headers.get("Content-Length", "")
            if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY:
                self.close_connection = True  # the body is not read
                raise Refused(413, f"a request needs a Content-Length of at most {MAX_BODY}, and it is {length!r:.40}")
            body = self.rfile.read(int(length))
            if episode is None or slash + route != ROUTE:
                raise Refused(404, f"only POST {ROUTE} of an episode that goes on is served here")
            asked = read_request(body)
            message = episode.ask(asked)
            if message is None:
                self.close_connection = True
                raise Refused(410, "the episode is over")
        except Refused as error:
            if episode is not None:
                episode.refused = str(error)
            told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            self._send(error.status, "application/json", json.dumps({"error": told}))
        else:
            self._send(200, *completion(asked, message))

    def do_GET(self) -> None:
        told = {"message": f"only POST {ROUTE} is served here", "type": "invalid_request_error"}
        self._send(404, "application/json", json.dumps({"error": told}))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


def read_request(data: bytes) -> dict[str, Any]:
    """The body of a request for a chat completion, whose messages are pairs of a role and a text, with ids of results.

    The run decides how its agent samples, so a temperature, a limit of tokens and the model's name are passed over. What would
    be answered wrongly without a word is refused.

    Raises:
        Refused: It is malformed, or asks for what an agent does not give.
    """
    try:
        body = plain_json.loads(data.decode())
    except ValueError as error:
        raise Refused(400, f"the body: {error}") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise Refused(400, "'messages' must be a list of objects with role and content")
    if body.get("n") not in (None, 1):
        raise Refused(400, "'n' must be 1: an agent answers once")
    for key in ("logprobs", "functions"):
        if body.get(key):
            raise Refused(400, f"{key!r} is not supported here{'; use tools' if key == 'functions' else ''}")
    if not isinstance(body.get("tools") or [], list):
        raise Refused(400, "'tools' must be a list")
    return {**body, "messages": [_read_message(message) for message in messages]}


def _read_message(message: Mapping[str, Any]) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refused(400, f"a message has the role {role!r:.40}; roles are system, developer, user, assistant and tool")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(400, "the content of a message must be text, or parts of the type text")
    role, call = "system" if role == "developer" else role, message.get("tool_call_id")
    return {"role": role, "content": "\n".join(map(str, texts)), "id": call if isinstance(call, str) else ""}


def completion(body: Mapping[str, Any], message: Mapping[str, Any]) -> tuple[str, str]:
    """Media type and body of the answer: a chat completion, or where the request says ``stream`` all of it in one event."""
    calls = message.get("tool_calls")
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": str(body.get("model"))}
    reason = "tool_calls" if calls else "stop"
    usage = {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}  # there are clients that need some
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return "application/json", json.dumps({**head, "object": "chat.completion", "choices": [choice], **usage})
    if calls:
        message = {**message, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
    deltas: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
    ]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        deltas.append({"choices": [], **usage})
    events = [json.dumps({**head, "object": "chat.completion.chunk", **delta}) for delta in deltas]
    return "text/event-stream", "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
