"""τ-bench v1 (github.com/sierra-research/tau-bench, not on PyPI), imported when an environment is made."""

from __future__ import annotations

import json
from typing import Any

from rllib_nlac.envs.base import Reply, TaskId, TextEnv
from rllib_nlac.envs.service_desk.store import ToolError, parse_tool_call

INSTALL = "pip install 'tau_bench @ git+https://github.com/sierra-research/tau-bench'"
RESPOND = "respond"  # τ-bench's name of the action that speaks to the user
HOW_TO_ACT = (
    "Each turn you either write to the user, in plain text, or call a tool. A tool call is one JSON object and nothing else, "
    'as in {"name": "TOOL", "arguments": {...}}.'
)


class TauBench(TextEnv[int]):
    """A task of τ-bench: its tools, its policy, its simulated user, its reward.

    The user is a language model behind litellm, as τ-bench has it; the policy in training never plays it.

    Args:
        domain: "retail" or "airline".
        task_split: "train", "dev" or "test", as far as the domain has them.
        user_model: Name of the model that plays the user, as litellm knows it.
        user_provider: Its provider, as litellm knows it; "openai" with OPENAI_API_BASE set reaches any compatible endpoint.
        user_strategy: As in τ-bench: "llm", "react", "verify", "reflection".
        max_turns: Messages and tool calls per episode.

    Raises:
        ValueError: τ-bench is not installed, or knows no such domain, split or strategy.
    """

    def __init__(
        self,
        domain: str = "retail",
        task_split: str = "train",
        user_model: str = "gpt-4o",
        user_provider: str = "openai",
        user_strategy: str = "llm",
        max_turns: int = 30,
    ) -> None:
        super().__init__(max_turns=max_turns, split=task_split)
        try:
            from tau_bench.envs import get_env
            from tau_bench.types import Action
        except ImportError as error:
            raise ValueError(f"the environment TauBench needs τ-bench: {INSTALL}") from error
        self._action_type = Action
        # The first task is fixed, or τ-bench would draw one from the global random state and ask the user model here.
        self._inner = get_env(
            domain,
            user_strategy=user_strategy,
            user_model=user_model,
            user_provider=user_provider,
            task_split=task_split,
            task_index=0,
        )

    @property
    def system_prompt(self) -> str:
        tools = "\n".join(json.dumps(tool["function"]) for tool in self._inner.tools_info)
        return f"{self._inner.wiki}\n\n{HOW_TO_ACT}\n\nTools:\n{tools}"

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._inner.tools_info

    def sample_task(self, spec: str | None) -> TaskId[int]:
        count = len(self._inner.tasks)
        index = int(self.np_random.integers(count)) if spec is None else int(spec)
        if not 0 <= index < count:
            raise ValueError(f"task {spec!r} does not exist; the split {self.split!r} has 0 to {count - 1}")
        return TaskId(str(index), index)

    def begin(self, task: int) -> str:
        return str(self._inner.reset(task_index=task).observation)

    def reply(self, task: int, action: str) -> Reply:
        try:
            call = parse_tool_call(action)
        except ToolError as error:
            return Reply(f"Error: {error}")
        name, arguments = call if call is not None else (RESPOND, {"content": action})
        answer = self._inner.step(self._action_type(name=name, kwargs=arguments))
        success = float(answer.reward) >= 1.0 if answer.done else None
        return Reply(str(answer.observation), float(answer.reward) if answer.done else 0.0, success=success)
