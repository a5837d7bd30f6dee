"""The loop of an EnvRunner: which slot plays which episode when. The player knows what an episode is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.activity import EPISODES, activity
from rllib_nlac.sampling.env_threads import EnvThreads, Job
from rllib_nlac.sampling.player import TextPlayer
from rllib_nlac.sampling.slot import Outcome, Played, Slot, Start
from rllib_nlac.types import Generation

LOOK_S = 0.005  # between two looks at what the environments' threads have finished


class Rollout:
    """Plays episodes on slots until as many are begun, or as many steps made, as wanted.

    Args:
        player: Makes episodes of what engine and environments say.
        slots: The environments.
        next_start: Says how the next episode begins.
        num_episodes: How many; None counts steps.
        num_timesteps: Steps after which no further episode begins, where ``num_episodes`` is None.
        replace_lost: Whether another episode is played for one that a failing environment lost.
        threads: Step environments side by side, or with a limit of time; None steps them here, one after the other.
    """

    def __init__(
        self,
        player: TextPlayer,
        slots: Sequence[Slot],
        next_start: Callable[[], Start],
        num_episodes: int | None,
        num_timesteps: int,
        replace_lost: bool,
        threads: EnvThreads | None,
    ) -> None:
        self._player, self._slots, self._next_start = player, slots, next_start
        self._num_episodes, self._num_timesteps, self._replace_lost = num_episodes, num_timesteps, replace_lost
        self._threads = threads
        self._begun = self._steps = 0
        self._done: list[SingleAgentEpisode] = []
        self._ready: list[Slot] = []  # to be asked for a turn
        self._waiting: dict[int, Slot] = {}  # for the engine, by ticket
        self._busy: dict[Job, tuple[Slot, Start | Generation]] = {}  # environments that threads work on

    def run(self) -> list[SingleAgentEpisode]:
        """All episodes, whole, in the order of their ids."""
        try:
            for slot in self._slots:
                self._begin(slot)
            self._ask()
            while self._waiting or self._busy:
                # An environment that is ready while others' turns are being sampled joins them at once.
                patience = LOOK_S if self._busy else None
                answers = self._player.answers(patience) if self._waiting else ()
                played = [self._act(self._waiting.pop(ticket), generation) for ticket, generation in answers]
                self._record([step for step in played if step is not None] + self._settled())
                self._ask()
        except BaseException:  # Ctrl-C too: whatever uses the engine next finds it idle
            self._player.withdraw()
            raise
        return sorted(self._done, key=lambda episode: episode.id_)

    def _begin(self, slot: Slot) -> None:
        """Begins the next episode in a slot, and further ones while those are over before the policy speaks."""
        while self._is_wanted():
            self._begun += 1
            start = self._next_start()
            if self._threads is not None:
                self._busy[self._threads.submit(slot.reset, start)] = (slot, start)
                return
            if self._open(slot, start, slot.reset(start)):
                return

    def _is_wanted(self) -> bool:
        if self._num_episodes is not None:
            return self._begun < self._num_episodes
        return self._steps < self._num_timesteps

    def _open(self, slot: Slot, start: Start, outcome: Outcome) -> bool:
        """Whether the policy speaks next in this slot."""
        if self._player.begin(slot, start, outcome):
            self._ready.append(slot)
            return True
        self._close(slot)
        return False

    def _ask(self) -> None:
        """What is ready goes to the engine together, before its next step."""
        if self._ready:
            self._waiting.update(zip(self._player.ask(self._ready), self._ready, strict=True))
            self._ready = []

    def _act(self, slot: Slot, generation: Generation) -> Played | None:
        """Steps an environment; None where a thread does."""
        action = self._player.action(slot, generation)
        if self._threads is None:
            return Played(slot, generation, slot.step(action))
        self._busy[self._threads.submit(slot.step, action)] = (slot, generation)
        return None

    def _settled(self) -> list[Played]:
        """Takes the steps that threads have finished; waits for one only if the engine has no prompts."""
        if not self._busy:
            return []
        assert self._threads is not None  # they are busy
        played: list[Played] = []
        for job in self._threads.finished(self._busy, wait=not self._waiting):
            slot, what = self._busy.pop(job)
            assert job.outcome is not None
            if isinstance(what, Generation):
                played.append(Played(slot, what, job.outcome))
            elif not self._open(slot, what, job.outcome):
                self._begin(slot)
        return played

    def _record(self, played: Sequence[Played]) -> None:
        for (slot, _, _), goes_on in zip(played, self._player.record(played), strict=True):
            self._steps += 1
            if goes_on:
                self._ready.append(slot)
            else:
                self._close(slot)
                self._begin(slot)

    def _close(self, slot: Slot) -> None:
        """Ends an episode; a lost one is replaced by another."""
        if slot.episode is not None:
            self._done.append(slot.episode)
            activity.advance(EPISODES)
        elif self._replace_lost:
            self._begun -= 1
