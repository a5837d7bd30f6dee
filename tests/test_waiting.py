"""What a person reads while a command works: at once, in order, in one line where that can be, and never at a run's cost."""

from __future__ import annotations

import io
import logging
import time

import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.activity import ANSWERS, EPISODES, Activity, Doing, activity, read_from_ray
from rllib_nlac.command import run
from rllib_nlac.command.terminal import QUIET_S, Terminal, VisibleHandler, Waiting
from rllib_nlac.diagnostics.metrics import SECONDS, timed

HOSTILE = "\x1b]0;owned\x07 [bold]x[/bold]\r\nnext"


class Screen(io.StringIO):
    """A standard output with a person before it."""

    def isatty(self) -> bool:
        return True

    def terminal(self) -> Terminal:
        made = Terminal()
        made._console.file = self  # pytest puts its own standard output in place of a fixture's
        return made

    @property
    def last(self) -> str:
        """The line that stands there now."""
        return self.getvalue().rsplit("\x1b[2K", 1)[1].strip("\r")


@pytest.fixture()
def screen(monkeypatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return Screen()


class TestActivity:
    def test_a_stage_within_another_ends_where_it_was(self):
        now = Activity()
        now.turn_to("training", iteration=3)
        with now.stage("playing", 4, EPISODES):
            now.advance(EPISODES)
            now.advance(ANSWERS)  # counted by nobody here
            assert str(now.now) == "iteration 3: playing, 1 of 4 episodes"
            with pytest.raises(LookupError), now.stage("wave 1"):
                raise LookupError
            assert now.now.done == 1
        assert str(now.now) == "iteration 3: training"

    def test_what_fills_a_folder_is_measured_until_it_ends(self, tmp_path, monkeypatch):
        monkeypatch.setattr("rllib_nlac.activity.INTERVAL_S", 0.01)
        now = Activity()
        with now.stage("fetching"):
            with now.filling("writing", tmp_path, 3_000_000):
                (tmp_path / "part").write_bytes(bytes(2_000_000))
                deadline = time.monotonic() + 30
                while not now.now.done and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert str(now.now) == "writing, 2 of 3 MB"
            assert str(now.now) == "fetching"

    def test_what_changes_is_sent_and_what_cannot_be_ends_nothing(self, monkeypatch):
        monkeypatch.setattr("rllib_nlac.activity.INTERVAL_S", 0.01)
        sent: list[Doing] = []

        def send(doing: Doing) -> None:
            sent.append(doing)
            if doing.stage == "broken":
                raise ConnectionError

        now = Activity()
        now.turn_to("zero")
        now.publish(send)
        assert now.now.stage == "zero"  # and goes on
        for name in ("one", "broken", "three"):
            now.turn_to(name)
            deadline = time.monotonic() + 10
            while name != "three" and sent[-1:] != [now.now] and time.monotonic() < deadline:
                time.sleep(0.01)
        time.sleep(0.1)
        assert [doing.stage for doing in sent if doing.stage != "zero"] == ["one", "broken"]
        now.withdraw()
        assert now.now == Doing()  # what follows in this process is not the last iteration of a run that has ended

    def test_without_ray_nothing_is_read(self):
        assert read_from_ray("no such trial") is None

    def test_the_cost_is_far_below_one_percent_of_an_iteration(self):
        """An iteration of the quick start has some two thousand answers and takes five seconds."""
        started = time.process_time()
        with activity.stage("wave 1", 2000, ANSWERS):
            for _ in range(2000):
                activity.advance(ANSWERS)
        assert time.process_time() - started < 0.05


class TestTerminal:
    def test_one_line_is_rewritten_below_what_is_said(self, screen):
        terminal = screen.terminal()
        terminal.status("playing, 1 of 2")
        terminal.status("playing, 2 of 2")
        terminal.say("a row")
        assert screen.last == "playing, 2 of 2" and "a row\n" in screen.getvalue()
        assert screen.getvalue().count("\n") == 1
        terminal.status("")
        assert screen.last == ""

    @pytest.mark.parametrize("columns", ["1", "2", "20", "60"])
    def test_a_narrow_terminal_and_hostile_text(self, screen, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", columns)
        screen.terminal().status(HOSTILE + "日本" * 40)
        written = screen.getvalue().replace("\x1b[2K", "").replace("\r", "")
        assert "\x1b" not in written and "\x07" not in written and "\n" not in written
        assert len(written) < int(columns)

    def test_a_pipe_reads_news_at_once_and_the_rest_after_ten_seconds(self, capsys):
        terminal = Terminal()
        terminal.status("starting Ray ...", is_news=True)
        terminal.status("playing")
        assert capsys.readouterr().out == "starting Ray ...\n"
        terminal._printed -= QUIET_S + 1
        for _ in range(3):
            terminal.status("playing")
        assert capsys.readouterr().out == "playing\n"

    def test_beside_workers_that_print_nothing_is_rewritten(self, screen):
        terminal = screen.terminal()
        terminal.may_rewrite = False
        terminal.status("starting Ray ...", is_news=True)
        assert "\x1b[2K" not in screen.getvalue()

    def test_what_is_logged_stands_above_the_line(self, screen):
        terminal = screen.terminal()
        terminal.status("playing")
        handler = VisibleHandler(terminal)
        handler.setStream(screen)
        handler.handle(logging.LogRecord("rllib_nlac", logging.WARNING, "", 1, HOSTILE, (), None))
        assert screen.last == "playing" and "\x1b[2K\r\\x1b]0;owned" in screen.getvalue()


class TestWaiting:
    def test_says_what_a_trial_does(self, screen, monkeypatch):
        said: dict[str, Doing | None] = {"a": None}
        monkeypatch.setattr("rllib_nlac.command.terminal.read_from_ray", lambda trial: said.get(trial))
        waiting = Waiting(screen.terminal())
        waiting.turn_to("starting Ray")
        assert screen.last == "starting Ray ..."
        waiting.turn_to("")
        waiting.watch({"a": "00000"})
        waiting._show()
        assert screen.last == "loading the libraries in the trial's process ..."
        said["a"] = Doing("playing", 2, 3, 32, EPISODES)
        waiting._show()
        assert screen.last == "╸......... iteration 2: playing, 3 of 32 episodes ..."
        waiting.watch({})
        waiting._show()
        assert screen.last == ""

    def test_several_trials_share_the_line_and_those_that_wait_are_not_in_it(self, screen, monkeypatch):
        said = {"a": Doing("playing", 2), "b": Doing("learning", 1), "c": None}
        monkeypatch.setattr("rllib_nlac.command.terminal.read_from_ray", lambda trial: said[trial])
        waiting = Waiting(screen.terminal())
        waiting.watch({"a": "00000", "b": "00001", "c": "00002"})
        waiting._show()
        assert screen.last == "00000 iteration 2: playing ... | 00001 iteration 1: learning"[:59].rstrip()

    def test_a_sweep_has_the_bar_and_its_trials_have_none(self, screen, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr("rllib_nlac.command.terminal.read_from_ray", lambda trial: Doing("playing", 1, 2, 4, EPISODES))
        waiting = Waiting(screen.terminal())
        waiting.watch({"a": "00000"}, Doing("sweep", 0, 2, 4, "trials"))
        waiting._show()
        assert screen.last == "━━━━━..... sweep, 2 of 4 trials ... | 00000 iteration 1: playing, 2 of 4 episodes ..."

    def test_a_pipe_reads_each_stage_of_the_start_once(self, capsys, monkeypatch):
        said = [Doing("evaluating", 0, 2, 9), Doing("evaluating", 0, 1, 9, EPISODES), Doing("starting the engine")]
        said += [Doing("loading the model")] * 2
        monkeypatch.setattr("rllib_nlac.command.terminal.read_from_ray", lambda trial: said.pop())
        waiting = Waiting(Terminal())
        waiting.watch({"a": "00000"})
        for _ in range(5):
            waiting._show()
        lines = ["loading the model ...", "starting the engine ...", "evaluating, 1 of 9 episodes ..."]
        assert capsys.readouterr().out.splitlines() == lines

    def test_what_is_counted_has_a_bar_a_rate_and_the_time_left(self, screen, monkeypatch):
        """Ten episodes, one a second: after four, 1/s and six seconds. Fails where the rate counts from another stage."""
        waiting, now = Waiting(screen.terminal()), [100.0]
        monkeypatch.setattr(waiting._progress, "get_time", lambda: now[0])
        monkeypatch.setattr("rllib_nlac.command.terminal.time.monotonic", lambda: now[0])
        waiting.turn_to("loading")
        now[0] += 50
        with activity.stage("playing", 10, EPISODES):
            for _ in range(4):
                waiting._show()
                activity.advance(EPISODES)
                now[0] += 1
            waiting._show()
        assert screen.last == "━━━━...... playing, 4 of 10 episodes ... (4 s, 1/s, 00:06 left)"[:59]

    def test_a_pipe_reads_the_same_without_the_bar(self, capsys, monkeypatch):
        monkeypatch.setattr("rllib_nlac.command.terminal.QUIET_S", -1.0)
        waiting, now = Waiting(Terminal()), [100.0]
        monkeypatch.setattr(waiting._progress, "get_time", lambda: now[0])
        with activity.stage("playing", 10, EPISODES):
            for _ in range(3):
                waiting._show()
                activity.advance(EPISODES)
                now[0] += 1
            waiting._show()
        assert capsys.readouterr().out.splitlines()[-1] == "playing, 3 of 10 episodes ... (1/s, 00:07 left)"

    def test_a_terminal_without_the_characters_of_a_bar_has_another(self, screen, monkeypatch):
        monkeypatch.setattr(Screen, "encoding", "ascii")
        waiting = Waiting(screen.terminal())
        with activity.stage("playing", 4, EPISODES):
            activity.advance(EPISODES, 2)
            waiting._show()
        assert screen.last == "-----..... playing, 2 of 4 episodes ..."

    def test_an_error_in_it_ends_nothing(self, monkeypatch):
        monkeypatch.setattr("rllib_nlac.command.terminal.INTERVAL_S", 0.01)
        monkeypatch.setattr(Waiting, "_show", lambda self: 1 / 0)
        with Waiting(Terminal()) as waiting:
            time.sleep(0.1)
            assert not waiting._thread.is_alive()


def test_of_rays_authentication_only_what_is_wrong_is_said():
    def said(text: str) -> bool:
        return run._is_news(logging.LogRecord(run.AUTHENTICATION, logging.WARNING, "", 1, text, (), None))

    from ray._private.authentication import authentication_token_setup

    texts: list[str] = []
    logger = authentication_token_setup.logger
    assert logger.name == run.AUTHENTICATION
    keep = logging.Handler()
    keep.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)  # Ray raises it once it runs
    logger.addHandler(keep)
    authentication_token_setup._warn_token_auth_enabled()
    authentication_token_setup._warn_token_auth_disabled()
    logger.removeHandler(keep)
    logger.setLevel(level)
    assert [said(text) for text in texts][-1] and not any(said(text) for text in texts[:-1])


def test_the_seconds_of_an_iteration_are_its_own():
    metrics = MetricsLogger(root=True)
    for _ in range(2):  # twice in one iteration
        with timed(metrics, "play", "playing"):
            time.sleep(0.05)
    first = metrics.reduce()[SECONDS]["play"]
    with timed(metrics, "play", "playing"):
        pass
    second = metrics.reduce()[SECONDS]["play"]
    assert float(first) >= 0.1 and float(second) < 0.05
