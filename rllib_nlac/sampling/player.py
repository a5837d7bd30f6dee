"""The runner's side of a rollout: replies and turns become an episode, or are counted and dropped."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.engine.chat import Chat, Prompt, PromptTooLong, Wanted
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.envs.answers import MetricNames
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.episode import TASK_SEED, answer_of, environment_of, generation_at, step_outputs, strip_infos
from rllib_nlac.inputs.texts import readable, readable_values
from rllib_nlac.inputs.tool_calls import read_calls
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.limits import within
from rllib_nlac.sampling.action_forms import action_form
from rllib_nlac.sampling.env_threads import EnvThreads
from rllib_nlac.sampling.refining import RefiningPolicy
from rllib_nlac.sampling.slot import Outcome, Played, Slot, Start
from rllib_nlac.types import ANSWER, TOOLS, ActionForm, Generation, Message, Request, Seen, dialogue_after, goes_on, hash_seed

logger = logging.getLogger(__name__)
CLOSE_S = 5.0  # for an environment's close, where it may hang


@dataclass
class _Step:
    """A step on its way into an episode."""

    slot: Slot
    generation: Generation
    state: tuple[Message, ...]
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    form: ActionForm | None

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


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

    #: Environments that fail this often, and once more each, without one step in between are broken, not unlucky.
    MAX_FAILURES_IN_A_ROW = 20
    MAX_LOST_IN_A_ROW = 200  # episodes that failed somewhere, with none that came to its end among them

    def __init__(
        self,
        config: Any,
        chat: Chat,
        make_env: Callable[[int], gym.Env[str, str]],
        call_back: Callable[..., None],
        metrics: MetricsLogger,
    ) -> None:
        self._config, self._chat, self._prompts_for = config, chat, functools.cache(config.prompts_for)
        self._max_tokens = config.model_defaults.max_action_tokens
        self.make_env, self._call_back, self._metrics = make_env, call_back, metrics
        self.slots: list[Slot] = []
        self.speaker: Engine | RefiningPolicy | None = None
        self.unparsed_turn: str | None = None
        self.stop_reason = MetricNames()
        self.num_forms_refused = 0
        self._failures_in_a_row = self._lost_in_a_row = self._discarded_in_a_row = 0
        self._counts: Counter[str] = Counter()
        count, limit = config.env_threads, config.env_step_timeout_s
        self.threads = EnvThreads(max(count, 1), limit) if count or limit is not None else None

    def open(self) -> None:
        """Builds the environments; old ones are replaced."""
        self.close()
        self.slots = [Slot(self.make_env(index)) for index in range(self._config.num_envs_per_env_runner)]

    def close(self) -> None:
        """Closes the environments."""
        for slot in self.slots:
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        """Closes an environment, which may be broken or hang."""
        try:
            slot.env.close() if self.threads is None else within(CLOSE_S, slot.env.close)
        except (Exception, SystemExit) as error:
            logger.warning("%s.close() raised %s: %s", self._config.env, type(error).__name__, error)

    def _tell(self, which: str, slot: Slot, **arguments: Any) -> None:
        # The policy's weights live in the engine, so there is no RLModule to hand over.
        place = {"env": slot.env, "env_index": self.slots.index(slot), "rl_module": None}
        self._call_back(which, episode=slot.episode, **place, **arguments)

    def begin(self, slot: Slot, start: Start, outcome: Outcome) -> bool:
        """Starts an episode after its reset; False where it is over before the policy has spoken, or lost."""
        slot.sampling_seed, slot.role = start.sampling_seed, start.role
        while (error := outcome.error) is not None:
            if isinstance(error, EpisodeLost):
                self._discard(slot, error.reason, error.cause)
                return False
            self._replace_env(slot, "reset", error)
            outcome = self._call(slot.reset, start)
        observation, info = self._received(outcome)
        if self._check_discard(slot, observation, info):
            return False
        slot.episode = SingleAgentEpisode(
            id_=start.name,
            observation_space=slot.env.observation_space,
            action_space=slot.env.action_space,
        )
        slot.episode.custom_data[TASK_SEED] = start.task_seed
        self._tell("on_episode_created", slot)
        slot.episode.add_env_reset(observation, info)
        slot.form = self._form(info)
        self._tell("on_episode_start", slot)
        prompts = self._prompts_for(environment_of(slot.episode) or self._config.env)
        slot.num_tokens = 0
        told = (info.get("system_prompt") or "", observation)
        slot.messages = prompts.state(*told, self._config.action_format, info.get(TOOLS))
        if info.get(TOOLS):
            self.count("episodes_with_tools", 1)
        (prompt,) = self._chat.prompts([Wanted(slot.messages, self._max_tokens)])
        if isinstance(prompt, PromptTooLong):
            self._discard(slot, "context_limit", f"the first prompt of task {info.get('task_id')!r}: {prompt}")
            return False
        slot.prompt_ids = prompt.ids
        if start.prefix is not None:
            episode, steps = start.prefix
            if not all(self._replay(slot, episode, t) for t in range(steps)):
                return False
        return start.turn is None or self._play(slot, start.turn)

    def _replay(self, slot: Slot, recorded: SingleAgentEpisode, t: int) -> bool:
        """Plays one recorded step again; False where the episode is over, or lost because the environment differs."""
        generation = generation_at(recorded, t)
        alive = self._play(slot, generation)
        if (episode := slot.episode) is not None:
            ended = recorded.is_done and t + 1 == len(recorded)
            if episode.get_observations(-1) != recorded.get_observations(t + 1) or episode.is_done != ended:
                self.count("branch_mismatches", 1)
                slot.episode = None
        return alive and slot.episode is not None

    def _play(self, slot: Slot, generation: Generation) -> bool:
        """Plays a turn at once; False where the episode is over or lost."""
        (alive,) = self.record([Played(slot, generation, self._call(slot.step, self.action(slot, generation)))])
        return alive

    def _call(self, function: Callable[[Any], Outcome], argument: Any) -> Outcome:
        return function(argument) if self.threads is None else self.threads.call(function, argument)

    def ask(self, slots: Sequence[Slot]) -> list[int]:
        """Asks the engine for the next turn of several slots; returns the tickets."""
        assert self.speaker is not None
        return self.speaker.submit([self._request(slot) for slot in slots])

    def _request(self, slot: Slot) -> Request:
        assert slot.episode is not None
        return Request(
            prompt_ids=slot.prompt_ids,
            max_tokens=self._max_tokens,
            temperature=self._config.action_temperature,
            top_p=self._config.action_top_p,
            seed=hash_seed(slot.sampling_seed, len(slot.episode)),
            messages=slot.messages,
            role=slot.role,
            pattern=slot.form.regex if slot.form is not None else None,
            env=environment_of(slot.episode) or str(self._config.env),
        )

    def answers(self, patience_s: float | None = None) -> Sequence[tuple[int, Generation]]:
        """The tickets that the engine has answered since the last call; after ``patience_s`` perhaps none."""
        assert self.speaker is not None
        return self.speaker.poll(patience_s)

    def withdraw(self) -> None:
        """Gives up what was asked."""
        assert self.speaker is not None
        self.speaker.withdraw()

    def action(self, slot: Slot, generation: Generation) -> str:
        """The part of a turn that goes to a slot's environment; an empty text for a malformed turn."""
        turn = slot.turn = self._chat.said(generation)
        action = parse_action(turn, self._config.action_format)
        self.count("invented_turns", self._chat.invents_a_turn(generation))
        self.count("action_parse_failures", action is None)
        self.count("action_parse_failures_cut_off", action is None and not generation.finished)
        if action is None and self.unparsed_turn is None:
            self.unparsed_turn = turn
        if action and slot.messages[0].role == TOOLS:
            action = self._chat.with_calls(generation, action)
            calls = read_calls(action)[1]
            self.count("tool_calls", len(calls))
            self.count("tool_call_parse_failures", sum(isinstance(call, str) for call in calls))
        return action or ""

    def record(self, played: Sequence[Played]) -> list[bool]:
        """Adds a step to each of several episodes, whose next prompts are encoded together.

        Returns:
            False where an episode is over, or lost: then the slot has none.
        """
        steps = [self._step(*each) for each in played]
        going_on = [step for step in steps if step is not None and not step.ended]
        wanted = [self._wanted(step) for step in going_on]
        for step, asked, prompt in zip(going_on, wanted, self._chat.prompts(wanted), strict=True):
            self.count("retokenised_turns", asked.seen is None or (isinstance(prompt, Prompt) and prompt.retokenised))
            self._take_prompt(step, prompt)
        return [step is not None and self._add(step) for step in steps]

    def _step(self, slot: Slot, generation: Generation, outcome: Outcome) -> _Step | None:
        """Takes an environment's answer into a slot's dialogue; None where the episode is lost."""
        assert slot.episode is not None
        if outcome.error is not None:
            self._replace_env(slot, "step", outcome.error)
            slot.episode = None
            return None
        observation, info = self._received(outcome)
        terminated, truncated = outcome.terminated, outcome.truncated
        if self._check_discard(slot, observation, info):
            return None
        self._failures_in_a_row = 0
        state = slot.messages
        slot.messages = dialogue_after(state, slot.turn, answer_of(observation, info), self._config.history_turns)
        for said in info.get(ANSWER) or ():
            self.count("tool_call_errors", bool(said.get("error")))
        slot.num_tokens += len(generation.token_ids)
        limit = self._config.max_response_tokens
        if not (terminated or truncated) and limit is not None and slot.num_tokens >= limit:
            truncated, info = True, {**info, "success": False, "stop_reason": "response_limit"}
        form, slot.form = slot.form, self._form(info)
        return _Step(slot, generation, state, observation, outcome.reward, terminated, truncated, info, form)

    def _wanted(self, step: _Step) -> Wanted:
        """The next prompt, which begins with the last one's ids and the sampled ones, but for a window that has moved on."""
        slot = step.slot
        seen = Seen(slot.prompt_ids, step.generation.token_ids) if goes_on(slot.messages, step.state) else None
        return Wanted(slot.messages, self._max_tokens, seen)

    def _take_prompt(self, step: _Step, prompt: Prompt | PromptTooLong) -> None:
        if isinstance(prompt, PromptTooLong):
            step.truncated, step.info = True, {**step.info, "success": False, "stop_reason": "context_limit"}
            # The rest fits no prompt and would only fill the buffer.
            step.observation = step.observation[: self._chat.max_context]
            step.info = {**step.info, ANSWER: None}
            return
        step.slot.prompt_ids = prompt.ids

    def _add(self, step: _Step) -> bool:
        """Adds a step to its episode; False where that is over."""
        slot, terminated, truncated = step.slot, step.terminated, step.truncated
        assert slot.episode is not None
        if self._config.truncation_ends:
            terminated, truncated = terminated or truncated, False
        slot.episode.add_env_step(
            step.observation,
            slot.turn,
            step.reward,
            step.info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=step_outputs(step.generation, step.state, step.form, self._config.structured_actions),
        )
        self._tell("on_episode_step", slot)
        if terminated or truncated:
            self._lost_in_a_row = self._discarded_in_a_row = 0
            self._tell("on_episode_end", slot, prev_episode_chunks=[])
            strip_infos(slot.episode)
        return not (terminated or truncated)

    def _form(self, info: Mapping[str, Any]) -> ActionForm | None:
        """What the environment offers, where the engine enforces that; what cannot be enforced is counted."""
        if not self._config.structured_actions:
            return None
        try:
            return action_form(info, self._config.action_format)
        except ValueError as error:
            if not self.num_forms_refused:
                logger.warning("%s: %s; the turn is free", self._config.env, error)
            self.num_forms_refused += 1
            self.count("action_forms_refused", 1)
            return None

    def _received(self, outcome: Outcome) -> tuple[str, dict[str, Any]]:
        """Observation and info as the rest of the run sees them: without what no tokenizer reads or no prompt can hold."""
        limit = self._chat.max_characters
        told = outcome.info.get(ANSWER)
        if any(len(text) > limit for text in (outcome.observation, *(said["content"] for said in told or ()))):
            self.count("observations_cut", 1)
        # One character more than any prompt may have, so that such an observation still ends its episode.
        observation, replaced = readable(outcome.observation[: limit + 1])
        info, more = readable_values(outcome.info)
        if told is not None:
            texts = [readable(said["content"][: limit + 1]) for said in info[ANSWER]]
            info[ANSWER] = [{**said, "content": text} for said, (text, _) in zip(info[ANSWER], texts, strict=True)]
            more += sum(count for _, count in texts)
        self.count("characters_replaced", replaced + more)
        return observation, info

    def _replace_env(self, slot: Slot, call: str, error: BaseException) -> None:
        """Counts a failure of a user's environment and puts a new one in its place."""
        self._failures_in_a_row += 1
        self._lost_in_a_row += 1
        self.count("env_failures", 1)
        logger.warning("%s.%s() raised %s: %s; its episode is dropped", self._config.env, call, type(error).__name__, error)
        if self._failures_in_a_row >= self.MAX_FAILURES_IN_A_ROW + len(self.slots):
            raise RuntimeError(
                f"the environment {self._config.env!r} failed {self._failures_in_a_row} times in a row, the last time in "
                f"{call}(): {type(error).__name__}: {error}. Try it alone, by reset() and step() in a Python shell"
            ) from error
        if self._lost_in_a_row >= self.MAX_LOST_IN_A_ROW + len(self.slots):
            raise RuntimeError(
                f"the environment {self._config.env!r} lost {self._lost_in_a_row} episodes in a row and brought none to its "
                f"end, the last time in {call}(): {type(error).__name__}: {error}. Play it to the end alone: rllib env play"
            ) from error
        self._close(slot)
        slot.env = self.make_env(self.slots.index(slot))

    def _check_discard(self, slot: Slot, observation: str, info: dict[str, Any]) -> bool:
        """Drops the episode where its environment says so, and whether it does."""
        if info.get("discard"):
            self._discard(slot, info.get("stop_reason") or "unknown", observation)
        return bool(info.get("discard"))

    def _discard(self, slot: Slot, reason: str, cause: str) -> None:
        """Drops an episode that ended through no fault of the agent."""
        task = slot.episode.get_infos(0).get("task_id") if slot.episode is not None and slot.episode.infos else None
        slot.episode, cause = None, f"{cause:.1000}"
        self._discarded_in_a_row += 1
        self.count("episodes_discarded", 1)
        self.count(f"stop_reason_{self.stop_reason(reason)}", 1)
        level = logging.WARNING if self._discarded_in_a_row <= 3 else logging.DEBUG  # the count is in the metrics
        which = "an episode" if task is None else f"an episode of task {task!r:.80}"
        logger.log(level, "%s: %s is left out (%s): %s", self._config.env, which, reason, cause)
        if self._discarded_in_a_row >= self.MAX_FAILURES_IN_A_ROW + len(self.slots):
            raise RuntimeError(
                f"the environment {self._config.env!r} lost {self._discarded_in_a_row} episodes in a row ({reason}), the last "
                f"time with: {cause}"
            )

    def count(self, name: str, amount: int) -> None:
        """Adds to a sum of the metrics, by the next ``book``."""
        self._counts[name] += amount

    def book(self) -> None:
        """Hands the metrics what was counted: to log each single turn costs as much as its step of a fast environment.

        Metrics (env_runners):
            stop_reason_*: Episodes by how they ended.
            action_parse_failures, action_parse_failures_cut_off: Turns that did not parse, and those of them that
                `max_action_tokens` cut off.
            success_guessed: Episodes whose last info has no `success`; a return above 0 counts as one.
            invented_turns: Turns that contain another role's special tokens. Does the chat template suit the model?
            action_forms_refused: Turns whose offered form is malformed; they are sampled freely.
            env_failures, episodes_discarded: Episodes lost because the environment failed, and episodes left out (`discard`, or
                a first prompt that is too long).
            episodes_with_tools, tool_calls, tool_call_parse_failures, tool_call_errors: Episodes that offer tools, calls, calls
                that cannot be read, results that are errors.
            observations_cut, characters_replaced: Observations, with tools' results, that were cut, and characters that no
                tokenizer reads.
            retokenised_turns: Turns after which the whole prompt was encoded again, because the template or `history_turns`
                changes earlier turns.
            num_env_steps_sampled, num_episodes, num_generated_tokens: Turns, episodes and generated tokens of this iteration.
        """
        for name, amount in self._counts.items():
            self._metrics.log_value(name, int(amount), reduce="sum")
        self._counts.clear()
