"""MiniWoB++'s web pages as an environment of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv, check_number
from rllib_nlac.envs.miniwob import pages
from rllib_nlac.envs.miniwob.actions import DESCRIPTION, Action, Malformed, parse
from rllib_nlac.envs.miniwob.browser import BrowserGone, Programs, Window
from rllib_nlac.envs.miniwob.experts import EXPERTS
from rllib_nlac.envs.miniwob.page import Page, act, begin
from rllib_nlac.envs.miniwob.pool import pool_of
from rllib_nlac.envs.miniwob.tasks import tasks_of
from rllib_nlac.names import unknown_key

NUM_SEEDS = 500_000  # of each split
ATTEMPTS = 3  # to begin an episode, while browsers die


@dataclass(frozen=True)
class PageTask:
    """A page, and the seed of what is on it: even ones are training's, odd ones evaluation's."""

    name: str
    seed: int


class MiniWoB(TextEnv[PageTask]):
    """Doing things on web pages, in a real browser: clicking, filling in forms, searching, reading mail.

    Observations are the instruction and the page as text, in which what can be acted on has a number; actions are
    ``click(3)``, ``type(1, "Nathalie")``, ``select(6, "Kassi")``, ``press(Enter)`` and ``scroll(down)``. What cannot be done is
    answered in words. The reward is the page's own, from -1 to 1, at the end, and does not shrink with time: a page's clock
    stands still while an agent thinks. 1 is a success.

    The environments of a process share its browsers, each with a window of its own. A browser that dies, or is killed because a
    page hangs, loses its episodes: they are left out and counted (``stop_reason_browser_lost``, ``stop_reason_page_timeout``),
    and in training others are played. Pickled in mid-episode, an environment plays its actions again.

    Args:
        tasks: Names of tasks and groups, such as ``[click, login-user]``; None is all.
        num_browsers: Number of browsers of this process. One has at most 16 windows; more environments start more browsers.
        page_timeout_s: How long a page may take to answer.
        max_turns: Actions per episode.
        split: "train" or "eval": what is on their pages is drawn from seeds of their own.
        browser: Path of Chromium or Chrome; None looks for it.
        driver: Path of its ChromeDriver; None looks for it.

    Raises:
        ValueError: An argument is out of range, or something is not installed: the text says what and how.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {
        "tasks": {
            "anyOf": [{"type": "string", "maxLength": 40}, {"type": "array", "items": {"type": "string"}, "maxItems": 100}]
        },
        "max_turns": MAX_TURNS,
        "split": SPLIT,
    }

    def __init__(
        self,
        tasks: str | Sequence[str] | None = None,
        num_browsers: int = 1,
        page_timeout_s: float = 20.0,
        max_turns: int = 25,
        split: str = "train",
        browser: str | None = None,
        driver: str | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; MiniWoB knows 'train' and 'eval'")
        check_number("num_browsers", num_browsers, 1, whole=True)
        check_number("page_timeout_s", page_timeout_s, 0.1)
        self.tasks, self.num_browsers = tasks_of(tasks), num_browsers
        self._programs = Programs.found(browser, driver, page_timeout_s)
        self._html = pages.folder()
        self._window: Window | None = None
        self._page = Page("")
        self._done: list[Action] = []  # the actions of this episode

    @property
    def system_prompt(self) -> str:
        return "You use web pages. What can be acted on has a number in brackets. Take one action a turn. " + DESCRIPTION

    def sample_task(self, spec: str | None) -> TaskId[PageTask]:
        if spec is None:
            name = self.tasks[int(self.np_random.integers(len(self.tasks)))]
            seed = 2 * int(self.np_random.integers(NUM_SEEDS)) + (self.split == "eval")
            return TaskId(f"{name}/{seed}", PageTask(name, seed))
        match = re.fullmatch(r"([a-z0-9-]{1,60})/(\d{1,7})", spec)
        if match is None:
            raise ValueError(f"no task is called {spec!r:.80}; tasks are called as in '{self.tasks[0]}/3'")
        if match[1] not in self.tasks:
            raise ValueError(f"task {spec!r:.80}: {unknown_key(match[1], self.tasks, 'task')}")
        return TaskId(spec, PageTask(match[1], int(match[2])))

    def begin(self, task: PageTask) -> str:
        self._done = []
        self._page = self._load(task)
        return self._text()

    def reply(self, task: PageTask, action: str) -> Reply:
        try:
            parsed = parse(action)
        except Malformed as error:
            return Reply(self._text(str(error)))
        self._resume(task)
        assert self._window is not None
        self._done.append(parsed)
        complaint, self._page = act(self._window, parsed)
        if not self._page.done:
            return Reply(self._text(complaint))
        success = self._page.reward >= 1.0
        return Reply("The task is done." if success else "That was wrong.", self._page.reward, success)

    def expert_action(self) -> str:
        """What a script would do that reads the same page and knows nothing else."""
        assert self._current is not None
        return str(EXPERTS[self._current.task.name](self._page, self._done))

    def _text(self, complaint: str | None = None) -> str:
        return "\n".join(filter(None, (complaint, f"Task: {self._page.instruction}", self._page.text())))

    def _load(self, task: PageTask) -> Page:
        """Begins the episode, in another browser where this one is gone.

        Raises:
            BrowserGone: Several died on the way.
        """
        for attempt in range(ATTEMPTS):
            try:
                if self._window is None or self._window.browser.is_dead:
                    self._window = pool_of(self._programs, self.num_browsers).lend(self)
                return begin(self._window, self._html, task.name, task.seed)
            except BrowserGone:
                self._window = None
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _resume(self, task: PageTask) -> None:
        """Plays the episode again where it came here by pickling, without its window."""
        if self._window is None:
            self._page = self._load(task)
            for action in self._done:
                assert self._window is not None
                _, self._page = act(self._window, action)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_window": None}

    def close(self) -> None:
        """Gives the window back; the browser stays for others, for a while."""
        if self._window is not None:
            pool_of(self._programs, self.num_browsers).give_back(self._window)
            self._window = None
