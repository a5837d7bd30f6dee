"""Stage 2: environments and an engine make text episodes with the sampled token ids kept.

Each slot steps its environment as soon as its own generation is back; no slot waits for another. Stock RLlib runners are
not used because their batching walks a string character by character.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import ray
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils import force_list
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    EPISODE_DURATION_SEC_MEAN,
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    WEIGHTS_SEQ_NO,
)

from rllib_nlac.envs.answers import MetricNames
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.sampling.chat import PromptTooLong
from rllib_nlac.sampling.engine import Engine
from rllib_nlac.sampling.engines import local_engine
from rllib_nlac.sampling.env_threads import EnvThreads
from rllib_nlac.sampling.refining import RefiningPolicy
from rllib_nlac.sampling.rollout import Outcome, Rollout, Slot, Start
from rllib_nlac.sync.shared import require_finite
from rllib_nlac.texts import readable, readable_values
from rllib_nlac.types import Generation, Request, Weights, dialogue_after, hash_seed

logger = logging.getLogger(__name__)

GENERATION, MESSAGES = "generation", "messages"  # keys of an episode's extra model outputs
NEXT_EPISODE = "next_episode"  # key of a runner's state: the number of its next episode
TASK_SEED = "task_seed"  # key of an episode's custom data: what its environment was reset with
TASK = "task"  # another: the number of its task in an evaluation
UNPARSED_TURNS = "unparsed_turns"  # key of the metrics: a turn of each call of ``sample`` that did not parse, as it came
EVALUATION_SEED = 1_000_000  # RLlib adds as much to the seed of its own evaluation runners


class TextEnvRunner(EnvRunner, Checkpointable):
    """Plays whole episodes of a text environment with the policy that an engine serves.

    An environment that raises loses its episode, which is counted and replaced, and nothing else; so does one that says
    ``info["discard"]``, because its simulated user failed, and one whose first prompt exceeds the context. A prompt that
    outgrows the context later ends its episode as truncated. Characters that no tokenizer reads are replaced.
    An empty or malformed turn reaches the environment as an empty action. With ``env_threads`` environments whose answers
    take time, such as those that ask an endpoint, are stepped side by side, while the engine goes on generating.

    The engine is attached by algorithms of this package. Under RLlib's own algorithms nobody attaches one: their weights
    arrive by RLlib's own sync, in ``set_state``, and the runner starts an engine in its process at its first ``sample``.
    """

    #: An environment that fails this often without one step in between is broken, not unlucky.
    MAX_FAILURES_IN_A_ROW = 20

    @override(EnvRunner)
    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._seed: int | None
        self.num_env_steps_sampled_lifetime: int
        self.worker_index: int = kwargs.get("worker_index") or 0
        self.engine: Engine | None = None
        self._speaker: Engine | RefiningPolicy | None = None  # what answers in the rollout under way
        self.chat = self.config.make_chat()
        self.prompts = load_prompts(self.config.prompts, self.config.env)
        self._env_creator = kwargs.get("env_creator") or _creator_of(self.config)
        self._callbacks = [callbacks() for callbacks in force_list(self.config.callbacks_class)]
        self._slots: list[Slot] = []
        self._next_episode = 0
        self._era: int | None = None
        self._failures_in_a_row = self._discarded_in_a_row = 0
        self._stop_reasons, self._subgoals = MetricNames(), MetricNames()
        self._unparsed_turn: str | None = None
        count, limit = self.config.env_threads, self.config.env_step_timeout_s
        self._threads = EnvThreads(max(count, 1), limit) if count or limit is not None else None
        self._weights_version = 0
        self._weights: dict[str, Any] | None = None
        # Asynchronous algorithms of RLlib put a handle here; their runners fetch new weights from it themselves.
        self._env_runner_state_server: Any = None
        self.make_env()

    def attach(self, engine: Engine) -> None:
        """Gives this runner the engine that answers for the policy."""
        self.engine = engine

    @contextmanager
    def lent(self, engine: Engine) -> Iterator[None]:
        """Has an engine for the time of a call: what a runner keeps is lost with its process, and ages with each sync."""
        own, self.engine = self.engine, engine
        try:
            yield
        finally:
            self.engine, self._speaker = own, None

    def resume(self, state: dict[str, Any], era: int) -> None:
        """Takes over the counters of the process that was here before; one that has gone on since keeps its own.

        Args:
            state: What ``get_state`` gave.
            era: Changes when a checkpoint is restored, after which an earlier number is the right one.
        """
        if era != self._era or state[NEXT_EPISODE] >= self._next_episode:
            self.set_state(state)
        self._era = era

    @override(EnvRunner)
    def make_env(self) -> None:
        self.stop()
        self._slots = [Slot(self._create_env(index)) for index in range(self.config.num_envs_per_env_runner)]
        self.env = self._slots[0].env

    def _create_env(self, vector_index: int) -> gym.Env[str, str]:
        context = EnvContext(self.config.env_config, self.worker_index, vector_index=vector_index, num_workers=self.num_workers)
        env = self._env_creator(context)
        check_text_env(env, self.config.env)
        self._call_back("on_environment_created", env=env, env_context=context)
        return env

    def _call_back(self, which: str, **arguments: Any) -> None:
        """One of RLlib's callbacks, where the user has given any."""
        make_callback(
            which, self._callbacks, getattr(self.config, f"callbacks_{which}"),
            kwargs={"env_runner": self, "metrics_logger": self.metrics, **arguments},
        )  # fmt: skip

    def _call_back_on_episode(self, which: str, slot: Slot, **arguments: Any) -> None:
        # The policy's weights live in the engine, so there is no RLModule to hand over.
        place = {"env": slot.env, "env_index": self._slots.index(slot), "rl_module": None}
        self._call_back(which, episode=slot.episode, **place, **arguments)

    @override(EnvRunner)
    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[SingleAgentEpisode]:
        """Plays exactly ``num_episodes`` whole episodes, or whole episodes until ``num_timesteps`` steps were made.

        Without either it plays its share of ``episodes_per_iteration``, or as many steps as RLlib's
        ``rollout_fragment_length`` asks of all its environments. Exactly as many episodes are begun as are returned:
        taking the first to finish would favour the short ones.
        """
        if num_timesteps is None and num_episodes is None:
            if self.config.episodes_per_iteration is not None:
                num_episodes = self.config.share_of_episodes(self.worker_index)
            else:
                num_timesteps = self.config.get_rollout_fragment_length(self.worker_index) * len(self._slots)
        if self.config.in_evaluation:
            self._next_episode = 0  # every evaluation plays the same tasks
        # After episodes that were lost or passed over the next task begins anew, so that its group is whole.
        self._next_episode += -self._next_episode % self.config.episodes_per_task
        self._fetch_weights()
        self._unparsed_turn = None
        episodes = self._play(self._next_start, num_episodes, num_timesteps or 0)
        if self._unparsed_turn is not None:
            self.metrics.log_value(UNPARSED_TURNS, self._unparsed_turn, reduce="item_series")
        return episodes

    def sample_tasks(self, tasks: Sequence[int], attempts: int = 1, refined: bool = False) -> list[SingleAgentEpisode]:
        """Plays evaluation tasks: a number means the same task and the same seeds on every runner and at any time.

        Args:
            tasks: Their numbers.
            attempts: Episodes of each task, sampled with seeds of their own.
            refined: Whether each turn is criticised and refined once before it is played.

        Returns:
            The episodes in the order of tasks and attempts, without those that a failing environment lost.
        """
        seed = (self.config.seed or 0) + EVALUATION_SEED
        starts = [
            Start(f"task-{task:08d}-{attempt:04d}", hash_seed(seed, task), hash_seed(seed, task * attempts + attempt))
            for task in tasks
            for attempt in range(attempts)
        ]
        waiting = iter(starts)
        self._fetch_weights()
        played = self._play(lambda: next(waiting), len(starts), 0, replace_lost=False, refined=refined)
        for episode in played:  # two tasks may share a seed of 31 bits
            episode.custom_data[TASK] = int(episode.id_.split("-")[1])
        return played

    def branch(self, prefixes: Sequence[tuple[SingleAgentEpisode, int]], count: int) -> list[list[SingleAgentEpisode]]:
        """Plays each prefix again and lets the policy go on from there, ``count`` times.

        The environment must answer alike after ``reset`` with the same seed; a branch whose observations differ from the
        recorded ones is dropped and counted as ``branch_mismatches``.

        Args:
            prefixes: Episodes of any runner, each with the number of its steps to play again.
            count: Branches of each prefix.

        Returns:
            For each prefix its branches, whole episodes from the first step on.
        """
        starts: list[Start] = []
        for number, (episode, steps) in enumerate(prefixes):
            for branch in range(count):
                seed = hash_seed(episode.custom_data[TASK_SEED], self._next_episode, number, branch)
                name = f"{episode.id_}/{steps}/{branch}"
                starts.append(Start(name, episode.custom_data[TASK_SEED], seed, (episode, steps)))
        self._next_episode += 1
        waiting = iter(starts)
        played = self._play(lambda: next(waiting), len(starts), 0, are_branches=True)
        by_name = {episode.id_: episode for episode in played}
        found = [by_name.get(start.name) for start in starts]
        return [[e for e in found[i : i + count] if e is not None] for i in range(0, len(found), count)]

    def _play(
        self, next_start: Callable[[], Start], num_episodes: int | None, num_timesteps: int, are_branches: bool = False,
        replace_lost: bool = True, refined: bool = False,
    ) -> list[SingleAgentEpisode]:  # fmt: skip
        self._serve_own_weights()
        if self.engine is None:
            raise RuntimeError("this EnvRunner has no engine yet: call attach(engine) before sample()")
        self._speaker = self._refining(self.engine) if refined else self.engine
        started = time.perf_counter()
        replaced = replace_lost and not are_branches
        done = Rollout(self, self._slots, next_start, num_episodes, num_timesteps, replaced, self._threads).run()
        self._log_episodes(done, time.perf_counter() - started, are_branches)
        self._call_back("on_sample_end", samples=done)
        return done

    def _next_start(self) -> Start:
        """This runner's next episode. Its seeds depend on its number, not on the slot that plays it."""
        number, runner = self._next_episode, self.worker_index
        self._next_episode += 1
        # Not RLlib's seed of a runner: that is none without config.seed, so all runners would play the same episodes, and
        # runner 2 of seed 0 has that of runner 1 of seed 1.
        seed = (self.config.seed or 0) + EVALUATION_SEED * self.config.in_evaluation
        task = number if self.config.in_evaluation else number // self.config.episodes_per_task
        name = f"{runner:04d}-{int(self.config.in_evaluation)}-{number:010d}"
        return Start(name, hash_seed(seed, task, runner), hash_seed(seed, number, runner))

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
        self._call_back_on_episode("on_episode_created", slot)
        slot.episode.add_env_reset(observation, info)
        self._call_back_on_episode("on_episode_start", slot)
        slot.messages = self.prompts.state(info.get("system_prompt") or "", observation, self.config.action_format)
        slot.num_tokens = 0
        try:
            slot.prompt_ids = self.chat.prompt_ids(slot.messages, room=self.config.max_action_tokens)
        except PromptTooLong as error:
            self._discard(slot, "context_limit", f"the first prompt of task {info.get('task_id')!r}: {error}")
            return False
        limit = self.config.max_prompt_tokens
        if limit is not None and len(slot.prompt_ids) > limit:
            task, length = f"{info.get('task_id')!r:.80}", len(slot.prompt_ids)
            cause = f"task {task} has a first prompt of {length} tokens (max_prompt_tokens {limit})"
            self._discard(slot, "prompt_limit", cause)
            return False
        if start.prefix is None:
            return True
        episode, steps = start.prefix
        return all(self._replay(slot, episode, t) for t in range(steps))

    def _replay(self, slot: Slot, recorded: SingleAgentEpisode, t: int) -> bool:
        """Plays one recorded step again; False where the episode is over, or lost because the environment differs."""
        generation = recorded.get_extra_model_outputs(GENERATION, t)
        alive = self.record(slot, generation, self._call(slot.step, self.action(generation)))
        if slot.episode is not None and slot.episode.get_observations(-1) != recorded.get_observations(t + 1):
            self._count("branch_mismatches", 1)
            slot.episode = None
        return alive and slot.episode is not None

    def _call(self, function: Callable[[Any], Outcome], argument: Any) -> Outcome:
        return function(argument) if self._threads is None else self._threads.call(function, argument)

    def _refining(self, engine: Engine) -> RefiningPolicy:
        settings = getattr(self.config, "stage_settings", None)
        if settings is None:
            raise ValueError(f"{type(self.config).__name__} has no critic in words, so its policy cannot be refined")
        return RefiningPolicy(engine, self.chat, self.prompts, str(self.config.env), settings)

    def ask(self, slot: Slot) -> int:
        """Asks the engine for a slot's next turn; returns the ticket."""
        assert slot.episode is not None and self._speaker is not None
        request = Request(
            prompt_ids=slot.prompt_ids,
            max_tokens=self.config.max_action_tokens,
            temperature=self.config.action_temperature,
            top_p=self.config.action_top_p,
            seed=hash_seed(slot.sampling_seed, len(slot.episode)),
            messages=slot.messages,
        )
        return self._speaker.submit([request])[0]

    def answers(self) -> Sequence[tuple[int, Generation]]:
        """The tickets that the engine has answered since the last call, at least one."""
        assert self._speaker is not None
        return self._speaker.poll()

    def action(self, generation: Generation) -> str:
        """What of a turn goes to the environment: nothing of one that is malformed."""
        turn = self.chat.decode(generation.token_ids)
        action = parse_action(turn, self.config.action_format)
        self._count("action_parse_failures", action is None)
        self._count("action_parse_failures_cut_off", action is None and not generation.finished)
        if action is None and self._unparsed_turn is None:
            self._unparsed_turn = turn
        return action or ""

    def record(self, slot: Slot, generation: Generation, outcome: Outcome) -> bool:
        """Adds a step to its episode; False where the episode is over, or lost: then the slot has none."""
        assert slot.episode is not None
        if outcome.error is not None:
            self._replace_env(slot, "step", outcome.error)
            slot.episode = None
            return False
        turn, (observation, info) = self.chat.decode(generation.token_ids), self._received(outcome)
        terminated, truncated = outcome.terminated, outcome.truncated
        if info.get("discard"):
            self._discard(slot, info.get("stop_reason") or "unknown", observation)
            return False
        self._failures_in_a_row = 0
        state = slot.messages
        slot.messages = dialogue_after(state, turn, observation, self.config.history_turns)
        slot.num_tokens += len(generation.token_ids)
        limit = self.config.max_response_tokens
        if not (terminated or truncated) and limit is not None and slot.num_tokens >= limit:
            truncated, info = True, {**info, "success": False, "stop_reason": "response_limit"}
        if not (terminated or truncated):
            try:
                slot.prompt_ids = self.chat.prompt_ids(slot.messages, room=self.config.max_action_tokens)
            except PromptTooLong:
                truncated, info = True, {**info, "success": False, "stop_reason": "context_limit"}
                observation = observation[: self.chat.max_context]  # the rest fits no prompt and would only fill the buffer
        if self.config.truncation_ends:
            terminated, truncated = terminated or truncated, False
        slot.episode.add_env_step(
            observation, turn, outcome.reward, info, terminated=terminated, truncated=truncated,
            extra_model_outputs={GENERATION: generation, MESSAGES: state},
        )  # fmt: skip
        self._call_back_on_episode("on_episode_step", slot)
        if terminated or truncated:
            self._discarded_in_a_row = 0
            self._call_back_on_episode("on_episode_end", slot, prev_episode_chunks=[])
        return not (terminated or truncated)

    def _received(self, outcome: Outcome) -> tuple[str, dict[str, Any]]:
        """Observation and info as the rest of the run sees them: without what no tokenizer reads or no prompt can hold."""
        limit = self.chat.max_characters
        if len(outcome.observation) > limit:
            self._count("observations_cut", 1)
        # One character more than any prompt may have, so that such an observation still ends its episode.
        observation, replaced = readable(outcome.observation[: limit + 1])
        info, more = readable_values(outcome.info)
        self._count("characters_replaced", replaced + more)
        return observation, info

    def _replace_env(self, slot: Slot, call: str, error: BaseException) -> None:
        """Counts a failure of a user's environment and puts a new one in its place."""
        self._failures_in_a_row += 1
        self._count("env_failures", 1)
        logger.warning("%s.%s() raised %s: %s; its episode is dropped", self.config.env, call, type(error).__name__, error)
        if self._failures_in_a_row >= self.MAX_FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"the environment {self.config.env!r} failed {self._failures_in_a_row} times in a row, the last time in "
                f"{call}(): {type(error).__name__}: {error}. Try it alone, by reset() and step() in a Python shell"
            ) from error
        slot.env = self._create_env(self._slots.index(slot))

    def _discard(self, slot: Slot, reason: str, cause: str) -> None:
        """Leaves an episode out that ended through no fault of the agent."""
        slot.episode, cause = None, f"{cause:.1000}"
        self._discarded_in_a_row += 1
        self._count("episodes_discarded", 1)
        self._count(f"stop_reason_{self._stop_reasons(reason)}", 1)
        level = logging.WARNING if self._discarded_in_a_row <= 3 else logging.DEBUG  # the count is in the metrics
        logger.log(level, "%s: an episode is left out (%s): %s", self.config.env, reason, cause)
        if self._discarded_in_a_row >= self.MAX_FAILURES_IN_A_ROW + len(self._slots):
            raise RuntimeError(
                f"the environment {self.config.env!r} lost {self._discarded_in_a_row} episodes in a row ({reason}), the last "
                f"time with: {cause}"
            )

    def _count(self, name: str, amount: int) -> None:
        self.metrics.log_value(name, int(amount), reduce="sum")

    def _log_episodes(self, episodes: Sequence[SingleAgentEpisode], seconds: float, are_branches: bool) -> None:
        """Counts what was played; branches begin somewhere on the way, so their returns say nothing of the policy's."""
        generated = 0
        for episode in episodes:
            info = episode.get_infos(-1)
            generations: Sequence[Generation] = episode.get_extra_model_outputs(GENERATION)
            generated += sum(len(generation.token_ids) for generation in generations)
            if are_branches:
                continue
            self._mean(EPISODE_RETURN_MEAN, episode.get_return())
            self._mean(EPISODE_LEN_MEAN, len(episode))
            self._mean(EPISODE_DURATION_SEC_MEAN, episode.get_duration_s())
            self._mean("success_rate", float(episode_success(episode)))
            self._count(f"stop_reason_{self._stop_reasons(info.get('stop_reason') or 'unknown')}", 1)
            for name, reached in (info.get("subgoals") or {}).items():
                self.metrics.log_value(("subgoals", self._subgoals(name)), float(reached), reduce="mean")
        steps = sum(len(episode) for episode in episodes)
        self.num_env_steps_sampled_lifetime += steps
        for key, value in ((NUM_ENV_STEPS_SAMPLED, steps), (NUM_EPISODES, len(episodes)), ("num_generated_tokens", generated)):
            self._count(key, value)
        for key, value in ((NUM_ENV_STEPS_SAMPLED_LIFETIME, steps), (NUM_EPISODES_LIFETIME, len(episodes))):
            self.metrics.log_value(key, value, reduce="lifetime_sum", with_throughput=True)
        self._mean("tokens_per_s", generated / max(seconds, 1e-9))
        self._mean("sample_time_s", seconds)

    def _mean(self, key: str, value: float) -> None:
        self.metrics.log_value(key, value, reduce="mean")

    @override(EnvRunner)
    def get_metrics(self) -> Any:
        return self.metrics.reduce()

    @override(EnvRunner)
    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        spaces = (self._slots[0].env.observation_space, self._slots[0].env.action_space)
        return {INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces, DEFAULT_AGENT_ID: spaces}

    @override(EnvRunner)
    def assert_healthy(self) -> None:
        assert self._slots, "this EnvRunner has no environments"

    @override(Checkpointable)
    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Counters, and the weights that RLlib's own sync has brought: without them a restarted runner has no engine."""
        state = {NEXT_EPISODE: self._next_episode, NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_env_steps_sampled_lifetime}
        # RLlib asks for everything with no arguments; a checkpoint says what it leaves out, and has them from the learner.
        is_wanted = COMPONENT_RL_MODULE in force_list(components) or (components is None and not_components is None)
        if self._weights is not None and is_wanted:
            state |= {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: self._weights}, WEIGHTS_SEQ_NO: self._weights_version}
        return state

    @override(Checkpointable)
    def set_state(self, state: dict[str, Any]) -> None:
        if COMPONENT_RL_MODULE in state:
            self._take_weights(state[COMPONENT_RL_MODULE], state.get(WEIGHTS_SEQ_NO, 0))
        self._next_episode = state.get(NEXT_EPISODE, self._next_episode)
        self.num_env_steps_sampled_lifetime = state.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, self.num_env_steps_sampled_lifetime)

    def _fetch_weights(self) -> None:
        """Asks the state server of an asynchronous algorithm for newer weights; without an answer the old ones play on."""
        if self._env_runner_state_server is None:
            return
        try:
            state = ray.get(self._env_runner_state_server.pull_if_newer.remote(self._weights_version))
        except ray.exceptions.RayError as error:
            self._count("weight_fetch_failures", 1)
            logger.warning("no newer weights could be fetched: %s: %s", type(error).__name__, error)
            return
        if state is not None:
            self.set_state(state)

    def _take_weights(self, weights: Any, version: int) -> None:
        """Weights from RLlib's own sync; of an older version than those here they are ignored, of version 0 never."""
        weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
        weights = weights.get(DEFAULT_MODULE_ID, weights)
        if weights and (version == 0 or version > self._weights_version):
            self._weights, self._weights_version = weights, max(version, self._weights_version)

    def _serve_own_weights(self) -> None:
        """Puts the weights of RLlib's last sync into this process's engine, which others here may have used in between."""
        if self._weights is not None:
            engine = local_engine(self.config, self.chat)
            if not engine.holds(self._weights):
                require_finite(self._weights, "the weights that RLlib's sync brought")
                engine.set_weights(Weights.POLICY, self._weights_version, self._weights)
            self.engine = engine

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (), {"config": self.config}

    @override(EnvRunner)
    def stop(self) -> None:
        for slot in self._slots:
            slot.env.close()
        if self._weights is not None:
            self.engine = self._speaker = self._weights = None  # its engine ends with the last runner that holds it
            gc.collect()


def check_text_env(env: gym.Env, name: Any) -> None:
    """Refuses an environment whose observations or actions are not text.

    Raises:
        ValueError: A space is not a ``gymnasium.spaces.Text``.
    """
    for kind in ("observation", "action"):
        space = getattr(env, f"{kind}_space", None)
        if not isinstance(space, gym.spaces.Text):
            raise ValueError(
                f"the environment {name!r} has the {kind} space {space}, and NLAC needs text: use rllib_nlac.envs.TextSpace "
                "for both spaces, or one of RLlib's own algorithms for this environment"
            )


def episode_success(episode: SingleAgentEpisode) -> bool:
    """Whether an episode ended in success: the environment's own word, or else a positive return."""
    success = episode.get_infos(-1).get("success")
    return bool(success) if success is not None else episode.get_return() > 0


def _creator_of(config: Any) -> Callable[[EnvContext], gym.Env]:
    from ray.rllib.algorithms.algorithm import Algorithm

    return Algorithm._get_env_id_and_creator(config.env, config)[1]
