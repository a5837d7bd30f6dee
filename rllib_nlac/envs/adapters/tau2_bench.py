"""τ²-bench (github.com/sierra-research/tau2-bench; Python 3.12 or 3.13). PyPI's ``tau2`` is another package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rllib_nlac.envs.adapters.tau_bench import HOW_TO_ACT
from rllib_nlac.envs.base import EpisodeLost, Reply, TaskId
from rllib_nlac.envs.tools import ForeignToolEnv
from rllib_nlac.inputs.tool_calls import Call

# From a clone, because its tasks are in no package.
INSTALL = "git clone https://github.com/sierra-research/tau2-bench; pip install -e ./tau2-bench (Python 3.12 or 3.13)"
DECIDED = ("user_stop", "agent_stop")  # ends of a dialogue that τ²-bench grades


class Tau2Bench(ForeignToolEnv[str]):
    """A task of τ²-bench, through its own gymnasium interface.

    A language model plays the user. 40 of the 114 retail tasks are also graded by one, which τ²-bench fixes:
    ``gpt-4.1-2025-04-14``, reached by litellm with OPENAI_API_KEY and OPENAI_API_BASE. Where one of them fails, an episode is
    lost and counted (``stop_reason_endpoint_failure``). After ten tool errors the task has failed
    (``stop_reason_too_many_errors``). τ²-bench's own log is turned off.

    Args:
        domain: "retail", "airline", "telecom" or "mock".
        task_split: As τ²-bench has it: "base", "train", "test".
        user_llm: The model that plays the user, as litellm knows it; None takes τ²-bench's default.
        user_llm_args: Its arguments, such as ``{temperature: 0.0, api_base: http://localhost:8000/v1}``.
        max_turns: Messages and tool calls per episode.
        plain_text: Whether the system prompt lists the tools and observations are as τ²-bench's gymnasium interface words them,
            for comparison; else tools and results go into the places that the model's chat template has for them.

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
        plain_text: bool = False,
    ) -> None:
        super().__init__(max_turns=max_turns, split=task_split, plain_text=plain_text)
        try:
            from loguru import logger

            logger.disable("tau2")  # 35 lines a step
            from tau2.data_model.message import AssistantMessage
            from tau2.gym.gym_agent import AgentGymEnv
            from tau2.registry import registry
        except ImportError as error:
            raise ValueError(f"the environment Tau2Bench needs τ²-bench: {INSTALL}") from error
        try:
            tasks = registry.get_tasks_loader(domain)(task_split)
            playable = {task.id for task in registry.get_tasks_loader(domain)()}  # AgentGymEnv looks for its task there
        except (KeyError, ValueError) as error:
            raise ValueError(f"τ²-bench has no tasks for domain {domain!r} and split {task_split!r}: {error}") from error
        except OSError as error:
            raise ValueError(
                f"τ²-bench's data are missing, set TAU2_DATA_DIR to the folder data of a clone: {error}"
            ) from error
        if not playable.issuperset(task.id for task in tasks):
            raise ValueError(
                f"τ²-bench's own interface lacks tasks of {domain!r}, split {task_split!r}: take 'train', 'test' or 'base'"
            )
        self.domain = domain
        self._names = [str(task.id) for task in tasks]
        self._settings: dict[str, Any] = {"max_steps": 4 * max_turns}
        if user_llm is not None:
            self._settings["user_llm"] = user_llm
        if user_llm_args:
            self._settings["user_llm_args"] = dict(user_llm_args)
        self._make = AgentGymEnv
        self._inner: Any = None
        self._farewell = AssistantMessage(role="assistant", content="###STOP###")
        self._policy, self._fault = "", ""

    @property
    def system_prompt(self) -> str:
        return self.with_tools(f"{self._policy}\n\n{HOW_TO_ACT}")

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
        self._inner._log = self._note
        observation, info = self._inner.reset()
        if not observation:
            raise self._lost("it ended before the agent's first turn")
        self._policy = info["policy"]
        self.offer([tool.openai_schema for tool in info["tools"]])
        return self._said(observation)

    def act(self, task: str, action: str, call: Call | None) -> Reply:
        if call is not None:
            action = json.dumps(call._asdict())
        try:
            observation, reward, terminated, _, info = self._inner.step(action)
        except Exception as error:  # whatever the judge's answer leads to
            raise self._lost(f"the episode could not be graded: {type(error).__name__}: {error}") from None
        said = self._said(observation)
        if not terminated:
            return Reply(said)
        run = json.loads(info["simulation_run"])
        if not run:
            raise self._lost("the simulation failed")
        ending = run["termination_reason"]
        if ending in DECIDED:
            return Reply(said, float(reward), success=float(reward) >= 1.0)
        text = f"{said}\nThe dialogue was ended: {ending.replace('_', ' ')}."
        return Reply(text, success=False, truncated=ending == "max_steps", stop_reason=ending)

    def _said(self, observation: Any) -> str:
        """An observation, which names its speaker; outside plain text the role of its message does."""
        return str(observation) if self._plain_text else re.sub(r"\A(?:user|tool): ", "", str(observation))

    def _note(self, message: str, level: str = "INFO") -> None:
        """Takes the place of τ²-bench's log, where alone it says why a simulation failed."""
        if level == "ERROR":
            self._fault = message

    def _lost(self, cause: str) -> EpisodeLost:
        return EpisodeLost("endpoint_failure", f"τ²-bench: {cause}. {self._fault}".strip())

    def close(self) -> None:
        """Ends the simulation, which otherwise waits for the agent's next turn in a thread of its own."""
        inner, self._inner, self._fault = self._inner, None, ""
        if inner is None or inner._orchestrator is None:
            return
        inner._orchestrator.max_steps = 0  # where the user has the turn
        if inner._agent.is_agent_turn:
            inner._agent.set_action(self._farewell)
