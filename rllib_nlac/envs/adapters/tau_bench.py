"""τ-bench v1 (github.com/sierra-research/tau-bench, not on PyPI), imported when an environment is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from rllib_nlac.envs.base import EpisodeLost, Reply, TaskId
from rllib_nlac.envs.tools import ForeignToolEnv
from rllib_nlac.inputs.tool_calls import Call

# Without its dependencies, which downgrade protobuf below what TensorBoard needs.
INSTALL = "pip install litellm tenacity termcolor; pip install --no-deps 'tau_bench @ git+https://github.com/sierra-research/tau-bench'"
SPLITS = {"retail": ("train", "dev", "test"), "airline": ("test",)}
HUMAN, REACT = "human", "react"
STOP = "###STOP###"
RESPOND = "respond"  # τ-bench's name of the action that speaks to the user
HOW_TO_ACT = "Each turn you either write to the user, in plain text, or call a tool."


class TauBench(ForeignToolEnv[int]):
    """A task of τ-bench: its tools, its policy, its simulated user, its reward.

    The user is a language model behind litellm, as τ-bench has it; the policy in training never plays it. Where it gives no
    usable answer an episode is lost and counted (``stop_reason_endpoint_failure``). Where it refuses what the agent wrote, as a
    dialogue that is too long for it, the task has failed.

    Args:
        domain: "retail" or "airline".
        task_split: "train", "dev" or "test" for retail, "test" for airline.
        user_model: Name of the model that plays the user, as litellm knows it.
        user_provider: Its provider, as litellm knows it; "openai" with OPENAI_API_BASE set reaches any compatible endpoint.
        user_strategy: As in τ-bench: "llm", "react", "verify", "reflection".
        max_turns: Messages and tool calls per episode.
        plain_text: Whether the system prompt lists the tools and results are texts of the user's, for comparison; else both go
            into the places that the model's chat template has for them.

    Raises:
        ValueError: τ-bench is not installed, or knows no such domain, split or strategy.
    """

    errors: ClassVar[tuple[str, ...]] = ("Error: ", "Unknown action ")

    def __init__(
        self,
        domain: str = "retail",
        task_split: str = "train",
        user_model: str = "gpt-4o",
        user_provider: str = "openai",
        user_strategy: str = "llm",
        max_turns: int = 30,
        plain_text: bool = False,
    ) -> None:
        super().__init__(max_turns=max_turns, split=task_split, plain_text=plain_text)
        if task_split not in SPLITS.get(domain, ()):
            known = "; ".join(f"{name}: {', '.join(splits)}" for name, splits in SPLITS.items())
            raise ValueError(f"env_config has domain {domain!r} and task_split {task_split!r}; τ-bench has {known}")
        try:
            from openai import BadRequestError  # what litellm's errors are
            from tau_bench.envs import get_env
            from tau_bench.envs.user import UserStrategy, load_user
            from tau_bench.types import Action
        except ImportError as error:
            raise ValueError(f"the environment TauBench needs τ-bench: {INSTALL}") from error
        strategies = [each.value for each in UserStrategy]
        if user_strategy not in strategies:
            raise ValueError(f"env_config.user_strategy is {user_strategy!r}; τ-bench knows {', '.join(strategies)}")
        self._action_type, self._refused = Action, BadRequestError
        # The first task is fixed, or τ-bench would draw one from the global random state. A model that plays the user is asked
        # for words as soon as it is made, so it takes the human's place, and is made at the first reset.
        self._inner = get_env(domain, user_strategy=HUMAN, user_model=user_model, task_split=task_split, task_index=0)
        self.offer(self._inner.tools_info)
        self._inner.user = _User(
            partial(load_user, user_strategy, user_model, user_provider), BadRequestError, user_strategy == REACT
        )

    @property
    def system_prompt(self) -> str:
        return self.with_tools(f"{self._inner.wiki}\n\n{HOW_TO_ACT}")

    def sample_task(self, spec: str | None) -> TaskId[int]:
        count = len(self._inner.tasks)
        index = int(self.np_random.integers(count)) if spec is None else int(spec) if str(spec).isdecimal() else -1
        if not 0 <= index < count:
            raise ValueError(f"task {spec!r} does not exist; the split {self.split!r} has 0 to {count - 1}")
        return TaskId(str(index), index)

    def begin(self, task: int) -> str:
        return str(self._inner.reset(task_index=task).observation)

    def act(self, task: int, action: str, call: Call | None) -> Reply:
        name, arguments = call if call is not None else (RESPOND, {"content": action})
        if name == RESPOND and not (isinstance(arguments.get("content"), str) and arguments["content"].strip()):
            return Reply(f"Error: {RESPOND} needs a text under 'content'")
        try:
            answer = self._inner.step(self._action_type(name=name, kwargs=arguments))
        except self._refused as error:
            return Reply(f"Error: {type(error).__name__}", success=False)
        success = float(answer.reward) >= 1.0 if answer.done else None
        return Reply(str(answer.observation), float(answer.reward) if answer.done else 0.0, success=success)


class _User:
    """τ-bench's user. A failure of it loses the episode, except that it refuses what the agent wrote."""

    def __init__(self, make: Callable[[], Any], refusal: type[Exception], hides_thoughts: bool) -> None:
        self._make, self._refusal, self._hides_thoughts = make, refusal, hides_thoughts
        self._user: Any = None

    def reset(self, instruction: str | None = None) -> str:
        return self._say("reset", instruction, None)

    def step(self, content: str) -> str:
        return self._say("step", content, self._refusal)

    def get_total_cost(self) -> Any:
        return self._user.get_total_cost()

    def _say(self, method: str, text: str | None, refusal: type[Exception] | None) -> str:
        try:
            if self._user is None:
                self._user = self._make()
                if self._hides_thoughts:
                    self._user.parse_response = _spoken
            said = getattr(self._user, method)(text)
            if not isinstance(said, str) or not said.strip():
                raise ValueError(f"its answer is {said!r}")
            return said
        except Exception as error:
            if refusal is not None and isinstance(error, refusal):
                raise
            raise EpisodeLost("endpoint_failure", f"τ-bench's user: {type(error).__name__}: {error}") from None


def _spoken(response: str) -> str:
    """What a user that thinks first says to the agent; τ-bench's own reader keeps the thought.

    Raises:
        ValueError: Nothing says where the thought ends.
    """
    _, mark, spoken = response.rpartition("User Response:")
    if STOP in (spoken if mark else response):
        return STOP
    if not mark:
        raise ValueError(f"its answer has no 'User Response:': {response:.80}")
    return spoken.strip()
