"""Shared fixtures. One vLLM engine serves all tests of a process: starting it takes longer than most of them."""

from __future__ import annotations

import os
import tempfile

# Everything that a test run writes goes below one temporary folder; RLlib's default is ~/ray_results.
_SCRATCH = tempfile.TemporaryDirectory(prefix="rllib_nlac_tests_")
os.environ["HOME"] = _SCRATCH.name
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Small models gain next to nothing by more threads, and lose most of their speed where something else keeps a core busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import ray
import torch

from rllib_nlac import NLACConfig
from rllib_nlac.engine.chat import Chat
from rllib_nlac.language.prompts import PromptSet, load_prompts
from rllib_nlac.learner.rl_module import trainable_state
from rllib_nlac.types import Weights

WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}


@pytest.fixture(scope="session")
def model_path() -> str:
    """The shipped small model."""
    return NLACConfig().model_path


@pytest.fixture(scope="session")
def chat(model_path: str) -> Chat:
    return Chat.from_pretrained(model_path)


@pytest.fixture(scope="session")
def compact() -> PromptSet:
    return load_prompts("compact", "TwentyQuestions")


@pytest.fixture(scope="session")
def ray_session():
    """A local Ray with room for many small actors, shut down with the session."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    yield
    ray.shutdown()


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
    from transformers import AutoModelForCausalLM

    return trainable_state(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))


@pytest.fixture()
def engine(session_engine, base_weights):
    """Real vLLM with the shipped model, as every test finds it."""
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


@pytest.fixture()
def lent_engine(engine, monkeypatch) -> None:
    """Algorithms built in a test take the session's engine instead of starting their own."""
    monkeypatch.setattr("rllib_nlac.algorithm.algorithm.make_engine", lambda config, chat: Borrowed(engine))


@pytest.fixture()
def config() -> NLACConfig:
    """The quick start's configuration."""
    return (
        NLACConfig()
        .environment("TwentyQuestions", env_config=dict(WORLD))
        .language(language_model="tiny", prompts="compact", max_action_tokens=12)
        .roles(max_future_tokens=24, max_critique_tokens=32)
        .training(lr=1e-3)
        .debugging(seed=0)
    )
