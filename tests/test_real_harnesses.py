"""Agents that others wrote, each in a virtual environment of its own, played by a script that calls a tool and answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rllib_nlac.envs.adapters.harness import Harness
from rllib_nlac.envs.answers import checked_reset, checked_step
from rllib_nlac.inputs.tool_calls import Call

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(3600)]
AGENTS = Path(__file__).parent / "harnesses"


@pytest.fixture
def python_with(tmp_path) -> Callable[[str], str]:
    """Makes a virtual environment with a package."""

    def make(package: str) -> str:
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
        python = str(tmp_path / "venv/bin/python")
        subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
        return python

    return make


def play(command: list[str], *turns: str) -> tuple[list[dict], list[tuple]]:
    """The infos of an episode of 5 + 7, and what each turn was answered."""
    env = Harness(command, start_timeout_s=300, turn_timeout_s=300)
    try:
        observation, info = checked_reset(env.reset(options={"task_id": "5"}))
        assert observation.endswith("What is 5 + 7?") and info["tools"][0]["function"]["name"] == "add"
        steps = [checked_step(env.step(turn)) for turn in turns]
        return [info, *(step[-1] for step in steps)], [step[:4] for step in steps]
    finally:
        env.close()


CALL = f"So. {Call('add', {'a': 5, 'b': 7})}"
RESULT = {"role": "tool", "content": "12", "name": "add", "tool_call_id": "call_1_0"}


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize(("said", "reward"), [("It is 12.", 1.0), ("It is 13.", 0.0)])
def test_the_client_of_openai(way, said, reward):
    infos, steps = play([sys.executable, str(AGENTS / "openai_agent.py"), way], CALL, said)
    assert infos[0]["system_prompt"] == "Use the tool." and infos[1]["new_messages"] == [RESULT]
    assert [step[1:] for step in steps] == [(0.0, False, False), (reward, True, False)]


def test_smolagents(python_with):
    python = python_with("smolagents[openai]==1.26.0")
    answer = str(Call("final_answer", {"answer": "12"}))
    infos, steps = play([python, str(AGENTS / "smolagents_agent.py")], "Hm.", CALL, answer)
    assert [tool["function"]["name"] for tool in infos[0]["tools"]] == ["add", "final_answer"]
    assert "Error while parsing tool call" in steps[0][0] and steps[1][0] == "Observation:\n12"
    assert steps[2][1:3] == (1.0, True)


def test_verifiers(python_with):
    python = python_with("verifiers==0.4.0")
    infos, steps = play([python, str(AGENTS / "verifiers_env.py")], CALL, "It is 12.")
    assert infos[1]["new_messages"] == [RESULT]
    assert steps[1][1:3] == (1.0, True)
