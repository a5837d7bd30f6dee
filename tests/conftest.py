"""Shared fixtures. One vLLM engine serves all tests of a process: starting it takes longer than most of them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Everything that a test run writes goes below one temporary folder; RLlib's default is ~/ray_results. Processes among which the
# tests are divided share it, with what vLLM and others find out once and keep below it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _SCRATCH = tempfile.TemporaryDirectory(prefix="rllib_nlac_tests_")
    os.environ["HOME"] = _SCRATCH.name
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray makes its workers give way to everybody else: on a busy machine they would run into the limits of time of the tests.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Small models gain next to nothing by more threads, and lose most of their speed where something else keeps a core busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# A busy machine takes its time, and a test's own result does not depend on it.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# All else is imported where it is needed: importing Ray and torch takes seconds, also of the process that hands tests out.
if TYPE_CHECKING:
    from typing import Any

    import torch
    from browsed import Page

    from rllib_nlac import NLACConfig
    from rllib_nlac.engine.chat import Chat
    from rllib_nlac.language.prompts import PromptSet

pytest.register_assert_rewrite("browsed", "command_runs")

WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}

# What a test needs is said by its fixtures, and by a mark only where none of them tells.
NEEDS = {
    "vllm": ("session_engine", "adapters", "merging"),
    "ray": ("ray_session",),
    "process": ("browser", "chromium", "commands", "disk", "real_server", "source", "trained"),
}
# The first to begin where tests are divided, so that no long one begins last; by name of the test or its file, longest first.
LONGEST = (
    "test_learning.py",
    "test_interrupts.py",
    "test_faults.py",
    "test_cluster.py",
    "test_gpu_benchmark.py",
    "test_the_7b_examples",
    "test_ones_own_environment",
    "test_killed_and_resumed",
    "test_in_the_middle_of_a_run",
    "test_two_learners",
    "test_a_value_that_pbt",
    "test_tuner_",
)


# Of these each test is handed out alone: they share nothing that their file prepares.
DIVIDED = (
    "test_baselines.py",
    "test_damage.py",
    "test_interrupts.py",
    "test_nlac.py",
    "test_not_finite.py",
    "test_notices.py",
    "test_resume.py",
    "test_stock.py",
    "test_storage.py",
    "test_tune.py",
)


def pytest_collection_modifyitems(items) -> None:
    """Marks tests by what they need; and where they are divided among processes, the long ones come first."""
    for item in items:
        for mark, fixtures in NEEDS.items():
            if not set(fixtures).isdisjoint(item.fixturenames):
                item.add_marker(mark)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    groups: dict[str, list] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    items[:] = [item for group in sorted(groups, key=lambda name: rank(name, groups[name])) for item in groups[group]]


def needs(item) -> set[str]:
    return {mark for mark in NEEDS if item.get_closest_marker(mark)}


def group_of(test: str) -> str:
    """What is handed to one process together: the tests of a file, or a single one."""
    file = test.partition("::")[0]
    return test if os.path.basename(file) in DIVIDED else file


def rank(group: str, items: list) -> tuple[int, int]:
    """Long ones first, then what starts processes, Ray or vLLM, then all others."""
    place = next((number for number, name in enumerate(LONGEST) if name in group), len(LONGEST))
    needed = set().union(*map(needs, items))
    return place, next((number for number, mark in enumerate(("process", "ray", "vllm")) if mark in needed), len(NEEDS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Divides tests by ``group_of``: groups that are named by marks do not reach pytest-xdist 3.8 under pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


_started: list[str] | None = None  # what a test starts that is not marked for it


def _watch(event: str, arguments: tuple) -> None:
    if _started is None or event not in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        return
    # Libraries ask lscpu, hostname and the like what machine this is; that is no process to be marked for.
    if event == "os.fork" or os.path.basename(str(arguments[0] or arguments[1][0])).startswith("python"):
        _started.append(f"{event}{arguments[:2]}")


sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global _started
    _started = None if needs(item) else []
    try:
        return (yield)
    finally:
        _started = None


@pytest.fixture(autouse=True)
def starts_nothing_unmarked(request):
    """Whoever starts a process, Ray, or vLLM, which start some, is marked for it: ``make check`` leaves those out."""
    yield
    assert not _started, f"mark this test by what it starts, one of {', '.join(NEEDS)}: {_started}"


@pytest.fixture(autouse=True)
def idle():
    """Nothing goes on in this process when the next test begins: algorithms that tests share are not stopped between them."""
    yield
    if (module := sys.modules.get("rllib_nlac.activity")) is not None:
        module.activity.turn_to("", iteration=0)


@pytest.fixture(scope="session")
def model_path() -> str:
    """The shipped small model."""
    from rllib_nlac import NLACConfig

    return NLACConfig().model_path


@pytest.fixture(scope="session")
def padded_model(model_path: str, chat: Chat, tmp_path_factory) -> str:
    """The shipped small model with rows that the tokenizer has no ids for, as likely as the tokens whose rows they copy."""
    import shutil

    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(model_path, folder)
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    known, copied = lm.config.vocab_size, [*chat.encode("Is it alive?")]
    lm.resize_token_embeddings(known + len(copied), mean_resizing=False)
    weight = lm.get_output_embeddings().weight.data
    weight[known:] = weight[copied]
    lm.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat(model_path: str) -> Chat:
    from rllib_nlac.engine.chat import Chat

    return Chat.from_pretrained(model_path)


@pytest.fixture(scope="session")
def compact() -> PromptSet:
    from rllib_nlac.language.prompts import load_prompts

    return load_prompts("compact", "TwentyQuestions")


@pytest.fixture(scope="session")
def ray_session():
    """A local Ray with room for many small actors, shut down with the session; the address by which commands join it."""
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        ignore_reinit_error=True,
        # Else it begins with a process for each of the eight, most of which nobody ever uses.
        _system_config={"prestart_worker_first_driver": False},
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture()
def serve():
    """Starts servers with an OpenAI-compatible endpoint that behave as they are told, and ends them."""
    from chat_server import ChatServer

    with contextlib.ExitStack() as servers:

        def serve(*behaviours, **settings) -> ChatServer:
            server = servers.enter_context(ChatServer(behaviours, **settings))
            servers.callback(server.shutdown)
            return server

        yield serve


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Runs the ``rllib`` command, in processes of its own that need not import everything again."""
    from command_runs import Commands

    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.stop()


@pytest.fixture(scope="session")
def session_engine(model_path: str, chat: Chat):
    """Real vLLM, with whatever weights the last test left in it."""
    from rllib_nlac.engine.vllm_engine import VLLMEngine

    engine = VLLMEngine(model_path, chat.max_context, [chat.end_id])
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def base_weights(model_path: str) -> dict[str, torch.Tensor]:
    """The shipped model's weights as vLLM takes them."""
    import torch
    from transformers import AutoModelForCausalLM

    from rllib_nlac.learner.rl_module import served_state

    return served_state(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))


@pytest.fixture()
def engine(session_engine, base_weights):
    """Real vLLM with the shipped model, as every test finds it."""
    from rllib_nlac.types import Weights

    if not session_engine.holds(base_weights):
        session_engine.set_weights(Weights.POLICY, 0, base_weights)
    return session_engine


class Borrowed:
    """The session's engine, lent to an algorithm, which stops what it takes for its own."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def stop(self) -> None:
        pass


@pytest.fixture(scope="session")
def lend_any():
    """While it is entered with an engine, algorithms take that one instead of starting their own."""

    @contextlib.contextmanager
    def lend(engine):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rllib_nlac.algorithm.algorithm.make_engine", lambda config, chat: Borrowed(engine))
            yield

    return lend


@pytest.fixture(scope="session")
def lend(session_engine, lend_any):
    """The same with the session's engine."""
    return functools.partial(lend_any, session_engine)


@pytest.fixture()
def lent_engine(engine, lend) -> Iterator[None]:
    """Algorithms built in a test take the session's engine instead of starting their own."""
    with lend():
        yield


@pytest.fixture()
def config(make_config) -> NLACConfig:
    return make_config()


@pytest.fixture(scope="session")
def make_config():
    return quick_start


def quick_start() -> NLACConfig:
    """The quick start's configuration."""
    from rllib_nlac import NLACConfig

    return (
        NLACConfig()
        .environment("TwentyQuestions", env_config=dict(WORLD))
        .language(language_model="tiny")
        .training(lr=1e-3)
        .debugging(seed=0)
    )


@pytest.fixture()
def make_learner(config):
    """Builds a learner in this process, by keys that differ from the small configuration's."""
    from rllib_nlac.envs.spaces import TextSpace
    from rllib_nlac.learner.learner import LanguageLearner

    def make(**settings) -> LanguageLearner:
        own = config.copy(copy_frozen=False)
        own.lr = 1e-3
        for key, value in settings.items():
            setattr(own, key, value)
        spec = own.get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        learner = LanguageLearner(config=own, module_spec=spec)
        learner.build()
        return learner

    return make


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    from browsed import start_browser

    try:
        own = start_browser()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    yield own
    own.quit()


@pytest.fixture()
def view(browser) -> Iterator[Page]:
    """The browser as every test finds it; what went wrong in the page fails the test."""
    from browsed import Page

    own = Page(browser)
    own.size(1280, 800)
    own.scheme("light")
    browser.get_log("browser")
    yield own
    wrong = [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]
    assert not wrong or own.js("return window.mayFail"), wrong
