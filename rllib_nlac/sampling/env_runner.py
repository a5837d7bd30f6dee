"""Stage 2: environments and an engine make text episodes with the sampled token ids kept.

Each slot steps its environment as soon as its own generation is back; no slot waits for another. Stock RLlib runners are
not used because their batching walks a string character by character.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
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
)

from rllib_nlac.engine.protocol import Engine
from rllib_nlac.envs.answers import MetricNames
from rllib_nlac.envs.spaces import check_text_env
from rllib_nlac.episode import TASK, episode_success, generations_of
from rllib_nlac.language.variant import NLAC_AS_IT_IS
from rllib_nlac.sampling.env_watch import watched
from rllib_nlac.sampling.means import hand_on_whole_means
from rllib_nlac.sampling.player import TextPlayer
from rllib_nlac.sampling.refining import RefiningPolicy
from rllib_nlac.sampling.rollout import Rollout
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import Generation, hash_seed

logger = logging.getLogger(__name__)

NEXT_EPISODE = "next_episode"  # key of a runner's state: the number of its next episode
LEAP = 1_000_000  # more episodes than a runner plays when it is asked once, or from one checkpoint to the next
UNPARSED_TURNS = "unparsed_turns"  # key of the metrics: a turn of each call of ``sample`` that did not parse, as it came
EVALUATION_SEED = 1_000_000  # RLlib adds as much to the seed of its own evaluation runners


class TextEnvRunner(EnvRunner, Checkpointable):
    """Plays whole episodes of a text environment with the policy that an engine serves.

    An environment that raises loses its episode, which is counted and replaced, and nothing else; so does one that says
    ``info["discard"]``, because its simulated user failed, and one whose first prompt exceeds the context. A prompt that
    outgrows the context later ends its episode as truncated. Characters that no tokenizer reads are replaced.
    An empty or malformed turn reaches the environment as an empty action. With ``env_threads`` environments whose answers
    take time, such as those that ask an endpoint, are stepped side by side, while the engine goes on generating.

    The engine is attached by the algorithms of this package; under RLlib's own the runner has one of its own, see
    ``baselines/stock_runner.py``.
    """

    @override(EnvRunner)
    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        hand_on_whole_means(self.metrics)
        self._seed: int | None
        self.num_env_steps_sampled_lifetime: int
        self.worker_index: int = kwargs.get("worker_index") or 0
        self.engine: Engine | None = None
        self.chat = self.config.make_chat()
        self._env_creator = kwargs.get("env_creator") or _creator_of(self.config)
        self._callbacks = [callbacks() for callbacks in force_list(self.config.callbacks_class)]
        self._next_episode = 0
        self._era: int | None = None
        self._subgoals, self._partners = MetricNames(), MetricNames()
        self.player = TextPlayer(self.config, self.chat, self._create_env, self._call_back, self.metrics)
        self.make_env()

    def prepare(self) -> None:
        """Hook before episodes are played, for runners that make their own engine."""

    def attach(self, engine: Engine) -> None:
        """Gives this runner the engine that answers for the policy."""
        self.engine = engine

    @contextmanager
    def lent(self, engine: Engine) -> Iterator[None]:
        """Lends an engine for one call. A kept one would be lost with the process, and outdated by the next sync."""
        own, self.engine = self.engine, engine
        try:
            yield
        finally:
            self.engine, self.player.speaker = own, None

    def resume(self, state: dict[str, Any], era: int) -> None:
        """Takes over the counters of the process before this one, unless this one is further on.

        Args:
            state: What ``get_state`` gave.
            era: Changes when a checkpoint is restored, after which an earlier number is the right one.
        """
        if era != self._era or state[NEXT_EPISODE] >= self._next_episode:
            self.set_state(state)
        self._era = era

    @override(EnvRunner)
    def make_env(self) -> None:
        self.player.open()
        self.env = self.player.slots[0].env

    def _create_env(self, vector_index: int) -> gym.Env[str, str]:
        context = EnvContext(self.config.env_config, self.worker_index, vector_index=vector_index, num_workers=self.num_workers)
        env = self._env_creator(context)
        check_text_env(env, self.config.env)
        self._call_back("on_environment_created", env=env, env_context=context)
        return env

    def _call_back(self, which: str, **arguments: Any) -> None:
        """Calls one of RLlib's callbacks, if the user has set it."""
        make_callback(
            which,
            self._callbacks,
            getattr(self.config, f"callbacks_{which}"),
            kwargs={"env_runner": self, "metrics_logger": self.metrics, **arguments},
        )

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
                num_timesteps = self.config.get_rollout_fragment_length(self.worker_index) * len(self.player.slots)
        if self.config.in_evaluation:
            self._next_episode = 0  # every evaluation plays the same tasks
        # After episodes that were lost or passed over the next task begins anew, so that its group is whole.
        self._next_episode += -self._next_episode % self.config.episodes_per_task
        self.prepare()
        self.player.unparsed_turn = None
        episodes = self._play(self._next_start, num_episodes, num_timesteps or 0)
        if self.player.unparsed_turn is not None:
            self.metrics.log_value(UNPARSED_TURNS, self.player.unparsed_turn, reduce="item_series")
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
            Start(
                f"task-{task:08d}-{attempt:04d}",
                hash_seed(seed, task),
                hash_seed(seed, task * attempts + attempt),
                role="evaluation",
            )
            for task in tasks
            for attempt in range(attempts)
        ]
        self.prepare()
        played = self._play(iter(starts).__next__, len(starts), 0, replace_lost=False, refined=refined)
        for episode in played:  # two tasks may share a seed of 31 bits
            episode.custom_data[TASK] = int(episode.id_.split("-")[1])
        return played

    def play_forks(self, starts: Sequence[Start]) -> list[SingleAgentEpisode]:
        """Plays episodes that repeat a prefix of others and then differ in one turn; see ``Start``.

        The environment must answer alike after ``reset`` with the same seed. An episode whose observations differ from the
        recorded ones, or which ends elsewhere, is dropped and counted as ``branch_mismatches``.

        Returns:
            The episodes in the order of their names, without those that were lost or whose prefix was answered otherwise.
        """
        self.prepare()
        repeated = {start.name: start.prefix[1] for start in starts if start.prefix is not None}
        return self._play(iter(starts).__next__, len(starts), 0, repeated=repeated)

    def _play(
        self,
        next_start: Callable[[], Start],
        num_episodes: int | None,
        num_timesteps: int,
        repeated: Mapping[str, int] | None = None,
        replace_lost: bool = True,
        refined: bool = False,
    ) -> list[SingleAgentEpisode]:
        if self.engine is None:
            raise RuntimeError("this EnvRunner has no engine yet: call attach(engine) before sample()")
        self.player.speaker = self._refining(self.engine) if refined else self.engine
        started = time.perf_counter()
        replaced = replace_lost and repeated is None
        player = self.player
        with watched(player.slots, str(self.config.env)):
            done = Rollout(player, player.slots, next_start, num_episodes, num_timesteps, replaced, player.threads).run()
        self._log_episodes(done, time.perf_counter() - started, repeated)
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
        role = "evaluation" if self.config.in_evaluation else "play"
        return Start(name, hash_seed(seed, task, runner), hash_seed(seed, number, runner), role=role)

    def _refining(self, engine: Engine) -> RefiningPolicy:
        if not self.config.criticises_in_words:
            raise ValueError(f"{type(self.config).__name__} has no critic in words, so its policy cannot be refined")
        variant = getattr(self.config.algo_class, "variant", NLAC_AS_IT_IS)
        if variant.unrefined_because:
            raise ValueError(
                f"a turn cannot be refined before it is played: {variant.unrefined_because}. Evaluate without refinement"
            )
        return RefiningPolicy(engine, self.chat, functools.cache(self.config.prompts_for), self.config.stage_settings, variant)

    def _log_episodes(self, episodes: Sequence[SingleAgentEpisode], seconds: float, repeated: Mapping[str, int] | None) -> None:
        """Counts what was played.

        Args:
            episodes: Whole ones.
            seconds: How long it took.
            repeated: Number of turns of each branch, by its name, that were played again and not sampled. Branches start in
                the middle of an episode, so their returns are not the policy's.

        Metrics (env_runners):
            episode_return_mean, episode_len_mean: Mean return, and mean number of turns.
            success_rate: Share of the episodes just collected that succeeded.
            subgoals/*: Share of episodes that reached a sub-goal.
            success_by_partner/*: Success by the user, oracle or opponent. One far above the others: the policy fits that one.
            num_episodes_lifetime: Episodes since the run began.
            tokens_per_s, sample_time_s: Generated tokens per second, and seconds of playing.
            prefix_cache_hit_rate: Share of the prompts' tokens that were in the engine's prefix cache, which keeps whole
                blocks.
        """
        generated = prompted = cached = 0
        for episode in episodes:
            info = episode.get_infos(-1)
            start = 0 if repeated is None else repeated.get(episode.id_, 0)
            generations: Sequence[Generation] = generations_of(episode)[start:]
            generated += sum(len(generation.token_ids) for generation in generations)
            prompted += sum(len(generation.prompt_ids) for generation in generations)
            cached += sum(generation.cached_tokens for generation in generations)
            if repeated is not None:
                continue
            self._mean(EPISODE_RETURN_MEAN, episode.get_return())
            self._mean(EPISODE_LEN_MEAN, len(episode))
            self._mean(EPISODE_DURATION_SEC_MEAN, episode.get_duration_s())
            self._mean("success_rate", float(episode_success(episode)))
            self.player.count("success_guessed", info.get("success") is None)
            self.player.count(f"stop_reason_{self.player.stop_reason(info.get('stop_reason') or 'unknown')}", 1)
            for name, reached in (info.get("subgoals") or {}).items():
                self.metrics.log_value(("subgoals", self._subgoals(name)), float(reached), reduce="mean")
            if partner := info.get("partner"):
                won = float(episode_success(episode))
                self.metrics.log_value(("success_by_partner", self._partners(partner)), won, reduce="mean")
        steps = sum(len(episode) for episode in episodes)
        self.num_env_steps_sampled_lifetime += steps
        for key, value in ((NUM_ENV_STEPS_SAMPLED, steps), (NUM_EPISODES, len(episodes)), ("num_generated_tokens", generated)):
            self.player.count(key, value)
        for key, value in ((NUM_ENV_STEPS_SAMPLED_LIFETIME, steps), (NUM_EPISODES_LIFETIME, len(episodes))):
            self.metrics.log_value(key, value, reduce="lifetime_sum", with_throughput=True)
        self._mean("tokens_per_s", generated / max(seconds, 1e-9))
        self._mean("sample_time_s", seconds)
        self._mean("prefix_cache_hit_rate", cached / max(prompted, 1))
        self.player.book()

    def _mean(self, key: str, value: float) -> None:
        self.metrics.log_value(key, value, reduce="mean")

    @override(EnvRunner)
    def get_metrics(self) -> Any:
        self.player.book()
        return self.metrics.reduce()

    @override(EnvRunner)
    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        spaces = (self.player.slots[0].env.observation_space, self.player.slots[0].env.action_space)
        return {INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces, DEFAULT_AGENT_ID: spaces}

    @override(EnvRunner)
    def assert_healthy(self) -> None:
        assert self.player.slots, "this EnvRunner has no environments"

    @override(Checkpointable)
    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The counters."""
        if components is not None:  # RLlib asks for connectors, which this has none of, and hands the answer to other runners
            return {}
        return {NEXT_EPISODE: self._next_episode, NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_env_steps_sampled_lifetime}

    @override(Checkpointable)
    def set_state(self, state: dict[str, Any]) -> None:
        self._next_episode = state.get(NEXT_EPISODE, self._next_episode)
        self.num_env_steps_sampled_lifetime = state.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, self.num_env_steps_sampled_lifetime)

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (), {"config": self.config}

    @override(EnvRunner)
    def stop(self) -> None:
        self.player.close()


def _creator_of(config: Any) -> Callable[[EnvContext], gym.Env]:
    from ray.rllib.algorithms.algorithm import Algorithm

    return Algorithm._get_env_id_and_creator(config.env, config)[1]
