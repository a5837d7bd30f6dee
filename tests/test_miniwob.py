"""Web pages in a real browser: what is said of them, what can be done, and that nothing of a browser is ever left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import psutil
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from benchmarks.browser import main_process
from rllib_nlac.envs import contract, registry
from rllib_nlac.envs.miniwob import browser, pages, pool
from rllib_nlac.envs.miniwob import env as miniwob
from rllib_nlac.envs.miniwob.actions import KEYS, Action, Malformed, parse
from rllib_nlac.envs.miniwob.env import MiniWoB
from rllib_nlac.envs.miniwob.experts import EXPERTS
from rllib_nlac.envs.miniwob.page import Item
from rllib_nlac.envs.miniwob.tasks import GROUPS, TASKS, tasks_of
from rllib_nlac.sampling.env_runner import TextEnvRunner

refs, texts = st.integers(0, 999_999), st.text(max_size=80)
actions = st.one_of(
    st.builds(lambda ref: Action("click", ref), refs),
    st.builds(lambda ref, text: Action("type", ref, (text,)), refs, texts),
    st.builds(lambda ref, chosen: Action("select", ref, tuple(chosen)), refs, st.lists(texts, min_size=1, max_size=3)),
    st.sampled_from([Action("press", None, (key,)) for key in KEYS]),
    st.builds(lambda ref, way: Action("scroll", ref, (way,)), st.none() | refs, st.sampled_from(["up", "down"])),
)


class TestWithoutABrowser:
    @given(actions)
    def test_what_is_said_is_what_is_read(self, action):
        assert parse(str(action)) == action

    @pytest.mark.parametrize(
        ("said", "meant"),
        [
            ("click(3)", Action("click", 3)),
            (" `Click([3])`. ", Action("click", 3)),
            ("type(1, 'it''s')", None),
            ("type(1, 'it is')", Action("type", 1, ("it is",))),
            (r'type(1, "say \"a, b\"")', Action("type", 1, ('say "a, b"',))),
            ("type(1, Nathalie)", Action("type", 1, ("Nathalie",))),
            ("press('enter')", Action("press", None, ("Enter",))),
            ("scroll(down)", Action("scroll", None, ("down",))),
            ("click(3) click(4)", None),
            ("click(three)", None),
            ("click(3,)", None),
            ("click()", None),
            ("click(3, 4)", None),
            ("drag(1, 2)", None),
            ("press(F13)", None),
            ("scroll(sideways)", None),
            ('type(1, "never closed)', None),
            ("I click on 3.", None),
            ("", None),
            ("click(3)" + " " * 5000, None),
        ],
    )
    def test_actions(self, said, meant):
        if meant is not None:
            assert parse(said) == meant
        else:
            with pytest.raises(Malformed, match=r"no action|reads as in|takes one key"):
                parse(said)

    @given(st.text(max_size=300))
    def test_no_text_crashes_the_parser(self, text):
        with contextlib.suppress(Malformed):
            parse(text)

    def test_tasks_by_name_or_group(self):
        assert tasks_of(None) == TASKS and len(TASKS) == len(set(TASKS)) == 44
        assert tasks_of(["login-user", "choose", "choose-list"]) == ("login-user", *GROUPS["choose"])
        assert tasks_of("click-test") == ("click-test",)
        assert set(EXPERTS) == set(TASKS)
        for names, complaint in (
            ("login-usr", "did you mean 'login-user'"),
            (["brows"], "did you mean 'browse'"),
            ([], "is empty"),
        ):
            with pytest.raises(ValueError, match=complaint):
                tasks_of(names)

    def test_items_as_text(self):
        assert str(Item("Lorem")) == "Lorem"
        assert str(Item("Submit", "button", 2, states=("disabled",))) == '[2] button "Submit" (disabled)'
        assert str(Item("", "text", 1, value="")) == '[1] text = ""'
        assert str(Item("", "select", 3, "b", ("a", "b"), True)) == '[3] select any of "a", "b" = "b"'

    def test_what_is_missing_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(browser, "find_spec", lambda name: object())
        with pytest.raises(ValueError, match="needs the browser Chromium: apt-get install chromium chromium-driver"):
            registry.make("MiniWoB")
        (tmp_path / "chromium").touch(mode=0o755)
        with pytest.raises(ValueError, match="chromedriver: apt-get install chromium chromium-driver"):
            registry.make("MiniWoB")
        with pytest.raises(ValueError, match=r"env_config\.driver is '/no/driver', and there is no such program"):
            registry.make("MiniWoB", {"driver": "/no/driver"})
        (tmp_path / "chromedriver").touch(mode=0o755)
        monkeypatch.setattr(pages, "find_spec", lambda name: None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(pages.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 1, "", "no network\n"))
        with pytest.raises(ValueError, match=r"could not be fetched \(no network\): pip install --no-deps miniwob==1.1.0"):
            registry.make("MiniWoB")
        monkeypatch.setattr(browser, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"needs the package selenium: pip install 'rllib_nlac\[web\]'"):
            registry.make("MiniWoB")

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("does", "complaint"),
        [
            ("echo So; echo no libnss3.so >&2; exit 127", r"ended at once \(try '.*/driver --version'; .*\): no libnss3.so$"),
            ("exit 1", r"ended at once .*chromium-driver\): it said nothing$"),
            ("exec sleep 60", "did not say within 1 s on which port it listens"),
        ],
    )
    def test_a_driver_that_does_not_start_says_why(self, does, complaint, tmp_path, monkeypatch):
        (tmp_path / "driver").write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "driver").chmod(0o755)
        monkeypatch.setattr(browser, "START_S", 1.0 if "sleep" in does else 60.0)
        with pytest.raises(browser.BrowserGone, match=complaint):
            browser.Browser(browser.Programs("/usr/bin/chromium", str(tmp_path / "driver"), 5.0))

    def test_arguments(self):
        for config, complaint in (
            ({"split": "test"}, "'train' and 'eval'"),
            ({"num_browsers": 0}, "at least 1"),
            ({"page_timeout_s": 0}, "at least 0.1"),
            ({"page_timeout_s": "20 s"}, "is '20 s' and must be a finite number"),
        ):
            with pytest.raises(ValueError, match=complaint):
                registry.make("MiniWoB", config)


@pytest.fixture(scope="module")
def chromium():
    """One browser for all tests of this file that need one; after them nothing of it is left."""
    try:
        browser.Programs.found(None, None, 60.0)
        html = pages.folder()
    except ValueError as error:
        pytest.skip(str(error))
    assert (html / "miniwob" / "click-test.html").is_file()

    def make(*tasks: str, **config) -> MiniWoB:
        return MiniWoB(**{"tasks": list(tasks) or None, "page_timeout_s": 60.0, **config})

    yield make
    started = [each for kept in pool._pools.values() for each in kept.browsers()]
    processes = [child for each in started for child in psutil.Process(each.process).children(recursive=True)]
    pool.close_all()
    assert not psutil.wait_procs(processes, timeout=20)[1]


def play(env: MiniWoB, task: str) -> dict:
    env.reset(options={"task_id": task})
    for _ in range(env.max_turns):
        _, reward, terminated, truncated, info = env.step(env.expert_action())
        if terminated or truncated:
            assert (reward == 1.0) == info["success"]
            return info
    raise AssertionError


def test_every_task_can_be_done(chromium):
    env = chromium()
    failed = [task for task in TASKS if not play(env, f"{task}/{100 + len(task)}")["success"]]
    env.close()
    assert not failed


def test_the_contract(chromium):
    make = lambda: chromium("login-user", "click-checkboxes", "read-table", max_turns=8)  # noqa: E731
    findings = list(contract.check_environment(make, seeds=range(3)))
    assert len(findings) == 14 and [f for f in findings if f.verdict == "FAILED"] == []
    assert {f.check for f in findings if f.verdict == "note"} <= {"an episode takes less than 50 ms"}


def test_a_page_is_text_with_references(chromium):
    env = chromium("login-user", "click-tab")
    text, info = env.reset(options={"task_id": "login-user/4"})
    _, name, _, password, _ = text.split("\n")[0].split('"')
    assert text.split("\n") == [
        f'Task: Enter the username "{name}" and the password "{password}" into the text fields and press login.',
        'Username [1] text = ""',
        'Password [2] password = ""',
        '[3] button "Login"',
    ]
    assert info["split"] == "train" and "click(3)" in info["system_prompt"]
    assert f'[1] text = "{name}" (focused)' in env.step(f'type(1, "{name}")')[0]
    assert '[1] text = "O\'Neil \\"é😀\\"" (focused)'.replace("\\", "") in env.step('type(1, "O\'Neil \\"é😀\\"")')[0]
    assert '[1] text = "" (focused)' in env.step('type(1, "")')[0]
    text, reward, terminated, _, info = env.step("click(3)")
    assert (text, reward, terminated, info["success"]) == ("That was wrong.", -1.0, True, False)
    assert '[1] link "Tab #1"' in env.reset(options={"task_id": "click-tab/4"})[0]


def test_what_a_person_sees_of_an_items_state_is_in_the_text(chromium):
    """Fails where only classes of the item itself count, or only whole names of classes."""
    env = chromium("search-engine", "choose-date", "book-flight", "social-media-some", "use-autocomplete")

    def after(task: str, *actions: str) -> str:
        text, _ = env.reset(options={"task_id": task})
        for action in actions:
            name = re.search("<(.+)>", action)
            ref = re.search(rf"\[(\d+)\] [a-z \"]*{name[1]}", text) if name else None
            text = env.step(f"click({ref[1]})" if ref else action)[0]
        return text

    text = after("search-engine/2", 'type(1, "x")', "<Search>")
    assert re.findall(r'"(\d)" \(active\)', text) == ["1"]
    assert re.findall(r'"(\d)" \(active\)', after("search-engine/2", 'type(1, "x")', "<Search>", "<2>")) == ["2"]
    assert re.findall(r"(\w+) \(disabled\)", after("choose-date/2", "click(1)")) == ["Next"]
    assert after("choose-date/2", "click(1)", "<Next>").startswith("[4] is disabled.")
    assert re.findall(r'"(\d+)" \(highlight, active\)', after("choose-date/2", "click(1)", "<15>", "click(1)")) == ["15"]
    assert after("book-flight/2", "<Search>").count('= "" (error)') == 3
    assert after("social-media-some/2", "<like>").count("like (active)") == 1
    assert after("use-autocomplete/116", 'type(1, "Tur")', "press(ArrowDown)").split("\n")[2].endswith(" (active)")


def test_what_cannot_be_done_is_answered_in_words(chromium):
    env = chromium("search-engine", "enter-date", "choose-list")
    env.reset(options={"task_id": "enter-date/2"})
    for action, complaint in (
        ("click(99)", "There is no [99] on this page."),
        ('type(1, "12/31/2016")', '[1] takes a date as in "2016-12-31".'),
        ('type(2, "x")', "Nothing can be typed into [2]."),
        ('select(1, "x")', "[1] has no options."),
        ("press(Escape)", "Task: "),
        ("scroll(up)", "Task: "),
        ("nonsense", "That is no action."),
    ):
        text, reward, terminated, truncated, _ = env.step(action)
        assert text.startswith(complaint) and "Task: Enter" in text and (reward, terminated, truncated) == (0.0, False, False)
    env.reset(options={"task_id": "choose-list/2"})
    assert env.step('select(1, "Atlantis")')[0].startswith('[1] has no option "Atlantis".')
    assert env.step('select(1, "a", "b")')[0].startswith("One option of [1]")
    env.reset(options={"task_id": "search-engine/2"})
    env.step('type(1, "x")')
    listed = env.step("click(2)")[0]
    result = int(re.search(r"\[(\d+)\] link", listed)[1])
    page_2 = int(re.search(r'\[(\d+)\] link "2"', listed)[1])
    assert f"[{result}]" not in env.step(f"click({page_2})")[0]
    assert env.step(f"click({result})")[0].startswith(f"[{result}] is gone from this page.")


def test_what_is_half_covered_is_clicked_where_it_is_not(chromium):
    env = chromium("click-test-2")
    env.reset(options={"task_id": "click-test-2/2"})
    place = "document.getElementById('subbtn2').style.cssText = 'position: absolute; left: {}px; top: 100px; width: {}px'"
    with env._window.browser._commands(env._window._handle) as session:
        session.execute_script("document.getElementById('subbtn').style.cssText = 'position: absolute; left: 20px; top: 100px'")
        session.execute_script(place.format(0, 200))
    one = int(re.search(r'\[(\d+)\] button "ONE"', env.step("press(Tab)")[0])[1])
    assert env.step(f"click({one})")[0].startswith(f"[{one}] is covered by something else.")
    with env._window.browser._commands(env._window._handle) as session:
        session.execute_script(place.format(28, 200))
    assert env.step(f"click({one})")[1:3] == (1.0, True)


def test_thinking_takes_no_time(chromium):
    """A page's own limit is ten seconds, and its usual reward shrinks with every one of them."""
    env = chromium("enter-text")
    env.reset(options={"task_id": "enter-text/2"})
    assert env._window.call("settle", 3_600_000)["done"] is False
    env.step(env.expert_action())
    _, reward, terminated, *_ = env.step(env.expert_action())
    assert (reward, terminated) == (1.0, True)


def test_training_and_evaluation_see_other_pages(chromium):
    drawn = {}
    for split in ("train", "eval"):
        env = chromium("click-test", "login-user", split=split)
        env.reset(seed=0)
        drawn[split] = [env.sample_task(None) for _ in range(200)]
        assert {each.task.name for each in drawn[split]} == {"click-test", "login-user"}
        env.close()
    assert not {each.task.seed for each in drawn["train"]} & {each.task.seed for each in drawn["eval"]}
    env = chromium("login-user")
    assert env.reset(options={"task_id": "login-user/3"})[0] == env.reset(options={"task_id": "login-user/3"})[0]
    assert env.reset(options={"task_id": "login-user/3"})[0] != env.reset(options={"task_id": "login-user/5"})[0]
    for task, complaint in (("login-user", "are called as in"), ("login-usr/3", "did you mean 'login-user'")):
        with pytest.raises(ValueError, match=complaint):
            env.reset(options={"task_id": task})


def test_pickled_in_mid_episode_it_goes_on_the_same(chromium):
    env = chromium("navigate-tree", "use-autocomplete")
    for task in ("use-autocomplete/8", "use-autocomplete/10"):
        env.reset(options={"task_id": task})
        env.step(env.expert_action())
        copy = pickle.loads(pickle.dumps(env))
        for _ in range(2):
            action = env.expert_action()
            assert env.step(action)[:4] == copy.step(action)[:4]
        assert env._window is not copy._window


def test_a_page_that_hangs_costs_an_episode_and_no_more(chromium):
    env = chromium("click-test", page_timeout_s=3.0)
    env.reset(seed=0)
    hang = "document.getElementById('subbtn').addEventListener('mousedown', () => { for (;;); })"
    with env._window.browser._commands(env._window._handle) as session:
        session.execute_script(hang)
    process = psutil.Process(env._window.browser.process)
    left = [process, *process.children(recursive=True)]
    text, reward, terminated, truncated, info = env.step("click(1)")
    assert (reward, terminated, truncated) == (0.0, False, True) and "did not answer within 3 s" in text
    assert info["discard"] is True and info["stop_reason"] == "page_timeout"
    assert not psutil.wait_procs(left, timeout=20)[1]
    assert "Click Me!" in env.reset(seed=0)[0]
    env.close()


@pytest.mark.long
def test_a_page_that_hangs_while_it_loads_costs_an_episode_too(chromium, config, chat, tmp_path, monkeypatch):
    monkeypatch.setattr(miniwob, "ATTEMPTS", 1)
    shutil.copytree(pages.folder(), tmp_path / "html")
    (tmp_path / "html" / "miniwob" / "click-test.html").write_text("<script>for (;;);</script>")

    def make(context) -> MiniWoB:
        env = chromium("click-test", "login-user", page_timeout_s=4.0)
        env._html = tmp_path / "html"
        return env

    runner = TextEnvRunner(config=config.copy(copy_frozen=False), worker_index=0, env_creator=make)
    runner.attach(ScriptedEngine(chat, lambda prompt, weights: "click(3)"))
    episodes = runner.sample(num_episodes=3)
    metrics = runner.get_metrics()
    assert {episode.get_infos(0)["task_id"].split("/")[0] for episode in episodes} == {"login-user"}
    assert int(metrics["stop_reason_page_timeout"].peek()) > 0 and "env_failures" not in metrics
    runner.stop()


class Disturbed(gym.Wrapper):
    """Plays as the expert does, whatever the policy says; in its fifth step it kills its browser."""

    steps = 0

    def step(self, action: str):
        type(self).steps += 1
        if self.steps == 5:
            inner = self.env.unwrapped
            main_process(inner).kill()
            time.sleep(0.5)
        return self.env.step(self.env.unwrapped.expert_action())


def test_a_killed_browser_is_made_good(chromium, config, chat):
    own = config.copy(copy_frozen=False)
    own.num_envs_per_env_runner = 2
    runner = TextEnvRunner(
        config=own, worker_index=0, env_creator=lambda _: Disturbed(chromium("login-user", num_browsers=1, page_timeout_s=30.0))
    )
    runner.attach(ScriptedEngine(chat, lambda prompt, weights: "x", version=0))
    episodes = runner.sample(num_episodes=6)
    assert len(episodes) == 6 and all(episode.is_done and episode.get_return() == 1.0 for episode in episodes)
    metrics = runner.get_metrics()
    lost = int(metrics["episodes_discarded"].peek())
    assert lost in (1, 2) and int(metrics["stop_reason_browser_lost"].peek()) == lost
    runner.stop()


def test_windows_of_whoever_is_gone_are_closed(chromium):
    envs = [chromium("click-test") for _ in range(3)]
    for env in envs:
        env.reset(seed=0)
    kept = pool.pool_of(envs[0]._programs, 1)
    gc.collect()
    before, handle = kept.num_windows(), envs[0]._window.browser
    envs[0].close()
    envs[0].close()
    del env, envs
    gc.collect()
    assert kept.num_windows() == before - 3
    with handle._commands() as session:
        assert len(session.window_handles) == 1 + kept.num_windows()


CHILD = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
from rllib_nlac.envs.miniwob.env import MiniWoB
env = MiniWoB("click-test", page_timeout_s=60.0)
env.reset(seed=0)
print("ready", flush=True)
time.sleep(600)
"""


def test_nothing_is_left_behind_after_ctrl_c_or_a_kill(chromium):
    children = {
        sent: subprocess.Popen(
            [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for sent in (signal.SIGINT, signal.SIGKILL)
    }
    for sent, child in children.items():
        assert child.stdout.readline() == b"ready\n"
        below = psutil.Process(child.pid).children(recursive=True)
        assert len(below) > 5 and any("chromium" in process.name() for process in below)
        os.killpg(child.pid, sent)
        child.wait(60)
        assert not psutil.wait_procs(below, timeout=30)[1], sent
        child.stdout.close()


@pytest.mark.long
def test_nothing_is_left_behind_by_a_worker_of_ray_that_is_killed_or_let_go(chromium, ray_session):
    """Ray kills what a worker has started before the worker ends: fails where that alone is who sees to the browser."""

    class Player:
        def __init__(self):
            self.env = MiniWoB("click-test", page_timeout_s=60.0)
            self.env.reset(seed=0)

        def process(self) -> int:
            return os.getpid()

    for kill in (True, False):
        actor = ray.remote(num_cpus=0)(Player).remote()
        below = psutil.Process(ray.get(actor.process.remote())).children(recursive=True)
        (folder,) = {process.environ()["TMPDIR"] for process in below if process.name() == "chromedriver"}
        assert any("chromium" in process.name() for process in below) and os.path.isdir(folder)
        if kill:
            ray.kill(actor)
        del actor
        left = psutil.wait_procs(below, timeout=30)[1]
        for process in left:
            process.kill()
        assert not left and not os.path.exists(folder)
