"""Episodes on disk: each is written once, and a checkpoint takes links to files that exist already."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.checkpoints.manifest import checksum
from rllib_nlac.checkpoints.scratch import ScratchFolder

EPISODES_PER_FILE = 256
PREFIX = "rllib_nlac_replay_"


class EpisodeFiles:
    """Keeps the episodes of a replay buffer in files of ``EPISODES_PER_FILE``, beside the buffer in memory.

    Checkpoints share files by links, so a file that is damaged in one would be damaged in all later ones, with checksums that
    vouch for it: what is linked is compared with what was written, and written anew where it differs.

    An episode's number is its place among all that were ever added; file n holds the numbers from n times
    ``EPISODES_PER_FILE`` on. A full file never changes, so only the last one is written anew for the next checkpoint, and a
    file goes when the last of its episodes is evicted.
    """

    def __init__(self) -> None:
        self._folder = ScratchFolder(PREFIX)
        # File number -> the first episode number that it does not hold, and the checksum of its content.
        self._written: dict[int, tuple[int, str]] = {}

    def write(self, target: Path, episodes: Sequence[SingleAgentEpisode], first: int) -> None:
        """Puts all episodes into a folder.

        Args:
            target: The folder, which exists.
            episodes: What the buffer holds now, the oldest first.
            first: The number of the oldest.
        """
        self._folder.path.mkdir(exist_ok=True)  # where something tidies up the temporary folder
        end = first + len(episodes)
        wanted = range(first // EPISODES_PER_FILE, -(-end // EPISODES_PER_FILE))
        for number in [number for number in self._written if number not in wanted]:
            self._path(number).unlink(missing_ok=True)
            del self._written[number]
        for number in wanted:
            begin, stop = number * EPISODES_PER_FILE, min((number + 1) * EPISODES_PER_FILE, end)
            written, sha256 = self._written.get(number, (0, ""))
            if written < stop or not self._path(number).is_file() or checksum(self._path(number)) != sha256:
                held = episodes[max(begin, first) - first : stop - first]
                # Under another name first: a link in a former checkpoint keeps the former content.
                fresh = self._path(number).with_suffix(".new")
                with fresh.open("wb") as file:
                    pickle.dump((max(begin, first), [episode.get_state() for episode in held]), file)
                fresh.replace(self._path(number))
                self._written[number] = stop, checksum(self._path(number))
            _link(self._path(number), target / self._path(number).name)

    def read(self, source: Path, first: int, count: int) -> list[dict[str, Any]]:
        """Takes over a folder that ``write`` filled and returns the episodes' states.

        Args:
            source: The folder.
            first: The number of the oldest episode wanted.
            count: How many.
        """
        self._folder.remove()
        self._folder, self._written = ScratchFolder(PREFIX), {}
        episodes: list[dict[str, Any]] = []
        for number in range(first // EPISODES_PER_FILE, -(-(first + count) // EPISODES_PER_FILE)):
            path = source / self._path(number).name
            sha256 = checksum(path)
            with path.open("rb") as file:
                begin, states = pickle.load(file)
            _link(path, self._path(number))
            self._written[number] = begin + len(states), sha256
            episodes += states[max(first - begin, 0) :]
        return episodes

    def _path(self, number: int) -> Path:
        return self._folder.path / f"episodes_{number:08d}.pkl"


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
