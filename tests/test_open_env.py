"""OpenEnv by its wire protocol: against a stand-in that misbehaves, and, slowly, against OpenEnv itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from open_env_server import OpenEnvServer, error, observation

from rllib_nlac.envs.adapters import open_env
from rllib_nlac.envs.adapters.open_env import OpenEnv
from rllib_nlac.envs.answers import checked_reset
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.contract import check_environment


@pytest.fixture()
def server():
    server = OpenEnvServer()
    yield server
    server.stop()


def test_an_episode(server, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "Bearer hush")
    env = OpenEnv(server.url, headers_env={"Authorization": "MY_TOKEN"}, reset_args={"level": 2}, system_prompt="Be kind.")
    text, info = env.reset(seed=5, options={"task_id": "17"})
    assert (text, info["task_id"], info["system_prompt"]) == ("{'level': 2, 'seed': 17}", "17", "Be kind.")
    assert server.headers[-1] == server.headers[0] == "Bearer hush"
    assert env.step("Hello, you.")[:4] == ("{'message': 'Hello, you.'}", 0.0, False, False)
    *step, info = env.step("bye")
    assert step == ["Bye.", 1.0, True, False] and info["success"]
    env.reset(seed=1)
    env.close()
    deadline = time.monotonic() + 10
    while server.seen[-1]["type"] != "close" and time.monotonic() < deadline:  # nobody answers it
        time.sleep(0.01)
    assert [frame["type"] for frame in server.seen] == ["reset", "step", "step", "reset", "close"]  # one connection


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("close", "ConnectionClosed"),
        ("silent", "timed out"),
        ("{rubbish", "not valid JSON"),
        ("[1]", "a frame that is no object"),
        ({"type": "observation"}, "a frame without data"),
        ({"type": "observation", "data": {"observation": "text"}}, "no observation"),
        (observation("x", reward="high"), "the reward must be a number"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": false}}', "NaN"),
        (observation("x", done="no"), "done must be true or false"),
        (observation("x" * 1_000_001), "an observation of 1000001 characters"),
        (error("SESSION_ERROR", "the session is gone"), "SESSION_ERROR: the session is gone"),
    ],
)
def test_an_outage_loses_the_episode_and_the_next_one_connects(server, behaviour, cause):
    env = OpenEnv(server.url, timeout_s=0.2 if behaviour == "silent" else 30)
    env.reset(seed=0)
    server.behaviours = [behaviour]
    text, reward, terminated, truncated, info = env.step("Hello.")
    assert cause in text
    assert (reward, terminated, truncated, info["discard"]) == (0.0, False, True, True)
    assert info["stop_reason"] == open_env.FAILED
    assert env.reset(options={"task_id": "3"})[0] == "{'seed': 3}"
    server.behaviours = [behaviour]
    with pytest.raises(EpisodeLost, match=server.url):
        env.reset(seed=0)


def test_a_full_server_says_so(server):
    env = OpenEnv(server.url)
    server.capacity = 0
    for _ in range(5):  # it closes at once, so that writing may fail before the reason is read
        with pytest.raises(EpisodeLost, match="CAPACITY_REACHED: Server at capacity") as lost:
            env.reset(seed=0)
        assert lost.value.reason == open_env.FULL
    server.capacity = 1
    assert env.reset(options={"task_id": "3"})[0] == "{'seed': 3}"


@pytest.mark.process
@pytest.mark.parametrize("capacity", [1, 2])
def test_a_server_with_room_for_few_passes_the_check(server, capacity):
    """An environment is closed before the next one is built; only two at once need room for two."""
    server.capacity = capacity
    findings = {finding.check: finding for finding in check_environment(lambda: OpenEnv(server.url, max_turns=3), (0, 1))}
    assert not [finding for finding in findings.values() if finding.verdict == "FAILED"] and len(findings) == 14
    together = findings["instances do not disturb each other"]
    assert together.verdict == ("note" if capacity == 1 else "ok")
    assert capacity == 2 or "Server at capacity. A run needs room for num_envs_per_env_runner of them" in together.detail


def test_what_the_server_refuses_of_an_action_is_no_way_out(server):
    env = OpenEnv(server.url, max_turns=2)
    env.reset(seed=0)
    server.behaviours = [
        error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["message"], "msg": "too long"}]),
        error("EXECUTION_ERROR", "division by zero"),
    ]
    assert env.step("Hello.")[:4] == ("Error: Invalid message. ['message']: too long", 0.0, False, False)
    text, _, _, truncated, info = env.step("Hello.")
    assert text.startswith("Error: division by zero") and truncated and "discard" not in info


def test_what_is_shown(server):
    env = OpenEnv(server.url)
    env.reset(seed=0)
    server.behaviours = [observation("a", metadata={"answer": 42}), observation("a", board=[1, 2], metadata={"answer": 42})]
    assert env.step("x")[0] == "a"
    assert env.step("x")[0] == '{"text": "a", "board": [1, 2]}'
    env = OpenEnv(server.url, observation_key="board")
    server.behaviours = [observation("a", board="| |")]
    assert env.reset(seed=0)[0] == "| |"
    assert "has no 'board'" in env.step("x")[0]


def test_other_actions_are_json():
    fields = {"row": {"type": "integer"}, "column": {"type": "integer"}}
    server = OpenEnvServer({"properties": fields, "required": list(fields)})
    env = OpenEnv(server.url)
    assert '"column"' in env.reset(seed=0)[1]["system_prompt"]
    env.step('{"row": 1, "column": 2}')
    assert server.seen[-1]["data"] == {"row": 1, "column": 2}
    assert "must be JSON" in env.step("the middle")[0] and "must be a JSON object" in env.step("[1]")[0]
    server.pages["/schema"] = {"action": {"properties": fields, "required": ["row"]}}
    env = OpenEnv(server.url)
    env.reset(seed=0)
    env.step("7")
    assert server.seen[-1]["data"] == {"row": 7}
    server.stop()


def test_tools():
    server = OpenEnvServer({"properties": {"type": {}, "tool_name": {}, "arguments": {}}, "required": ["tool_name"]})
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    server.behaviours = [
        {"type": "observation", "data": {"observation": {"tools": [tool, "rubbish"]}}},
        observation("Add 1 and 2."),
        {"type": "observation", "data": {"observation": {"result": {"content": [{"type": "text", "text": "3"}]}}, "reward": 1}},
        {"type": "observation", "data": {"observation": {"result": None, "error": {"message": "no tool"}}, "done": True}},
    ]
    env = OpenEnv(server.url)
    text, info = env.reset(seed=0)
    assert text == "Add 1 and 2." and info["system_prompt"] == "Each turn is one tool call."
    assert info["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert env.step("three")[0].startswith("Error: Each turn is one tool call")
    text, reward, *_, info = env.step('{"name": "add", "arguments": {"a": 1}}')
    assert (text, reward, info["new_messages"]) == ("3", 1.0, [{"role": "tool", "name": "add", "content": "3"}])
    assert server.seen[-1]["data"] == {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}
    *_, info = env.step('{"name": "sub", "arguments": {}}')
    assert info["new_messages"] == [{"role": "tool", "content": "Error: no tool", "error": True}]
    server.behaviours = [{"type": "observation", "data": {"observation": {"tools": [{**tool, "name": "add/two"}]}}}]
    info = checked_reset(env.reset(seed=0))[1]  # such a name may stand in no info["tools"]
    assert info["tools"] == [] and '"add/two"' in info["system_prompt"]
    text, *_, info = env.step('{"name": "add/two"}')
    assert "'tool_name': 'add/two'" in text and "new_messages" not in info
    server.stop()


def test_tasks_of_a_split(server, monkeypatch):
    pages = {"/list_environments": ["my env"], "/my%20env/splits": [{"name": "train"}], "/my%20env/num_tasks": {"num_tasks": 3}}
    pages |= server.pages  # the stand-in takes no POST
    monkeypatch.setattr(OpenEnv, "_http", lambda self, path, body=None, may_be_missing=False: pages.get(path))
    env = OpenEnv(server.url)
    assert {env.reset(seed=seed)[1]["task_id"] for seed in range(30)} == {"train/0", "train/1", "train/2"}
    assert env.reset(options={"task_id": "train/2"})[0] == "{'split': 'train', 'index': 2, 'seed': 0}"
    with pytest.raises(ValueError, match="they are train/0 to train/2"):
        env.reset(options={"task_id": "train/3"})
    with pytest.raises(ValueError, match=r"env_config.split is 'test', and the server has 'train'"):
        OpenEnv(server.url, split="test")


def test_mistakes(server):
    with pytest.raises(ValueError, match=r"env_config.url is 'localhost:8000' and must be"):
        OpenEnv("localhost:8000")
    with pytest.raises(ValueError, match="needs the environment variable NOT_THERE, which is not set"):
        OpenEnv(server.url, headers_env={"Authorization": "NOT_THERE"})
    with pytest.raises(ValueError, match="gives no answer"):
        OpenEnv("http://127.0.0.1:9")
    server.pages["/schema"] = []
    with pytest.raises(ValueError, match="is it a server of OpenEnv"):
        OpenEnv(server.url)


REAL = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Game(Environment[Say, Heard, State]):
    def __init__(self):
        super().__init__()
        self.turns = 0

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return 2

    def reset(self, seed=None, episode_id=None, split="", index=-1, **kwargs):
        self.word = ["red", "blue"][index]
        return Heard(text=f"{split} {index}: say {self.word}.", metadata={"hidden": 1})

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "fail":
            raise RuntimeError("as you said")
        right = action.message == self.word
        return Heard(text="Yes." if right else "No.", done=right, reward=1.0 if right else 0.0)

    @property
    def state(self):
        return State()

uvicorn.run(create_app(Game, Say, Heard, env_name="game"), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.process
@pytest.mark.long
def test_a_real_server(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "openenv==0.10.0"], check=True)
    play_a_real_server(python, tmp_path)


def play_a_real_server(python, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "game.py").write_text(REAL, encoding="utf-8")
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([python, folder / "game.py", str(port)], env=without)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                json.loads(urllib.request.urlopen(f"{url}/health", timeout=5).read())
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        env = OpenEnv(url, split="test")
        text, info = env.reset(options={"task_id": "test/1"})
        assert (text, info["task_id"]) == ("test 1: say blue.", "test/1")
        assert env.step("red")[:4] == ("No.", 0.0, False, False)
        assert env.step("fail")[0] == "Error: as you said"
        other = OpenEnv(url)
        with pytest.raises(EpisodeLost, match="CAPACITY_REACHED"):
            other.reset(seed=0)
        *step, last = env.step("blue")
        assert step == ["Yes.", 1.0, True, False] and last["success"]
        env.close()
        assert other.reset(options={"task_id": "train/0"})[0] == "train 0: say red."
        process.kill()
        assert other.step("red")[4]["stop_reason"] == open_env.FAILED
    finally:
        process.kill()
        process.wait()
