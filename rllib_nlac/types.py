"""Every record that crosses a stage, in the order in which data flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

TOOLS, TOOL = "tools", "tool"  # roles beside "system", "user" and "assistant"
ANSWER = "new_messages"  # key of an info: the messages that stand for the observation in the dialogue


class Message(NamedTuple):
    """One message of a dialogue.

    Attributes:
        role: "system", "user" (the environment), "assistant" (the agent), "tool" (the result of a call), or "tools": the JSON
            schemas of what the agent may call, which come before everything else.
        content: The text. A turn of the agent holds its calls as they were sampled.
        name: Name of the tool whose result this is.
        tool_call_id: Id of the call whose result this is.
    """

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""

    @property
    def row(self) -> dict[str, str]:
        """The message as chat JSON."""
        return {key: value for key, value in self._asdict().items() if value or key in ("role", "content")}


def turns_of(messages: Sequence[Message]) -> list[int]:
    """Places of the agent's turns."""
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


def dialogue_after(
    state: Sequence[Message], action: str, answer: str | Sequence[Message], history_turns: int | None = None
) -> tuple[Message, ...]:
    """The messages before the next action.

    Args:
        state: The messages before this action.
        action: The agent's turn.
        answer: What the environment said to it; a text is a user message.
        history_turns: Number of latest turns that are kept after the opening (all that is before the first turn); None keeps
            all.
    """
    told = (Message("user", answer),) if isinstance(answer, str) else answer
    messages = (*state, Message("assistant", action), *told)
    if history_turns is None:
        return messages
    turns = turns_of(messages)
    return (*messages[: turns[0]], *messages[turns[-history_turns:][0] :])


def goes_on(after: Sequence[Message], before: Sequence[Message]) -> bool:
    """Whether a dialogue is another one, one more turn of the agent and what it was answered."""
    return tuple(after[: len(before)]) == tuple(before) and turns_of(after[len(before) :]) == [0]


class Weights(StrEnum):
    """Which weights answer a request: the policy's, θ, the target's, θ̄, or those of the untrained model."""

    POLICY = "policy"
    TARGET = "target"
    INITIAL = "initial"


def hash_seed(*numbers: int) -> int:
    """One seed of 31 bits out of several numbers; close numbers give unrelated seeds, and zeros at the end change nothing."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


class Seen(NamedTuple):
    """What an engine has seen of a dialogue.

    Attributes:
        prompt_ids: Ids of a prompt.
        turn_ids: Ids of the turn that answered it, as they were sampled; the dialogue has that turn and its answer more than
            the prompt. None: the prompt is the whole dialogue.
    """

    prompt_ids: tuple[int, ...]
    turn_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Request:
    """One generation that is asked of an engine.

    Attributes:
        prompt_ids: The prompt's token ids.
        max_tokens: The most tokens to generate, at least 1.
        temperature: 0 is greedy.
        top_p: Nucleus sampling mass.
        seed: Makes this request's sampling reproducible; None leaves it to the engine.
        messages: The same prompt as messages, for an engine behind an endpoint that takes no token ids.
        logprobs: Whether the answer's log-probabilities are wanted, which cost an engine up to a third of its speed.
        weights: Which weights answer.
        role: What the answer is for, by which its tokens are counted.
        env: Name of the environment that is played, for who criticises a turn before it is; empty where nobody does.
        pattern: Regular expression that the whole answer must match, after a reasoning block if there is one; None: free.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    messages: tuple[Message, ...] = ()
    logprobs: bool = True
    weights: Weights = Weights.POLICY
    role: str = "other"
    env: str = ""
    pattern: str | None = None


_IDS: dict[int, int] = {}


def _generation(prompt_ids: np.ndarray, token_ids: np.ndarray, *rest: Any) -> Generation:
    return Generation(tuple(prompt_ids.tolist()), tuple(token_ids.tolist()), *rest)


@dataclass(frozen=True)
class Generation:
    """What an engine answered.

    Attributes:
        prompt_ids: The prompt's token ids, as the engine saw them.
        token_ids: The sampled ids, the end-of-turn token included where one was sampled.
        logprobs: Log-probability of each sampled id under the distribution it was drawn from, shape (len(token_ids),); of
            shape (0,) where the request wanted none, and NaN where nobody knows them, as of logged turns.
        finished: False where ``max_tokens`` cut the generation off.
        weight_version: Version of the weights that answered.
        weights: Which they were.
        cached_tokens: Tokens of the prompt that the engine's prefix cache held.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finished: bool
    weight_version: int
    weights: Weights = Weights.POLICY
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        # Many are kept for long: all share one object for each id, where a list of new ones takes four times the memory.
        for name in ("prompt_ids", "token_ids"):
            ids = getattr(self, name)
            object.__setattr__(self, name, tuple(map(_IDS.setdefault, ids, ids)))

    def __reduce__(self) -> tuple[Any, ...]:
        ids = (np.array(each, np.int32) for each in (self.prompt_ids, self.token_ids))
        rest = (getattr(self, field.name) for field in fields(self)[2:])
        return _generation, (*ids, *rest)

    @property
    def seen(self) -> Seen:
        """Prompt and turn, for what follows them."""
        return Seen(self.prompt_ids, self.token_ids)

    @property
    def sampled_logprobs(self) -> np.ndarray:
        """``logprobs``, one for each sampled id.

        Raises:
            ValueError: There is not one for each id.
        """
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities of {len(self.token_ids)} tokens: none were asked for")
        return self.logprobs


@dataclass(frozen=True)
class ActionForm:
    """What an environment says an action must look like.

    Attributes:
        regex: Regular expression of a whole turn.
    """

    regex: str

    def pattern(self, max_tokens: int) -> str:
        """The regular expression, whatever the token limit."""
        return self.regex


@dataclass(frozen=True)
class Transition:
    """(s, a, r, s', ended) with s the whole dialogue before the action.

    Attributes:
        id: Unique within a run.
        env: Name of the environment, which chooses the prompts' wording.
        state: s, the messages before the action, the system message included.
        action: a, the full text of the agent's turn.
        generation: The sampled ids behind ``action`` and the version of the weights that made them.
        observation: The environment's answer, with which s' ends.
        reward: The reward of this step.
        terminated: The task was decided here.
        truncated: A limit ended the episode here.
        episode_success: Whether the episode ended in success; for replay, diagnostics and baselines. The only prompts
            that show it are those of the evaluator that reads what really came, in self-distillation and ``NLAC_Hindsight``.
        returns_to_go: Undiscounted sum of rewards from this step to the end. No prompt shows it.
        next_messages: s' as it was played; None at the end of an episode, where it is s, the turn and the observation.
        following: The next steps of the same episode that an n-step backup uses, at most n - 1.
        episode: The episode's id, for whoever reads a record of it; empty where there is none.
        turn: Which of the episode's it is, from 0.
        task_seed: What the environment was reset with; None where nobody knows, as of logged dialogues.
        action_form: What the environment offered in s, where engines enforce that; else None.
        next_action_form: What it offered in s'.
    """

    id: int
    env: str
    state: tuple[Message, ...]
    action: str
    generation: Generation
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    episode_success: bool
    returns_to_go: float
    next_messages: tuple[Message, ...] | None = None
    following: tuple[Transition, ...] = ()
    episode: str = ""
    turn: int = 0
    task_seed: int | None = None
    action_form: ActionForm | None = None
    next_action_form: ActionForm | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing follows: a truncated episode counts as an end."""
        return self.terminated or self.truncated

    @property
    def seen(self) -> Seen:
        """s and a as an engine saw and sampled them."""
        return self.generation.seen

    @property
    def next_seen(self) -> Seen | None:
        """The same, as the beginning of s'; None where s' leaves old turns out."""
        return self.seen if goes_on(self.next_state, self.state) else None

    @property
    def next_state(self) -> tuple[Message, ...]:
        """s', the messages before the next action."""
        return self.next_messages or dialogue_after(self.state, self.action, self.observation)


@dataclass(frozen=True)
class Future:
    """A parsed description of what follows (s, a).

    Attributes:
        text: The description without its label.
        success: The outcome it predicts.
    """

    text: str
    success: bool


@dataclass(frozen=True)
class Critique:
    """A parsed judgement of (s, a).

    Attributes:
        text: The whole critique, as the refine prompt shows it.
        optimal: The verdict.
        reason: Why, grounded in the futures.
        fix: How to improve, empty where the verdict is yes.
    """

    text: str
    optimal: bool
    reason: str
    fix: str


@dataclass(frozen=True)
class BellmanTarget:
    """y ~ B(s', r, d'), what the successor model is trained on for one transition.

    Attributes:
        transition: The transition backed up.
        generation: The target's ids; None where it did not parse, and the transition then has no L1. For a thinking model the
            ids of the corrected reasoning and the description, a sequence that no engine sampled.
        future: The parsed target, None likewise.
        next_action: a', None after an end.
        next_future: d', None after an end or where it did not parse.
        prompt_ids: The prompt of M(.|s, a) that the target is trained under; empty without a generation.
    """

    transition: Transition
    generation: Generation | None
    future: Future | None
    next_action: str | None
    next_future: str | None
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Refinement:
    """The outcome of m rounds of critique and refinement of one transition's action.

    Attributes:
        transition: The transition whose action was judged.
        futures: d_1..d_k of the first round, those that parsed.
        critique: The first round's critique, None where it did not parse.
        action: a_r's text; the stored action where the verdict was yes.
        generation: The ids to train the policy on, None where this item's L2 is dropped.
        kept: Whether ``action`` equals the stored one.
        reason: Why L2 is trained or dropped, one of ``Refinement.REASONS``.
        weight: Weight of this item's L2 within its minibatch.
    """

    REASONS = (
        "refined",
        "kept",
        "yes_success",
        "yes_skipped",
        "not_refined",
        "rejected",
        "not_judged",
        "unparsed_future",
        "unparsed_critique",
        "unparsed_action",
    )

    transition: Transition
    futures: tuple[Future, ...]
    critique: Critique | None
    action: str | None
    generation: Generation | None
    kept: bool
    reason: str
    weight: float = 1.0

    @property
    def is_unknown(self) -> bool:
        """Whether it is unknown what the policy should learn here: a text did not parse, or none was asked for."""
        return self.reason.startswith("unparsed") or self.reason == "not_judged"
