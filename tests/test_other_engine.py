"""Another engine than vLLM is a file, ``plain_engine.py``, and a line of ``ENGINES``."""

from __future__ import annotations

import pytest
from plain_engine import PlainEngine, PlainSettings

from rllib_nlac.engine.make import ENGINES
from rllib_nlac.types import Weights


@pytest.fixture()
def plain(config, monkeypatch):
    """The configuration of the quick start, smaller, on that engine."""
    monkeypatch.setitem(ENGINES, "plain", PlainEngine)  # the line
    config.engines(engine_config={"engine": "plain"}).language(max_action_tokens=6)
    config.env_runners(num_envs_per_env_runner=4).training(episodes_per_iteration=4, train_batch_size_per_learner=4)
    return config.training(minibatch_size=4, num_epochs=1, preset="paper")


def test_its_settings_are_keys_of_engine_config(plain):
    plain.engines(engine_config={"engine": "plain", "dtype": "bfloat16", "timeout_s": 5}).validate()
    assert plain.engine_spec.settings == PlainSettings("bfloat16") and plain.engine_spec.timeout_s == 5
    with pytest.raises(ValueError, match="engine_config: unknown key 'max_num_seqs'"):
        plain.engines(engine_config={"engine": "plain", "max_num_seqs": 8}).validate()
    with pytest.raises(ValueError, match=r"engine_config\['engine'\]: unknown .*'plane'; did you mean 'plain'"):
        plain.engines(engine_config={"engine": "plane"}).validate()


def test_it_plays_answers_the_waves_and_takes_the_weights(plain, ray_session):
    algorithm = plain.build_algo()
    try:
        results = [algorithm.train() for _ in range(2)]
        assert isinstance(algorithm.engine, PlainEngine)
        assert algorithm.engine.versions[Weights.TARGET] == algorithm.weight_version == 3
    finally:
        algorithm.stop()
    assert results[-1]["logprob_gap"] < 1e-4  # the engine's word after a gradient step is the learner's
    assert results[-1]["language_stages"]["num_generated_tokens"] > 0
