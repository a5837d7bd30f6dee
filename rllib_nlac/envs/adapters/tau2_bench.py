"""τ²-bench (github.com/sierra-research/tau2-bench; Python 3.12 or newer). PyPI's ``tau2`` is another package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_nlac.envs.base import Reply, TaskId, TextEnv

INSTALL = "pip install 'tau2 @ git+https://github.com/sierra-research/tau2-bench' (Python 3.12 or newer)"


class Tau2Bench(TextEnv[str]):
    """A task of τ²-bench, through its own gymnasium interface.

    Args:
        domain: "retail", "airline", "telecom" or "mock".
        task_split: As τ²-bench has it: "base", "train", "test".
        user_llm: The model that plays the user, as litellm knows it; None takes τ²-bench's default.
        user_llm_args: Its arguments, such as ``{temperature: 0.0, api_base: http://localhost:8000/v1}``.
        max_turns: Messages and tool calls per episode.

    Raises:
        ValueError: τ²-bench is not installed, or knows no such domain or split.
    """

    def __init__(
        self,
        domain: str = "retail",
        task_split: str = "train",
        user_llm: str | None = None,
        user_llm_args: Mapping[str, Any] | None = None,
        max_turns: int = 50,
    ) -> None:
        super().__init__(max_turns=max_turns, split=task_split)
        try:
            from tau2.gym.gym_agent import AgentGymEnv
            from tau2.registry import registry
        except ImportError as error:
            raise ValueError(f"the environment Tau2Bench needs τ²-bench: {INSTALL}") from error
        try:
            tasks = registry.get_tasks_loader(domain)(task_split)
        except (KeyError, ValueError) as error:
            raise ValueError(f"τ²-bench has no tasks for domain {domain!r} and split {task_split!r}: {error}") from error
        self.domain = domain
        self._names = [str(task.id) for task in tasks]
        self._settings: dict[str, Any] = {"max_steps": 4 * max_turns}
        if user_llm is not None:
            self._settings["user_llm"] = user_llm
        if user_llm_args:
            self._settings["user_llm_args"] = dict(user_llm_args)
        self._make = AgentGymEnv
        self._inner: Any = None
        self._prompt = ""

    @property
    def system_prompt(self) -> str:
        return self._prompt

    def sample_task(self, spec: str | None) -> TaskId[str]:
        name = self._names[int(self.np_random.integers(len(self._names)))] if spec is None else str(spec)
        if name not in self._names:
            raise ValueError(
                f"no task is called {name!r}; the split {self.split!r} has {len(self._names)}, as {self._names[0]!r}"
            )
        return TaskId(name, name)

    def begin(self, task: str) -> str:
        self.close()
        self._inner = self._make(domain=self.domain, task_id=task, **self._settings)
        observation, info = self._inner.reset()
        tools = "\n".join(str(getattr(tool, "openai_schema", tool)) for tool in info.get("tools", ()))
        self._prompt = f"{info.get('policy', '')}\n\nTools:\n{tools}".strip()
        return str(observation)

    def reply(self, task: str, action: str) -> Reply:
        observation, reward, terminated, truncated, _ = self._inner.step(action)
        if not (terminated or truncated):
            return Reply(str(observation))
        return Reply(str(observation), float(reward), success=float(reward) >= 1.0)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None
