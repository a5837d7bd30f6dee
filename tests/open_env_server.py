"""A server of OpenEnv's protocol for tests, which does as it is told, also wrongly: a page of HTTP and a socket at one port."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

ECHO = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}


class OpenEnvServer:
    """Plays "say bye": an episode ends with "bye", for a reward of 1.

    Args:
        action: Schema of an action.
    """

    def __init__(self, action: dict[str, Any] | None = None) -> None:
        self.pages = {"/schema": {"action": action or ECHO}}
        self.behaviours: list[Any] = []  # in place of the next answers: a frame, raw text, "close" or "silent"
        self.seen: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.capacity, self._sessions = 1000, 0
        self._server = serve(self._play, "127.0.0.1", 0, process_request=self._page)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _page(self, connection, request):
        self.headers.append(request.headers.get("Authorization"))
        if request.path == "/ws":
            return None
        status = HTTPStatus.OK if request.path in self.pages else HTTPStatus.NOT_FOUND
        body = json.dumps(self.pages.get(request.path)).encode()
        return Response(status, status.phrase, Headers({"Content-Length": str(len(body)), "Connection": "close"}), body)

    def _play(self, socket):
        if self._sessions >= self.capacity:
            data = {"message": "Server at capacity", "code": "CAPACITY_REACHED"}
            socket.send(json.dumps({"type": "error", "data": data}))
            return
        self._sessions += 1
        try:
            self._serve(socket)
        finally:
            self._sessions -= 1

    def _serve(self, socket):
        for raw in socket:
            frame = json.loads(raw)
            self.seen.append(frame)
            if frame["type"] == "close":
                return
            behaviour = self.behaviours.pop(0) if self.behaviours else observation(f"{frame['data']}", metadata={"secret": 1})
            if frame["data"] == {"message": "bye"}:
                behaviour = observation("Bye.", 1.0, True)
            if behaviour == "close":
                return
            if behaviour != "silent":
                socket.send(behaviour if isinstance(behaviour, str) else json.dumps(behaviour))

    def stop(self) -> None:
        self._server.shutdown()


def observation(text: Any, reward: float | None = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, **fields}, "reward": reward, "done": done}}


def error(code: str, message: str = "no", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}
