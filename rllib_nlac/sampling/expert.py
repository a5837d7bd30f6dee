"""Conversations for a warm-up: an environment's scripted expert plays, or a larger model does, and all five roles are written.

The expert's turns are mixed with mistakes, so that critiques have something to say. What an action led to is known once the
episode is over, so futures and Bellman targets are written from what really came.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rllib_nlac.envs.base import EpisodeLost, TextEnv
from rllib_nlac.episode import answer_of
from rllib_nlac.inputs.endpoint import Endpoint
from rllib_nlac.inputs.tool_calls import for_endpoint
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import TOOLS, Critique, Future, Generation, Message, Transition, dialogue_after

ROLES = ("policy", "predict", "backup", "evaluate", "refine")
OTHERS = 0.3  # share of backups and critiques that are shown another episode's future, so that it is read and not guessed
POOL = 8  # episodes without a mistake that are played first: what the expert said in them is what mistakes are drawn from
HINDSIGHT = "You know what really came:\n{came}\nWrite the line as if you did not know it yet, so that it says the same."
_NONE = Generation((), (), np.zeros(0, np.float32), True, 0)

Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One turn of an episode.

    Attributes:
        state: The dialogue before it.
        action: What was said.
        best: What the expert would have said; empty without an expert.
        judgement: What the expert says of the action: whether it is the best one, and why; None without an expert.
        reply: What the environment answered.
        reward: The reward.
        ended: Whether the episode ended with it.
    """

    state: tuple[Message, ...]
    action: str
    best: str
    judgement: tuple[bool, str] | None
    reply: str
    reward: float
    ended: bool


@dataclass(frozen=True)
class Episode:
    """A whole episode."""

    steps: tuple[Step, ...]
    success: bool


class Expert:
    """Plays an environment by its own script, with a share of mistakes, and words the critic's roles.

    A mistake is what the expert says in another episode, which asks nothing else of an environment than its expert.

    Args:
        env: An environment with ``expert_action``.
        name: Registered name of the environment.
        prompts: Prompt set that words the roles.
        skill: Share of turns that are the expert's.
        seed: Seeds tasks and mistakes.
    """

    def __init__(self, env: gym.Env[str, str], name: str, prompts: PromptSet, skill: float = 0.7, seed: int = 0) -> None:
        self.env, self.name, self.prompts, self.skill = env, name, prompts, skill
        self.rng = random.Random(seed)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._pool: list[str] = []

    def episodes(self, count: int) -> Iterator[Episode]:
        """Plays so many episodes; one that the environment loses is counted and replaced."""
        for number in range(POOL if self.skill < 1 else 0):
            self._play(number, skill=1.0)
        made = number = 0
        while made < count:
            number += 1
            episode = self._play(POOL + number, self.skill)
            if episode is None:
                self.counts["lost"] += 1
                if self.counts["lost"] > count + 20:
                    raise RuntimeError(f"{self.name}: {self.counts['lost']} episodes were lost, and {made} came to an end")
                continue
            made += 1
            self.counts["episodes"] += 1
            self.counts["won"] += episode.success
            yield episode

    def _play(self, number: int, skill: float) -> Episode | None:
        try:
            observation, info = self.env.reset(seed=(self.seed * 1_000_003 + number) % 2**31)
        except EpisodeLost:
            return None
        state = self.prompts.state(str(info.get("system_prompt") or ""), observation, tools=info.get(TOOLS))
        steps: list[Step] = []
        while True:
            action, best, judgement = self._turn(state, skill)
            reply, reward, terminated, truncated, info = self.env.step(parse_action(action, "plain") or "")
            if info.get("discard"):
                return None
            ended = bool(terminated or truncated)
            steps.append(Step(state, action, best, judgement, reply, float(reward), ended))
            if ended:
                success = info.get("success")
                total = sum(step.reward for step in steps)
                return Episode(tuple(steps), bool(success) if success is not None else total > 0)
            state = dialogue_after(state, action, answer_of(reply, info))

    def _turn(self, state: tuple[Message, ...], skill: float) -> tuple[str, str, tuple[bool, str] | None]:
        """What is said next, what the expert would say, and the expert's judgement of what is said."""
        env = self.env.unwrapped
        assert isinstance(env, TextEnv)
        best = env.expert_action()
        action = best
        if self.rng.random() >= skill and (others := [said for said in self._pool if said != best]):
            action = self.rng.choice(others)
        if len(self._pool) < 4096:
            self._pool.append(best)
        return action, best, env.expert_judgement(action)

    def rows(self, episode: Episode, roles: Sequence[str] = ROLES, other: Episode | None = None) -> list[Row]:
        """The rows of an episode: the policy's turns, and each other role at one of its turns.

        Args:
            episode: The episode.
            roles: Which roles to write.
            other: Another episode, whose futures a backup or a critique may be shown.
        """
        rows = [self._policy_row(episode)] if "policy" in roles else []
        makers: dict[str, Callable[..., Row | None]] = {
            "predict": self.predict,
            "backup": self.backup,
            "evaluate": self.evaluate,
            "refine": self.refine,
        }
        for role in roles:
            if role in makers:
                t = self._place(episode, role)
                row = makers[role](episode, t, other) if t is not None else None
                if row is not None:
                    self.counts[role] += 1
                    rows.append({**row, "kind": role})
                elif t is not None:
                    self.counts[f"{role}: not parsed"] += 1
        return rows

    def _place(self, episode: Episode, role: str) -> int | None:
        wrong = [t for t, step in enumerate(episode.steps) if step.judgement is None or not step.judgement[0]]
        if role == "refine":
            return self.rng.choice(wrong) if wrong else None
        return self.rng.randrange(len(episode.steps))

    def _policy_row(self, episode: Episode) -> Row:
        last = episode.steps[-1]
        self.counts["policy"] += 1
        return {**_as_rows((*last.state, Message("assistant", last.action))), "kind": "policy"}

    def future(self, episode: Episode, t: int) -> str:
        """What really came of turn t, as a future: the reply, the next reply, and how it ended."""
        form, later = self.prompts.forms.future, None
        step, steps = episode.steps[t], episode.steps
        if t + 1 < len(steps):
            later = form.parse(form.composed(steps[t + 1].reply, None, episode.success))
        return form.composed(step.reply, later, episode.success)

    def predict(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        """A future of turn t, not seen by who predicts."""
        step = episode.steps[t]
        return _row(self.prompts.predict_messages(step.state, step.action), self.future(episode, t))

    def shown_future(self, episode: Episode, t: int, other: Episode | None) -> Future | None:
        """A future that is shown to a role: the true one, or sometimes another episode's."""
        if other is not None and self.rng.random() < OTHERS:
            return self.prompts.forms.future.parse(self.future(other, min(t, len(other.steps) - 1)))
        return self.prompts.forms.future.parse(self.future(episode, t))

    def transition(self, episode: Episode, t: int) -> Transition:
        """Turn t as the prompts take it."""
        step = episode.steps[t]
        return Transition(
            id=t,
            env=self.name,
            state=step.state,
            action=step.action,
            generation=_NONE,
            observation=step.reply,
            reward=step.reward,
            terminated=step.ended,
            truncated=False,
            episode_success=episode.success,
            returns_to_go=0.0,
        )

    def backup(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        """The Bellman target of turn t: the real reply with the first clause and the outcome of the next turn's future."""
        form, step = self.prompts.forms.future, episode.steps[t]
        following = None if step.ended else self.shown_future(episode, t + 1, other)
        prompt = self.prompts.backup_messages(self.transition(episode, t), following.text if following else None)
        return _row(prompt, form.composed(step.reply, following, following.success if following else episode.success))

    def evaluate(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        """The expert's critique of turn t."""
        step, shown = episode.steps[t], self.shown_future(episode, t, other)
        text = self.critique(step)
        if shown is None or text is None:
            return None
        return _row(self.prompts.evaluate_messages(step.state, step.action, [shown]), text)

    def critique(self, step: Step) -> str | None:
        """What the expert says of a turn."""
        if step.judgement is None:
            return None
        optimal, reason = step.judgement
        return self.prompts.forms.critique.written(optimal, reason, _line(step.best))

    def refine(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        """The expert's turn in place of turn t, after the expert's critique."""
        step = episode.steps[t]
        text = self.critique(step)
        if text is None or (critique := self.prompts.forms.critique.parse(text)) is None or critique.optimal:
            return None
        return _row(self.prompts.refine_messages(step.state, step.action, critique.text), step.best)


class Teacher(Expert):
    """A larger model behind an endpoint plays, and writes the roles; futures with hindsight.

    What it writes and does not parse is left out and counted.

    Args:
        env: Any text environment.
        name: Registered name of the environment.
        prompts: Prompt set that words the roles.
        endpoint: The larger model.
        seed: Seeds tasks and requests.
        max_tokens: Largest number of tokens of an answer.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        name: str,
        prompts: PromptSet,
        endpoint: Endpoint,
        seed: int = 0,
        max_tokens: int = 256,
    ) -> None:
        super().__init__(env, name, prompts, skill=1.0, seed=seed)
        self.endpoint, self.max_tokens = endpoint, max_tokens

    def _ask(self, messages: Sequence[Message], temperature: float, pattern: str | None = None) -> str:
        answer = self.endpoint.ask(
            **for_endpoint(messages),
            may_be_empty=True,
            pattern=pattern,
            temperature=temperature,
            max_tokens=self.max_tokens,
            seed=self.rng.randrange(2**31),
        )
        return answer.text if answer.finished else ""

    def _turn(self, state: tuple[Message, ...], skill: float) -> tuple[str, str, tuple[bool, str] | None]:
        return self._ask(state, 1.0).strip() or "...", "", None

    def _written_future(self, messages: tuple[Message, ...]) -> Future | None:
        form = self.prompts.forms.future
        return form.parse(self._ask(messages, 0.0, form.pattern(self.max_tokens)))

    def predict(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        step = episode.steps[t]
        prompt = self.prompts.predict_messages(step.state, step.action)
        came = HINDSIGHT.format(came=self.future(episode, t))
        told = (*prompt[:-1], Message("user", f"{prompt[-1].content}\n\n{came}"))
        future = self._written_future(told)
        return None if future is None else _row(prompt, f"{self.prompts.forms.future.label}: {future.text}")

    def backup(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        step = episode.steps[t]
        following = None if step.ended else self.shown_future(episode, t + 1, other)
        prompt = self.prompts.backup_messages(self.transition(episode, t), following.text if following else None)
        future = self._written_future(prompt)
        return None if future is None else _row(prompt, f"{self.prompts.forms.future.label}: {future.text}")

    def evaluate(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        step, shown = episode.steps[t], self.shown_future(episode, t, other)
        if shown is None:
            return None
        prompt = self.prompts.evaluate_messages(step.state, step.action, [shown])
        critique = self._critique(prompt)
        return None if critique is None else _row(prompt, critique.text)

    def _critique(self, prompt: tuple[Message, ...]) -> Critique | None:
        form = self.prompts.forms.critique
        return form.parse(self._ask(prompt, 0.0, form.pattern(self.max_tokens)))

    def refine(self, episode: Episode, t: int, other: Episode | None) -> Row | None:
        step, shown = episode.steps[t], self.shown_future(episode, t, None)
        if shown is None:
            return None
        critique = self._critique(self.prompts.evaluate_messages(step.state, step.action, [shown]))
        if critique is None or critique.optimal:
            return None
        prompt = self.prompts.refine_messages(step.state, step.action, critique.text)
        answer = self._ask(prompt, 0.0).strip()
        return _row(prompt, answer) if answer else None


def _row(prompt: Sequence[Message], answer: str) -> Row:
    """A conversation whose last turn alone is trained."""
    row = _as_rows(prompt, weight=0)
    return {**row, "messages": [*row["messages"], {"role": "assistant", "content": answer}]}


def _as_rows(messages: Sequence[Message], weight: int | None = None) -> Row:
    """A dialogue as the columns of a row; the schemas of tools have one of their own."""
    extra = {} if weight is None else {"weight": weight}
    rows = [{**m.row, **(extra if m.role == "assistant" else {})} for m in messages if m.role != TOOLS]
    return {"messages": rows, **({TOOLS: json.loads(messages[0].content)} if messages[0].role == TOOLS else {})}


def _line(text: str) -> str:
    """An action in one line; a call is its JSON alone, since no field of a structured answer may begin with a tag."""
    return " ".join(re.sub(r"</?tool_call>", " ", text).split())
