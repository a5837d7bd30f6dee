"""The runner's side of a rollout: what environments and the engine say becomes an episode, or is counted and left out."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.envs.answers import MetricNames
from rllib_nlac.episode import TASK_SEED, environment_of, generation_at, step_outputs
from rllib_nlac.inputs.texts import readable, readable_values
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.sampling.env_threads import EnvThreads
from rllib_nlac.sampling.refining import RefiningPolicy
from rllib_nlac.sampling.slot import Outcome, Slot, Start
from rllib_nlac.types import Generation, Message, Request, Seen, dialogue_after, hash_seed

logger = logging.getLogger(__name__)


class TextPlayer:
    """Plays the slots of one runner.

    Args:
        config: The runner's.
        chat: Turns messages into tokens and back.
        make_env: Builds the environment of a slot, by its index.
        call_back: Calls one of RLlib's callbacks, by its name.
        metrics: Where to count.

    Attributes:
        slots: The environments, each with the episode that it plays.
        speaker: What answers for the policy in the rollout under way.
        threads: Step environments side by side; None steps them one after the other.
        unparsed_turn: The first turn since the last ``sample`` that did not parse.
        stop_reason: Names the reasons why episodes ended, as metrics can have them.
    """

    #: An environment that fails this often without one step in between is broken, not unlucky.
    MAX_FAILURES_IN_A_ROW = 20

    def __init__(
        self,
        config: Any,
        chat: Chat,
        make_env: Callable[[int], gym.Env[str, str]],
        call_back: Callable[..., None],
        metrics: MetricsLogger,
    ) -> None:
        self._config, self._chat, self._prompts_for = config, chat, functools.cache(config.prompts_for)
        self._max_tokens = config.manners.max_action_tokens
        self.make_env, self._call_back, self._metrics = make_env, call_back, metrics
        self.slots: list[Slot] = []
        self.speaker: Engine | RefiningPolicy | None = None
        self.unparsed_turn: str | None = None
        self.stop_reason = MetricNames()
        self._failures_in_a_row = self._discarded_in_a_row = 0
        self._counts: Counter[str] = Counter()
        count, limit = config.env_threads, config.env_step_timeout_s
        self.threads = EnvThreads(max(count, 1), limit) if count or limit is not None else None

    def open(self) -> None:
        """Builds the environments, anew where there are some."""
        self.close()
        self.slots = [Slot(self.make_env(index)) for index in range(self._config.num_envs_per_env_runner)]

    def close(self) -> None:
        """Closes the environments."""
        for slot in self.slots:
            slot.env.close()

    def _tell(self, which: str, slot: Slot, **arguments: Any) -> None:
        # The policy's weights live in the engine, so there is no RLModule to hand over.
        place = {"env": slot.env, "env_index": self.slots.index(slot), "rl_module": None}
        self._call_back(which, episode=slot.episode, **place, **arguments)

    def begin(self, slot: Slot, start: Start, outcome: Outcome) -> bool:
        """Starts an episode after its reset; False where it is over before the policy has spoken, or lost."""
        slot.sampling_seed = start.sampling_seed
        while outcome.error is not None:
            self._replace_env(slot, "reset", outcome.error)
            outcome = self._call(slot.reset, start)
        observation, info = self._received(outcome)
        slot.episode = SingleAgentEpisode(
            id_=start.name,
            observation_space=slot.env.observation_space,
            action_space=slot.env.action_space,
        )
        slot.episode.custom_data[TASK_SEED] = start.task_seed
        self._tell("on_episode_created", slot)
        slot.episode.add_env_reset(observation, info)
        self._tell("on_episode_start", slot)
        prompts = self._prompts_for(environment_of(slot.episode) or self._config.env)
        slot.messages = prompts.state(info.get("system_prompt") or "", observation, self._config.action_format)
        slot.num_tokens = 0
        try:
            slot.prompt_ids = self._chat.prompt_ids(slot.messages, room=self._max_tokens)
        except PromptTooLong as error:
            self._discard(slot, "context_limit", f"the first prompt of task {info.get('task_id')!r}: {error}")
            return False
        if start.prefix is not None:
            episode, steps = start.prefix
            if not all(self._replay(slot, episode, t) for t in range(steps)):
                return False
        return start.turn is None or self.record(slot, start.turn, self._call(slot.step, self.action(slot, start.turn)))

    def _replay(self, slot: Slot, recorded: SingleAgentEpisode, t: int) -> bool:
        """Plays one recorded step again; False where the episode is over, or lost because the environment differs."""
        generation = generation_at(recorded, t)
        alive = self.record(slot, generation, self._call(slot.step, self.action(slot, generation)))
        if slot.episode is not None and slot.episode.get_observations(-1) != recorded.get_observations(t + 1):
            self.count("branch_mismatches", 1)
            slot.episode = None
        return alive and slot.episode is not None

    def _call(self, function: Callable[[Any], Outcome], argument: Any) -> Outcome:
        return function(argument) if self.threads is None else self.threads.call(function, argument)

    def ask(self, slot: Slot) -> int:
        """Asks the engine for a slot's next turn; returns the ticket."""
        assert slot.episode is not None and self.speaker is not None
        request = Request(
            prompt_ids=slot.prompt_ids,
            max_tokens=self._max_tokens,
            temperature=self._config.action_temperature,
            top_p=self._config.action_top_p,
            seed=hash_seed(slot.sampling_seed, len(slot.episode)),
            messages=slot.messages,
        )
        return self.speaker.submit([request])[0]

    def answers(self) -> Sequence[tuple[int, Generation]]:
        """The tickets that the engine has answered since the last call, at least one."""
        assert self.speaker is not None
        return self.speaker.poll()

    def action(self, slot: Slot, generation: Generation) -> str:
        """What of a turn goes to a slot's environment: nothing of one that is malformed."""
        turn = slot.turn = self._chat.decode(generation.token_ids)
        action = parse_action(turn, self._config.action_format)
        self.count("action_parse_failures", action is None)
        self.count("action_parse_failures_cut_off", action is None and not generation.finished)
        if action is None and self.unparsed_turn is None:
            self.unparsed_turn = turn
        return action or ""

    def record(self, slot: Slot, generation: Generation, outcome: Outcome) -> bool:
        """Adds a step to its episode; False where the episode is over, or lost: then the slot has none."""
        assert slot.episode is not None
        if outcome.error is not None:
            self._replace_env(slot, "step", outcome.error)
            slot.episode = None
            return False
        turn, (observation, info) = slot.turn, self._received(outcome)
        terminated, truncated = outcome.terminated, outcome.truncated
        if info.get("discard"):
            self._discard(slot, info.get("stop_reason") or "unknown", observation)
            return False
        self._failures_in_a_row = 0
        state = slot.messages
        slot.messages = dialogue_after(state, turn, observation, self._config.history_turns)
        slot.num_tokens += len(generation.token_ids)
        limit = self._config.max_response_tokens
        if not (terminated or truncated) and limit is not None and slot.num_tokens >= limit:
            truncated, info = True, {**info, "success": False, "stop_reason": "response_limit"}
        if not (terminated or truncated) and not self._extend_prompt(slot, state, generation):
            truncated, info = True, {**info, "success": False, "stop_reason": "context_limit"}
            observation = observation[: self._chat.max_context]  # the rest fits no prompt and would only fill the buffer
        if self._config.truncation_ends:
            terminated, truncated = terminated or truncated, False
        slot.episode.add_env_step(
            observation,
            turn,
            outcome.reward,
            info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=step_outputs(generation, state),
        )
        self._tell("on_episode_step", slot)
        if terminated or truncated:
            self._discarded_in_a_row = 0
            self._tell("on_episode_end", slot, prev_episode_chunks=[])
        return not (terminated or truncated)

    def _extend_prompt(self, slot: Slot, state: tuple[Message, ...], generation: Generation) -> bool:
        """Makes the next prompt out of the last one's ids and the sampled ones; False where it exceeds the context."""
        is_longer = slot.messages[:-2] == state  # and not a window that has moved on
        seen = Seen(slot.prompt_ids, generation.token_ids) if is_longer else None
        (prompt,) = self._chat.prompts([Wanted(slot.messages, self._max_tokens, seen)])
        if isinstance(prompt, PromptTooLong):
            return False
        slot.prompt_ids = prompt.ids
        self.count("retokenised_turns", seen is None or prompt.retokenised)
        return True

    def _received(self, outcome: Outcome) -> tuple[str, dict[str, Any]]:
        """Observation and info as the rest of the run sees them: without what no tokenizer reads or no prompt can hold."""
        limit = self._chat.max_characters
        if len(outcome.observation) > limit:
            self.count("observations_cut", 1)
        # One character more than any prompt may have, so that such an observation still ends its episode.
        observation, replaced = readable(outcome.observation[: limit + 1])
        info, more = readable_values(outcome.info)
        self.count("characters_replaced", replaced + more)
        return observation, info

    def _replace_env(self, slot: Slot, call: str, error: BaseException) -> None:
        """Counts a failure of a user's environment and puts a new one in its place."""
        self._failures_in_a_row += 1
        self.count("env_failures", 1)
        logger.warning("%s.%s() raised %s: %s; its episode is dropped", self._config.env, call, type(error).__name__, error)
        if self._failures_in_a_row >= self.MAX_FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"the environment {self._config.env!r} failed {self._failures_in_a_row} times in a row, the last time in "
                f"{call}(): {type(error).__name__}: {error}. Try it alone, by reset() and step() in a Python shell"
            ) from error
        slot.env = self.make_env(self.slots.index(slot))

    def _discard(self, slot: Slot, reason: str, cause: str) -> None:
        """Leaves an episode out that ended through no fault of the agent."""
        slot.episode, cause = None, f"{cause:.1000}"
        self._discarded_in_a_row += 1
        self.count("episodes_discarded", 1)
        self.count(f"stop_reason_{self.stop_reason(reason)}", 1)
        level = logging.WARNING if self._discarded_in_a_row <= 3 else logging.DEBUG  # the count is in the metrics
        logger.log(level, "%s: an episode is left out (%s): %s", self._config.env, reason, cause)
        if self._discarded_in_a_row >= self.MAX_FAILURES_IN_A_ROW + len(self.slots):
            raise RuntimeError(
                f"the environment {self._config.env!r} lost {self._discarded_in_a_row} episodes in a row ({reason}), the last "
                f"time with: {cause}"
            )

    def count(self, name: str, amount: int) -> None:
        """Adds to a sum of the metrics, by the next ``book``."""
        self._counts[name] += amount

    def book(self) -> None:
        """Hands the metrics what was counted: to log each single turn costs as much as its step of a fast environment."""
        for name, amount in self._counts.items():
            self._metrics.log_value(name, int(amount), reduce="sum")
        self._counts.clear()
