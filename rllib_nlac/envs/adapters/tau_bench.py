"""τ-bench v1 (github.com/sierra-research/tau-bench, not on PyPI), imported when an environment is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rllib_nlac.envs.base import EpisodeLost, Reply, TaskId, TextEnv
from rllib_nlac.envs.service_desk.store import ToolError, parse_tool_call

INSTALL = "pip install 'tau_bench @ git+https://github.com/sierra-research/tau-bench'"
HUMAN = "human"
RESPOND = "respond"  # τ-bench's name of the action that speaks to the user
HOW_TO_ACT = (
    "Each turn you either write to the user, in plain text, or call a tool. A tool call is one JSON object and nothing else, "
    'as in {"name": "TOOL", "arguments": {...}}.'
)


class TauBench(TextEnv[int]):
    """A task of τ-bench: its tools, its policy, its simulated user, its reward.

    The user is a language model behind litellm, as τ-bench has it; the policy in training never plays it. Where it cannot be
    reached an episode is lost and counted (``stop_reason_endpoint_failure``). Where it refuses the dialogue, as one that is too
    long for it, the task has failed.

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
            from openai import BadRequestError, OpenAIError  # what litellm's errors are
            from tau_bench.envs import get_env
            from tau_bench.envs.user import UserStrategy, load_user
            from tau_bench.types import Action
        except ImportError as error:
            raise ValueError(f"the environment TauBench needs τ-bench: {INSTALL}") from error
        strategies = [each.value for each in UserStrategy]
        if user_strategy not in strategies:
            raise ValueError(f"env_config.user_strategy is {user_strategy!r}; τ-bench knows {', '.join(strategies)}")
        self._action_type, self._refused, self._out_of_reach = Action, BadRequestError, OpenAIError
        self._make_user = partial(load_user, user_strategy, user_model, user_provider)
        self._has_user = False
        # The first task is fixed, or τ-bench would draw one from the global random state. A model that plays the user is asked
        # for words as soon as it is made, so it takes the human's place at the first reset.
        self._inner = get_env(domain, user_strategy=HUMAN, user_model=user_model, task_split=task_split, task_index=0)

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
        with self._lost_without_user():
            if not self._has_user:
                self._inner.user, self._has_user = self._make_user(), True
            return str(self._inner.reset(task_index=task).observation)

    def reply(self, task: int, action: str) -> Reply:
        try:
            call = parse_tool_call(action)
        except ToolError as error:
            return Reply(f"Error: {error}")
        name, arguments = call if call is not None else (RESPOND, {"content": action})
        if name == RESPOND and not isinstance(arguments.get("content"), str):
            return Reply(f"Error: {RESPOND} needs a text under 'content'")
        try:
            with self._lost_without_user():
                answer = self._inner.step(self._action_type(name=name, kwargs=arguments))
        except self._refused as error:
            return Reply(f"Error: {type(error).__name__}", success=False)
        success = float(answer.reward) >= 1.0 if answer.done else None
        return Reply(str(answer.observation), float(answer.reward) if answer.done else 0.0, success=success)

    @contextmanager
    def _lost_without_user(self) -> Iterator[None]:
        try:
            yield
        except self._refused:
            raise
        except self._out_of_reach as error:
            raise EpisodeLost("endpoint_failure", f"τ-bench's user: {type(error).__name__}: {error}") from None
