"""Stage 3: RLlib's prioritised episode buffer, sampled at (episode, t) with the whole dialogue before t.

RLlib's own ``sample`` returns one-step slices without what came before. The sum tree, the eviction of whole episodes and
the importance weights are RLlib's; its private attributes are touched in this file only and pinned by
``tests/compatibility``.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

from rllib_nlac.episode import (
    action_form_at,
    environment_of,
    episode_success,
    generation_at,
    generations_of,
    known_task_seed,
    messages_at,
    unlearned_steps,
)
from rllib_nlac.replay.storage import EpisodeFiles
from rllib_nlac.types import Transition

MAX_EPISODE_LENGTH = 1_000_000
STATE_FILE = "state.pkl"


@dataclass(frozen=True)
class ReplaySample:
    """Transitions with their importance weights.

    Attributes:
        transitions: Drawn with replacement, in the order drawn.
        weights: (N P(i))^-β, divided by the largest of the buffer; shape (len(transitions),), in (0, 1].
        nodes: Where each one's priority is kept, for ``update_priorities_of``.
    """

    transitions: list[Transition]
    weights: np.ndarray
    nodes: list[int]


class TextReplayBuffer(PrioritizedEpisodeReplayBuffer):
    """Samples transitions with P(i) = p_i^α / Σ p^α, or those of episodes that succeeded more often.

    Args:
        env: Name of the environment, which goes into every transition.
        capacity: The most transitions kept; the oldest episodes go first.
        max_bytes: The most bytes of texts and token ids kept, likewise.
        alpha: Exponent of the priorities; 0 is uniform replay.
        success_share: At least this share of the draws is from episodes that succeeded, where there are any.
        seed: Seeds the draws.
    """

    def __init__(
        self,
        *,
        env: str,
        capacity: int = 50_000,
        max_bytes: int = 4 << 30,
        alpha: float = 0.6,
        success_share: float = 0.0,
        seed: int | None = None,
    ) -> None:
        # RLlib's segment trees refuse an alpha of 0, which is a legal ablation: any priority to the power of it is 1.
        super().__init__(capacity=capacity, alpha=alpha or 1e-12)
        self.capacity: int
        self.sampled_timesteps: int
        self._max_priority: float
        self._num_episodes_evicted: int
        self.episodes: deque[SingleAgentEpisode]
        self.alpha = alpha
        self.success_share = success_share
        self.env = env
        self.max_bytes = max_bytes
        self.rng = np.random.default_rng(seed)
        self.logs: str | None = None  # which logged dialogues were added, by their fingerprint
        self._bytes: dict[str, int] = {}
        self._files = EpisodeFiles()

    @property
    def num_bytes(self) -> int:
        """Bytes of texts and token ids that are kept."""
        return sum(self._bytes.values())

    @override(PrioritizedEpisodeReplayBuffer)
    def add(self, episodes: Sequence[SingleAgentEpisode], weight: float | None = None) -> None:
        """Keeps whole episodes; new transitions get the largest priority seen so far."""
        for episode in episodes:
            if not episode.is_done:
                raise ValueError(f"episode {episode.id_} has not ended, and only whole episodes can be replayed")
            self._check_room(episode)
        self._bytes.update({episode.id_: size_of(episode) for episode in episodes})
        for episode in episodes:  # one by one: a list that exceeds the capacity makes RLlib evict from an empty buffer
            self._add(episode, weight)
        self._evict()

    def _add(self, episode: SingleAgentEpisode, weight: float | None = None) -> None:
        """Adds an episode; its steps that are not learned from are in no tree, so nothing draws them."""
        super().add([episode], weight)
        unlearned = frozenset(unlearned_steps(episode))
        if not unlearned:
            return
        places = self._indices[-len(episode) :]
        del self._indices[-len(episode) :]
        for place in places:
            node = place[2]
            if place[1] in unlearned:
                self._sum_segment[node], self._min_segment[node] = 0.0, float("inf")
                del self._tree_idx_to_sample_idx[node]
                self._free_nodes.appendleft(node)
            else:
                self._tree_idx_to_sample_idx[node] = len(self._indices)
                self._indices.append(place)

    def _check_room(self, episode: SingleAgentEpisode) -> None:
        if len(episode) > 2 * self.capacity:
            raise ValueError(
                f"episode {episode.id_} has {len(episode)} turns, more than twice replay_buffer_config: {{capacity: "
                f"{self.capacity}}}: set capacity to at least the turns of an episode, better of many"
            )

    def _evict(self) -> None:
        """The oldest episodes go until capacity and bytes are kept, the latest one excepted."""
        super().add([])
        self._forget_evicted()
        while self.num_bytes > self.max_bytes and len(self.episodes) > 1:
            capacity, self.capacity = self.capacity, self._num_timesteps - 1
            super().add([])
            self.capacity = capacity
            self._forget_evicted()

    def _forget_evicted(self) -> None:
        self._bytes = {key: size for key, size in self._bytes.items() if key in self.episode_id_to_index}

    def sample_transitions(self, count: int, beta: float, n_step: int = 1) -> ReplaySample:
        """Draws ``count`` transitions in proportion to their priorities; successes more often, where ``success_share`` says so.

        Args:
            count: How many, with replacement.
            beta: Exponent of the importance weights: 0 corrects nothing, 1 fully.
            n_step: Each transition brings the next n - 1 of its episode along, as far as there are any.

        Raises:
            ValueError: The buffer is empty.
        """
        if not self._indices:
            raise ValueError("the replay buffer is empty: collect episodes before sampling")
        shares = self.rng.random(count)
        if (favoured := self._favouring_success()) is not None:
            every, chance = favoured
            ends = np.cumsum(chance)
            picks = np.minimum(np.searchsorted(ends, shares * ends[-1], side="right"), len(every) - 1)
            nodes, chances, rarest = [every[i] for i in picks], chance[picks], chance.min()
        else:
            total = self._sum_segment.sum()
            nodes = [self._sum_segment.find_prefixsum_idx(mass) for mass in shares * total]
            chances = np.array([self._sum_segment[node] for node in nodes]) / total
            rarest = self._min_segment.min() / total
        self.sampled_timesteps += count
        return ReplaySample(
            transitions=[self._transition(self._indices[self._tree_idx_to_sample_idx[node]], n_step) for node in nodes],
            weights=((chances / rarest) ** -beta).astype(np.float32),
            nodes=nodes,
        )

    def _favouring_success(self) -> tuple[list[int], np.ndarray] | None:
        """The nodes that can be drawn and their chances, shape (N,), where ``success_share`` changes these; else None."""
        if not self.success_share:
            return None
        ended_well = {n for n, e in enumerate(self.episodes, self._num_episodes_evicted) if episode_success(e)}
        nodes = [node for *_, node in self._indices]
        chances = self.priorities / self._sum_segment.sum()
        won = np.array([number in ended_well for number, *_ in self._indices], bool)
        share = chances[won].sum()
        if not won.any() or won.all() or share >= self.success_share:
            return None
        chances *= np.where(won, self.success_share / share, (1 - self.success_share) / (1 - share))
        possible = np.flatnonzero(chances)
        return [nodes[i] for i in possible], chances[possible]

    def _transition(self, place: Sequence[int], n_step: int) -> Transition:
        episode_index, t = place[:2]
        episode: SingleAgentEpisode = self.episodes[episode_index - self._num_episodes_evicted]
        # The id is unique while the buffer lives: episodes are numbered in the order in which they came.
        return transition_at(self.env, episode, t, first_id=self._id_of((episode_index, 0)), n_step=n_step)

    def update_priorities_of(self, nodes: Sequence[int], priorities: np.ndarray) -> None:
        """Sets the priorities of sampled transitions, before the exponent α; where one was drawn twice the last counts.

        Raises:
            ValueError: One is not finite or not positive, so that nothing, or nothing else, would ever be drawn.
        """
        if not np.all(np.isfinite(priorities) & (np.asarray(priorities) > 0)):
            raise ValueError(f"priorities must be finite and positive, and they are {np.asarray(priorities)}")
        self._last_sampled_indices = list(nodes)
        super().update_priorities(np.asarray(priorities, np.float64))

    def holds(self, sample: ReplaySample) -> np.ndarray:
        """Which transitions of a sample are still where they were drawn, shape (N,); others may have their nodes by now."""
        found = [self._tree_idx_to_sample_idx.get(node) for node in sample.nodes]
        ids = [None if place is None else self._id_of(self._indices[place]) for place in found]
        return np.array([t.id == own for t, own in zip(sample.transitions, ids, strict=True)], bool)

    @staticmethod
    def _id_of(place: Sequence[int]) -> int:
        episode_index, t = place[:2]
        return episode_index * MAX_EPISODE_LENGTH + t

    @property
    def mean_priority(self) -> float:
        """Mean of p^α over everything kept."""
        return self._sum_segment.sum() / max(len(self._indices), 1)

    @property
    def priorities(self) -> np.ndarray:
        """p^α of everything kept, in no order that means anything; shape (N,)."""
        return np.array([self._sum_segment[node] for *_, node in self._indices], float)

    @property
    def num_evicted(self) -> int:
        """Episodes that were added and are gone: the number of the oldest that is kept."""
        return self._num_episodes_evicted

    @property
    def num_added(self) -> int:
        """Episodes that were added, gone or not."""
        return self._num_episodes_evicted + len(self.episodes)

    @override(PrioritizedEpisodeReplayBuffer)
    def get_state(self) -> dict[str, Any]:
        own = {"bytes": dict(self._bytes), "rng": self.rng.bit_generator.state, "alpha": self.alpha, "capacity": self.capacity}
        return {**super().get_state(), **own, "logs": self.logs}

    @override(PrioritizedEpisodeReplayBuffer)
    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what another buffer held; where that one had another capacity or α, those of this one hold at once."""
        if (state["capacity"], state["alpha"]) == (self.capacity, self.alpha):
            self.episodes.clear()  # RLlib would keep its own where it has any
            super().set_state(copy.deepcopy(state))
        else:
            self._refill(state)
        self._bytes = dict(state["bytes"])
        self.logs = state["logs"]
        self.rng.bit_generator.state = state["rng"]
        self._evict()

    def _refill(self, state: dict[str, Any]) -> None:
        """Adds the episodes of a buffer with another capacity or α, with the priorities that they had there."""
        former = TextReplayBuffer(env=self.env, capacity=state["capacity"], alpha=state["alpha"], max_bytes=self.max_bytes)
        former.set_state(state)
        priorities = np.full(len(former._indices), former._max_priority)
        if former.alpha:  # uniform replay kept none: all are as important as new ones
            priorities = np.array([former._sum_segment[node] for *_, node in former._indices]) ** (1 / former.alpha)
        super().__init__(capacity=self.capacity, alpha=self.alpha or 1e-12)
        self._num_episodes_evicted, self._max_priority = former._num_episodes_evicted, former._max_priority
        self.sampled_timesteps, self._num_timesteps_added = former.sampled_timesteps, 0
        of_step = {(index, t): priority for (index, t, _), priority in zip(former._indices, priorities, strict=True)}
        for episode in former.episodes:
            self._check_room(episode)
            self._add(episode)
        nodes = {node: of_step[index, t] for index, t, node in self._indices}
        self.update_priorities_of(list(nodes), np.array(list(nodes.values())))

    def save(self, folder: Path) -> None:
        """Writes everything into a new folder; episodes that a former call wrote are linked, not written again."""
        folder.mkdir(parents=True)
        episodes, self.episodes = self.episodes, deque()
        state, self.episodes = self.get_state(), episodes
        self._files.write(folder, list(episodes), self._num_episodes_evicted)
        with (folder / STATE_FILE).open("wb") as file:
            pickle.dump({**state, "num_episodes": len(self.episodes)}, file)

    def load(self, folder: Path) -> None:
        """Replaces what the buffer holds by what ``save`` wrote into a folder."""
        with (folder / STATE_FILE).open("rb") as file:
            state = pickle.load(file)
        episodes = self._files.read(folder, state["_num_episodes_evicted"], state["num_episodes"])
        self.set_state({**state, "episodes": episodes})


def transition_at(env: str, episode: SingleAgentEpisode, t: int, first_id: int = 0, n_step: int = 1) -> Transition:
    """Step t of an episode with the dialogue before it.

    Args:
        env: Name of the environment, unless the episode names another that was really played.
        episode: A whole episode of ``TextEnvRunner``.
        t: The step.
        first_id: The id of the episode's first transition.
        n_step: The transition brings the next n - 1 along, as far as there are any.
    """
    last = t == len(episode) - 1
    ahead = range(t + 1, min(t + n_step, len(episode)))
    return Transition(
        id=first_id + t,
        env=environment_of(episode) or env,
        state=messages_at(episode, t),
        action=episode.get_actions(t),
        generation=generation_at(episode, t),
        observation=episode.get_observations(t + 1),
        reward=float(episode.get_rewards(t)),
        terminated=last and episode.is_terminated,
        truncated=last and episode.is_truncated,
        episode_success=episode_success(episode),
        returns_to_go=float(sum(episode.get_rewards(slice(t, None)))),
        next_messages=None if last else messages_at(episode, t + 1),
        following=tuple(transition_at(env, episode, later, first_id) for later in ahead),
        episode=episode.id_,
        turn=t,
        task_seed=known_task_seed(episode),
        action_form=action_form_at(episode, t),
        next_action_form=None if last else action_form_at(episode, t + 1),
    )


def size_of(episode: SingleAgentEpisode) -> int:
    """Bytes of an episode's texts, token ids and log-probabilities. Prompts share their messages and are counted once."""
    text = sum(len(text.encode()) for text in (*episode.get_observations(), *episode.get_actions()))
    generations = generations_of(episode)
    return text + sum(8 * (len(g.prompt_ids) + len(g.token_ids)) + g.logprobs.nbytes for g in generations)
