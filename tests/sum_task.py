"""A task with a tool that is small enough for a small model: it copies two numbers into a call, and a result into an answer."""

from __future__ import annotations

from typing import Any

from rllib_nlac.envs.base import Reply, TaskId
from rllib_nlac.envs.tools import ToolEnv
from rllib_nlac.inputs.tool_calls import Call


class SumTask(ToolEnv[tuple[int, int]]):
    system_prompt = "Answer with the number alone."

    def __init__(self, top: int = 999, max_turns: int = 3, split: str = "train") -> None:
        super().__init__(max_turns=max_turns, split=split)
        self.top = top

    def sample_task(self, spec: str | None) -> TaskId[Any]:
        a, b = map(int, spec.split("+")) if spec else self.np_random.integers(10, self.top + 1, 2).tolist()
        return TaskId(f"{a}+{b}", (a, b), {"answer": str(a + b)})

    def begin(self, task: tuple[int, int]) -> str:
        return f"What is {task[0]} + {task[1]}? Use the tool."

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def answer(self, task: tuple[int, int], action: str) -> Reply:
        right = action.strip() == str(sum(task))
        return Reply("Right." if right else "Wrong.", float(right), success=right)

    def expert_action(self) -> str:
        assert self._current is not None
        a, b = self._current.task
        return str(a + b) if self.dialogue else str(Call("add", {"a": a, "b": b}))
