"""Episodes on disk: each is written once, and a checkpoint takes links to files that exist already."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

EPISODES_PER_FILE = 256


class EpisodeFiles:
    """Keeps the episodes of a replay buffer in files of ``EPISODES_PER_FILE``, beside the buffer in memory.

    An episode's number is its place among all that were ever added; file n holds the numbers from n times
    ``EPISODES_PER_FILE`` on. A full file never changes, so only the last one is written anew for the next checkpoint, and a
    file goes when the last of its episodes is evicted.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rllib_nlac_replay_")
        self._written: dict[int, int] = {}  # file number -> the first episode number that it does not hold

    def write(self, target: Path, episodes: Sequence[SingleAgentEpisode], first: int) -> None:
        """Puts all episodes into a folder.

        Args:
            target: The folder, which exists.
            episodes: What the buffer holds now, the oldest first.
            first: The number of the oldest.
        """
        end = first + len(episodes)
        wanted = range(first // EPISODES_PER_FILE, -(-end // EPISODES_PER_FILE))
        for number in [number for number in self._written if number not in wanted]:
            self._path(number).unlink()
            del self._written[number]
        for number in wanted:
            begin, stop = number * EPISODES_PER_FILE, min((number + 1) * EPISODES_PER_FILE, end)
            if self._written.get(number, 0) < stop:
                held = episodes[max(begin, first) - first : stop - first]
                # Under another name first: a link in a former checkpoint keeps the former content.
                fresh = self._path(number).with_suffix(".new")
                with fresh.open("wb") as file:
                    pickle.dump((max(begin, first), [episode.get_state() for episode in held]), file)
                fresh.replace(self._path(number))
                self._written[number] = stop
            _link(self._path(number), target / self._path(number).name)

    def read(self, source: Path, first: int, count: int) -> list[dict[str, Any]]:
        """Takes over a folder that ``write`` filled and returns the episodes' states.

        Args:
            source: The folder.
            first: The number of the oldest episode wanted.
            count: How many.
        """
        self._folder.cleanup()
        self._folder, self._written = tempfile.TemporaryDirectory(prefix="rllib_nlac_replay_"), {}
        episodes: list[dict[str, Any]] = []
        for number in range(first // EPISODES_PER_FILE, -(-(first + count) // EPISODES_PER_FILE)):
            _link(source / self._path(number).name, self._path(number))
            with self._path(number).open("rb") as file:
                begin, states = pickle.load(file)
            self._written[number] = begin + len(states)
            episodes += states[max(first - begin, 0) :]
        return episodes

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / f"episodes_{number:08d}.pkl"


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
