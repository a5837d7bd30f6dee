"""The contract, as everyone's environments are put through it: ours keep it, and each way to break it is found."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sys
import time

import gymnasium as gym
import pytest
from typer.testing import CliRunner

from rllib_nlac.command.cli import app
from rllib_nlac.envs import contract, registry
from rllib_nlac.envs.spaces import TextSpace

pytestmark = pytest.mark.process  # the check of odd texts forks
PLAYABLE = [
    ("TwentyQuestions", {}),
    ("TwentyQuestions", {"num_objects": 16, "num_attributes": 8, "max_turns": 6}),
    ("TextHouse", {}),
    ("TextHouse", {"depth": 4, "memory": True, "brief": True, "vary_goal": True}),
    ("MathReasoning", {}),
    ("MathReasoning", {"level": 5, "max_turns": 3}),
    ("ServiceDesk", {}),
    ("ServiceDesk", {"split": "eval"}),
    ("GuessNumberTools", {}),
    ("TextArena", {}),
    ("ReasoningGym", {"attempts": 3}),
]


@pytest.mark.parametrize(("name", "config"), PLAYABLE)
def test_every_registered_environment_keeps_it(name, config):
    findings = list(contract.check_environment(lambda: registry.make(name, config), seeds=range(20)))
    assert len(findings) == 14 and [f for f in findings if f.verdict == "FAILED"] == []
    notes = [f.check for f in findings if f.verdict == "note"]
    assert notes == (["the scripted expert gets the largest return"] if name == "TextArena" else [])


class Good(gym.Env):
    """Keeps the contract; each subclass breaks it in one place."""

    def __init__(self):
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.turn = self.draw(), 0
        return self.first(), {"system_prompt": "Guess.", "task_id": f"t{self.number}", **self.more()}

    def draw(self):
        return int(self.np_random.integers(1000))

    def first(self):
        return f"It starts with {self.number // 100}."

    def more(self):
        return {"privileged": {"answer": f"number {self.number}"}}

    def step(self, action):
        self.turn += 1
        return self.reply(action), self.pay(), False, self.turn >= 5, {"success": False}

    def reply(self, action):
        return f"Not {self.turn + self.number}."

    def pay(self):
        return 0.0


class SharedState(Good):
    turns = [0]

    def reply(self, action):
        self.turns[0] += 1
        return f"{self.turns[0]}"


BROKEN = {
    "the same seed": type("GlobalDraw", (Good,), {"draw": lambda self: random.randrange(1000)}),
    "instances do not": SharedState,
    "global random states": type("Disturbs", (Good,), {"reply": lambda self, a: str(random.random() and 1)}),
    "no text crashes": type("Crashes", (Good,), {"reply": lambda self, a: a.split()[0]}),
    "what it returns can be": type("SaysNothingInTheEnd", (Good,), {"reply": lambda self, a: "x" if self.turn < 5 else None}),
    "episodes end": type("Endless", (Good,), {"step": lambda self, a: ("x", 0.0, False, False, {"success": False})}),
    "what is hidden": type("Tells", (Good,), {"first": lambda self: f"Not number {self.number}, honestly."}),
    "what is hidden stays": type(
        "IsItsTask", (Good,), {"more": lambda self: {"task_id": f"number {self.number}", **Good.more(self)}}
    ),
    "the scripted expert": type("Fails", (Good,), {"expert_action": lambda self: "I give up."}),
    "pickled": type("Forgets", (Good,), {"__setstate__": lambda self, state: self.__dict__.update(state | {"number": 0})}),
    "what it returns": type("Odd", (Good,), {"more": lambda self: {"system_prompt": 7}}),
    "what it returns can": type("PaysNothing", (Good,), {"pay": lambda self: float("nan")}),
    "gymnasium's": type("NoSeed", (Good,), {"reset": lambda self, **options: ("x", {})}),
    "can be built": type(
        "Numbers", (Good,), {"__init__": lambda self: setattr(self, "observation_space", gym.spaces.Discrete(2))}
    ),
}


@pytest.mark.parametrize("check", BROKEN)
def test_each_way_to_break_it_is_found_and_explained(check, monkeypatch):
    monkeypatch.setattr(contract, "MAX_STEPS", 100)
    for cls in BROKEN.values():  # picklable
        monkeypatch.setitem(globals(), cls.__name__, cls)
        cls.__module__, cls.__qualname__ = __name__, cls.__name__
    failed = {f.check: f.detail for f in contract.check_environment(BROKEN[check]) if f.verdict == "FAILED"}
    assert any(name.startswith(check) for name in failed), failed
    assert all(len(detail) > 20 for detail in failed.values())


def dies(self, action):
    if action == "%s {0} \\boxed{":
        os.kill(os.getpid(), signal.SIGKILL)  # as a segmentation fault, without its report on stderr
    return "x"


def leaves(self, action):
    return sys.exit(0) if action == " " else "x"


def hangs(self, action):
    while action.startswith("x x"):
        time.sleep(0.01)
    return "x"


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (dies, r"step\('%s \{0\} .*boxed\{'\) ended the process \(SIGKILL\)"),
        (leaves, r"step\(' '\) ended the process \(exit status 0\)"),
        (hangs, r"step\('x x .*' and so on, 100000 characters\) did not return within 0\.5 s"),
    ],
)
def test_a_text_that_kills_or_stops_the_process_is_named(reply, complaint, monkeypatch):
    monkeypatch.setattr(contract, "HANGS_S", 0.5 if reply is hangs else 60.0)
    findings = list(contract.check_environment(type("Fatal", (Good,), {"reply": reply}), seeds=range(2)))
    (failed,) = [f for f in findings if f.verdict == "FAILED"]
    assert failed.check == "no text crashes it" and re.match(complaint, failed.detail) and len(findings) == 14
    assert not multiprocessing.active_children()


def without(key: str, answer: tuple) -> tuple:
    *rest, info = answer
    return *rest, {name: value for name, value in info.items() if name != key}


class Slow(Good):
    def reply(self, action):
        time.sleep(contract.SLOW_EPISODE_S / 4)  # in each of five turns
        return super().reply(action)


class Untold(Good):
    def reset(self, *, seed=None, options=None):
        return without("system_prompt", super().reset(seed=seed))


NOTED = {
    "has no 'system_prompt'": Untold,
    "has no 'success'": type("Unjudged", (Good,), {"step": lambda self, a: without("success", Good.step(self, a))}),
    "gave the same episode each": type("OneTask", (Good,), {"draw": lambda self: 7}),
    "it cannot be pickled": type("Unpicklable", (Good,), {"__reduce__": lambda self: {}["none"]}),
    "env_threads": Slow,
}


@pytest.mark.parametrize("note", NOTED)
def test_what_somebody_should_know_is_noted(note):
    assert contract.SLOW_EPISODE_S == 0.05
    findings = list(contract.check_environment(NOTED[note], seeds=range(2)))
    assert not [f for f in findings if f.verdict == "FAILED"]
    assert [f for f in findings if f.verdict == "note" and note in f.detail]


def test_a_good_one_only_gets_notes():
    findings = list(contract.check_environment(Good))
    assert [f.check for f in findings if f.verdict == "note"] == ["the scripted expert gets the largest return"]
    assert not [f for f in findings if f.verdict == "FAILED"]


def test_keys_of_info_may_be_none():
    class Silent(Good):
        def more(self):
            return dict.fromkeys(("privileged", "subgoals", "stop_reason", "success", "discard"))

    assert not [f for f in contract.check_environment(Silent) if f.verdict == "FAILED"]


MY_GAME = """
import gymnasium as gym
from rllib_nlac.envs.spaces import TextSpace


class Game(gym.Env):
    def __init__(self, word: str = "yes"):
        self.observation_space = self.action_space = TextSpace()
        self.word = word

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say it.", {"system_prompt": "Say the word."}

    def step(self, action):
        won = action.strip() == self.word
        return "Right." if won else "No.", float(won), True, False, {"success": won}
"""


class TestCommands:
    @pytest.fixture(autouse=True)
    def my_game(self, tmp_path, monkeypatch):
        (tmp_path / "my_game_of_tests.py").write_text(MY_GAME)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "200")

    def run(self, *arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, ["env", *arguments], input=stdin)

    def test_list(self):
        result = self.run("list")
        assert result.exit_code == 0
        for name in registry.ENVIRONMENTS:
            assert name in result.stdout
        assert "max_turns" in result.stdout and "tau_bench)" in result.stdout

    def test_play(self):
        result = self.run("play", "my_game_of_tests:Game", stdin="yes\n\n")
        assert result.exit_code == 0, result.output
        for text in ("Say the word.", "Say it.", "Right.", "success True, return 1, terminated"):
            assert text in result.stdout
        config = '{"num_objects": 16, "max_turns": 2}'
        result = self.run(
            "play", "TwentyQuestions", "--config", config, "--task", "dog", stdin="Is it big?\n\nIs it a dog?\n\n"
        )
        assert "No." in result.stdout and "Correct!" in result.stdout

    def test_play_can_be_left(self):
        assert self.run("play", "TwentyQuestions", stdin="").exit_code == 0

    def test_check(self):
        result = self.run("check", "my_game_of_tests:Game")
        assert result.exit_code == 0 and "keeps the contract" in result.stdout and "only one task?" in result.stdout

    def test_check_fails_with_1(self, tmp_path):
        broken = MY_GAME.replace("won = action.strip() == self.word", "won = action.split()[0] == self.word")
        (tmp_path / "my_broken_game.py").write_text(broken)
        result = self.run("check", "my_broken_game:Game")
        assert result.exit_code == 1 and "step('') raised IndexError" in result.stdout and "checks failed" in result.stdout

    def test_mistakes(self):
        for arguments, complaint in (
            (["check", "TwentyQestions"], "did you mean 'TwentyQuestions'"),
            (["check", "no_such_module:Game"], "No module named 'no_such_module'"),
            (["check", "my_game_of_tests:Gme"], "has no attribute 'Gme'"),
            (["play", "my_game_of_tests:Game", "--config", "{wrd: x}"], "did you mean 'word'"),
            (["check", "TauBench"], "needs τ-bench: pip install"),
        ):
            result = self.run(*arguments)
            assert result.exit_code == 2 and complaint in result.stdout.replace("\n", " "), result.output


def test_one_seed_is_enough():
    """Fails where a second player is waited for that never was."""
    assert not [f for f in contract.check_environment(Good, seeds=[3]) if f.verdict == "FAILED"]
