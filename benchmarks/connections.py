"""What does a turn cost by each way to connect an environment? ``python -m benchmarks.connections``

An EnvRunner plays the same dialogue by each way, with an engine that costs nothing: the agent's turn is a call that adds two
numbers, and the answer is their sum. The time of a turn runs from the beginning of a step to that of the next one in the same
episode, so it holds the step, the next prompt and the wait for other episodes, but neither a start of a process nor a reset.
Servers and agents are processes of their own. Repetitions of the ways are interleaved, and a first one is not counted.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.environments import FreeEngine
from rllib_nlac import NLACConfig
from rllib_nlac.envs import base, mcp_server, task_set, tools
from rllib_nlac.envs.adapters import harness, harness_process, open_env
from rllib_nlac.envs.base import Reply, TaskId, TextEnv
from rllib_nlac.inputs.tool_calls import Call
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Generation

TURN, OPENING, ANSWER = str(Call("add", {"a": 1, "b": 2})), "What is 1 + 2?", "3"
PATIENCE_S = 600.0  # for a process to start, on a machine that has much else to do
CONTEXT = 8192  # tokens; the small model has fewer, but only its tokenizer is used
MCP_SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("tools", log_level="ERROR")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

server.run()
"""
OPEN_ENV_SERVER = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parents[1] / "tests")!r})
from open_env_server import OpenEnvServer, observation

class Same(list):
    def pop(self, place):
        return observation("{ANSWER}")

server = OpenEnvServer()
server.behaviours = Same([0])
print(server.url, flush=True)
sys.stdin.read()
"""
AGENT = f"""
import http.client, json, os, urllib.parse

at = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
line, talk = http.client.HTTPConnection(at.netloc), [{{"role": "user", "content": "{OPENING}"}}]
while True:
    line.request("POST", at.path + "/chat/completions", json.dumps({{"model": "any", "messages": talk}}))
    said = json.loads(line.getresponse().read())["choices"][0]["message"]
    talk += [said, {{"role": "user", "content": "{ANSWER}"}}]
"""


class Plain(TextEnv[None]):
    """Answers each turn with the same text."""

    system_prompt = ""

    def sample_task(self, spec: str | None) -> TaskId[None]:
        return TaskId("0", None)

    def begin(self, task: None) -> str:
        return OPENING

    def reply(self, task: None, action: str) -> Reply:
        return Reply(ANSWER)


class WithTool(tools.ToolEnv[None], Plain):
    """Answers each turn with the result of its call."""

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b


class Timed(gym.Wrapper):
    """Measures the time from each step of an episode to the next one.

    Args:
        env: The environment.
        seconds: Takes the times.
    """

    def __init__(self, env: gym.Env, seconds: list[float]) -> None:
        super().__init__(env)
        self._seconds, self._began = seconds, 0.0

    def reset(self, **arguments: Any) -> Any:
        self._began = 0.0
        return self.env.reset(**arguments)

    def step(self, action: str) -> Any:
        now = time.perf_counter()
        if self._began:
            self._seconds.append(now - self._began)
        self._began = now
        return self.env.step(action)


@dataclass(frozen=True)
class Way:
    """A way to connect an environment.

    Attributes:
        name: Its name in the table.
        make: Makes the environment.
        modules: The modules that implement it, whose lines are counted.
        waits: Whether a step waits for another process, so that steps of several episodes are made by threads.
    """

    name: str
    make: Callable[[], gym.Env]
    modules: Sequence[ModuleType]
    waits: bool = True

    @property
    def lines(self) -> int:
        return sum(len(inspect.getsource(module).splitlines()) for module in self.modules)


@dataclass
class Measured:
    """What was measured of a way with a number of episodes at once.

    Attributes:
        runner: Plays it.
        seconds: Times of turns.
        rates: Turns per second in each repetition, the starts of processes included.
    """

    runner: TextEnvRunner
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def play(self, at_once: int, turns: int) -> None:
        """Plays an episode in each slot.

        Raises:
            RuntimeError: An episode did not have all of its turns, so the figures would not be comparable.
        """
        started = time.perf_counter()
        played = [len(episode) for episode in self.runner.sample(num_episodes=at_once)]
        self.rates.append(sum(played) / (time.perf_counter() - started))
        if played != [turns] * at_once:
            raise RuntimeError(f"{at_once} episodes of {turns} turns were asked for, and {played} turns were played")


@contextmanager
def ways(folder: Path, turns: int) -> Iterator[list[Way]]:
    """All ways, while the server of OpenEnv runs."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": OPENING, "reward_model": {"style": "rule-openai/gsm8k", "ground_truth": ANSWER}}))
    mcp = {"mcp": {"command": [sys.executable, "-c", MCP_SERVER], "timeout_s": PATIENCE_S}}
    agent = [sys.executable, "-I", "-S", "-c", AGENT]
    patience = {"start_timeout_s": PATIENCE_S, "turn_timeout_s": PATIENCE_S}
    command = [sys.executable, "-c", OPEN_ENV_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            yield [
                Way("plain text", lambda: Plain(turns), [base], waits=False),
                Way("native tool call", lambda: WithTool(turns), [tools], waits=False),
                Way("MCP tool", lambda: task_set.TaskSet(str(rows), tools=mcp, max_turns=turns), [mcp_server]),
                Way("OpenEnv step", lambda: open_env.OpenEnv(url, timeout_s=PATIENCE_S, max_turns=turns), [open_env]),
                Way("harness", lambda: harness.Harness(agent, **patience, max_turns=turns), [harness, harness_process]),
            ]
        finally:
            server.stdin.close()  # which ends it


def runner_for(way: Way, at_once: int, model: Path) -> Measured:
    """An EnvRunner that plays a way with a number of slots."""
    config = NLACConfig().environment("GuessNumber").language(language_model=str(model), max_context=CONTEXT)
    config.num_envs_per_env_runner, config.env_threads = at_once, at_once if way.waits and at_once > 1 else 0
    seconds: list[float] = []
    runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: Timed(way.make(), seconds))
    ids = runner.chat.encode(TURN)
    runner.attach(FreeEngine(Generation((1,), ids, np.zeros(len(ids), np.float32), True, 0)))  # type: ignore[arg-type]
    return Measured(runner, seconds)


def measure(turns: int, repetitions: int, at_once: Sequence[int]) -> Iterator[tuple[Way, int, Measured]]:
    """Plays all ways in turn, several times."""
    with tempfile.TemporaryDirectory(prefix="connections_") as scratch:
        model = Path(scratch) / "model"
        shutil.copytree(NLACConfig().model_path, model)
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
        with ways(Path(scratch), turns) as all_ways:
            measured = {(way.name, count): runner_for(way, count, model) for way in all_ways for count in at_once}
            try:
                for repetition in range(repetitions + 1):
                    for (_, count), one in measured.items():
                        one.play(count, turns)
                        if not repetition:
                            one.seconds.clear()
                            one.rates.clear()
            finally:
                for one in measured.values():
                    one.runner.stop()
            for way in all_ways:
                for count in at_once:
                    yield way, count, measured[way.name, count]


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="turns of an episode, at least 2")
    parser.add_argument("--repetitions", type=int, default=5, help="how often each way is measured")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 32], help="episodes that are played at once")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    arguments = options().parse_args(words)
    print(f"{'':18}{'at once':>8}{'median ms':>11}{'95th percentile':>17}{'turns/s':>9}{'lines':>7}")
    for way, at_once, measured in measure(arguments.turns, arguments.repetitions, arguments.at_once):
        median, late = 1000 * np.percentile(measured.seconds, [50, 95])
        rate = np.median(measured.rates)
        print(f"{way.name:18}{at_once:8}{median:11.2f}{late:17.2f}{rate:9.0f}{way.lines:7}")


if __name__ == "__main__":
    main()
