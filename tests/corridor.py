"""The corridor of algorithm.md's theory section: a toy world whose values are known, and an exact model of language for it.

Rooms A, B, C; WIN and LOSE end. Text is canonical JSON of discounted feature counts, so that the language Bellman backup is
the Bellman backup of successor features, and every stage can be checked against numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping

import gymnasium as gym
import numpy as np
from scripted_engine import ScriptedEngine, last_message

from rllib_nlac.engine.chat import Chat
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import Generation, Message, Transition, Weights

GAMMA = 0.9
ROOMS, ACTIONS, ENDS = ("A", "B", "C"), ("left", "right"), ("WIN", "LOSE")
DYNAMICS: dict[tuple[str, str], dict[str, float]] = {
    ("A", "right"): {"B": 0.9, "LOSE": 0.1},
    ("A", "left"): {"A": 1.0},
    ("B", "right"): {"C": 0.5, "LOSE": 0.5},
    ("B", "left"): {"C": 0.8, "A": 0.2},
    ("C", "right"): {"WIN": 1.0},
    ("C", "left"): {"A": 1.0},
}
PAIRS = list(DYNAMICS)
UNIFORM = {room: {"left": 0.5, "right": 0.5} for room in ROOMS}
OPTIMAL = {"A": {"right": 1.0}, "B": {"left": 1.0}, "C": {"right": 1.0}}

Features = dict[str, float]
Successor = dict[tuple[str, str], Features]

# Every prompt is the room, the action and one instruction; what the engine must know is in plain sight of the text.
PROMPTS = PromptSet(
    name="corridor",
    version=1,
    system="",
    predict="PREDICT",
    backup="BACKUP {observation}|{reward}|{next_future}",
    backup_end="END {observation}|{reward}",
    evaluate="EVALUATE {futures}",
    refine="REFINE {critique}",
)


class Corridor(gym.Env[str, str]):
    """Begins in any room; every observation is the name of a room or of an end."""

    def __init__(self, max_turns: int = 100) -> None:
        self.observation_space = self.action_space = TextSpace()
        self.max_turns = max_turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room, self.turn = str(self.np_random.choice(ROOMS)), 0
        return self.room, {}

    def step(self, action):
        self.turn += 1
        outcomes = DYNAMICS[self.room, action]
        self.room = str(self.np_random.choice(list(outcomes), p=list(outcomes.values())))
        ended = self.room in ENDS
        success = {"success": self.room == "WIN"} if ended else {}
        return self.room, float(self.room == "WIN"), ended, not ended and self.turn >= self.max_turns, success


def write(features: Mapping[str, float]) -> str:
    """A description d of a future: its discounted feature counts and, as the parser wants it, an outcome."""
    counts = json.dumps({name: features.get(name, 0.0) for name in sorted({*ROOMS, *ENDS})}, separators=(",", ":"))
    return f"{counts} {'SUCCESS' if features.get('WIN', 0.0) >= 0.5 else 'FAILURE'}"


def read(text: str) -> Features:
    """dec(d)."""
    return json.loads(text[text.index("{") : text.index("}") + 1])


def q(text: str) -> float:
    """Q = g(Q_L): the discounted count of WIN."""
    return read(text)["WIN"]


class ExactModel:
    """What a perfect language model would answer in each role.

    Args:
        successor: M, by (room, action).
        next_action: a' in a room; the target policy's.
    """

    def __init__(self, successor: Successor, next_action: Callable[[str], str]) -> None:
        self.successor = successor
        self.next_action = next_action

    def __call__(self, prompt: str, weights: Weights) -> str:
        instruction = last_message(prompt)
        if instruction in ROOMS:
            return self.next_action(instruction)
        room, action = prompt.split("<|user|>")[-2].split("<|end|><|assistant|>")
        action = action.split("<|end|>")[0]
        word, _, rest = instruction.partition(" ")
        if word == "PREDICT":
            return f"Future: {write(self.successor[room, action])}"
        if word == "END":
            return f"Future: {write({rest.split('|')[0]: 1.0})}"
        if word == "BACKUP":
            observation, _, later = rest.split("|", 2)
            counts = Counter({name: GAMMA * value for name, value in read(later).items()})
            counts[observation] += 1.0
            return f"Future: {write(counts)}"
        if word == "EVALUATE":
            value = float(np.mean([q(line) for line in rest.splitlines()]))
            best = max(ACTIONS, key=lambda other: value if other == action else q(write(self.successor[room, other])))
            if best == action:
                return f"Optimal: Yes\nReason: value {value!r}"
            return f"Optimal: No\nReason: value {value!r}\nFix: {best}"
        assert word == "REFINE"
        return rest.rsplit("Fix: ", 1)[1]


def engine_for(chat: Chat, model: Callable[[str, Weights], str]) -> ScriptedEngine:
    """The exact model behind the engine protocol."""
    return ScriptedEngine(chat, model)


def step(room: str, action: str, outcome: str, id: int = 0) -> Transition:
    """One transition of the corridor."""
    return Transition(
        id=id,
        env="Corridor",
        state=(Message("user", room),),
        action=action,
        generation=Generation((3,), (5,), np.zeros(1, np.float32), True, 0),
        observation=outcome,
        reward=float(outcome == "WIN"),
        terminated=outcome in ENDS,
        truncated=False,
        episode_success=outcome == "WIN",
        returns_to_go=float(outcome == "WIN"),
    )


def solve(
    policy: Mapping[str, Mapping[str, float]], dynamics: Mapping[tuple[str, str], Mapping[str, float]] = DYNAMICS
) -> Successor:
    """ψ of a policy in closed form: (I - γ P)^-1 times the expected next features, independent of the package."""
    index = {pair: i for i, pair in enumerate(PAIRS)}
    names = sorted({*ROOMS, *ENDS})
    expected = np.array([[dynamics[pair].get(name, 0.0) for name in names] for pair in PAIRS])
    follows = np.zeros((len(PAIRS), len(PAIRS)))
    for pair in PAIRS:
        for outcome, chance in dynamics[pair].items():
            for action, probability in policy.get(outcome, {}).items():
                follows[index[pair], index[outcome, action]] += chance * probability
    psi = np.linalg.solve(np.eye(len(PAIRS)) - GAMMA * follows, expected)
    return {pair: dict(zip(names, psi[i], strict=True)) for pair, i in index.items()}


def largest_difference(left: Successor, right: Successor) -> float:
    """Sup norm over pairs and features."""
    return max(abs(left[pair].get(name, 0.0) - right[pair].get(name, 0.0)) for pair in PAIRS for name in (*ROOMS, *ENDS))
