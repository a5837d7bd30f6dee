"""Which way weights take to the engines follows from where the processes are, and a way that is not there is refused."""

from __future__ import annotations

import pytest
from plain_engine import PlainEngine

from rllib_nlac.command.fit import memory_lines
from rllib_nlac.engine.make import ENGINES
from rllib_nlac.engine.vllm_engine import VLLMSettings

GPUS = {"num_learners": 1, "num_engines": 2, "num_gpus_per_learner": 1, "num_gpus_per_engine": 2}


def placed(config, wanted: str = "auto", **keys):
    for key, value in keys.items():
        setattr(config, key, value)
    config.engine_config = {**config.engine_config, "weight_transfer": wanted}
    return config


@pytest.mark.parametrize(
    ("wanted", "keys", "way", "backend", "reason"),
    [
        ("auto", {}, "in_process", "", "in one process"),
        ("auto", {"num_learners": 1}, "object_store", "", "the trial's own process"),
        ("auto", {"num_engines": 1}, "object_store", "", "on CPUs it is faster"),
        ("auto", {"num_engines": 2, "num_learners": 2}, "object_store", "", "on CPUs it is faster"),
        ("collective", {"num_engines": 1}, "collective", "gloo", "weight_transfer says so"),
        ("auto", GPUS, "collective", "nccl", "GPUs of their own"),
        ("auto", {**GPUS, "num_learners": 0}, "collective", "nccl", "GPUs of their own"),
        ("object_store", GPUS, "object_store", "", "weight_transfer says so"),
        ("auto", {**GPUS, "num_gpus_per_learner": 0.5, "num_gpus_per_engine": 0.5}, "object_store", "", "share a GPU"),
        ("auto", {**GPUS, "num_gpus_per_learner": 0}, "object_store", "", "only one side has GPUs"),
        ("auto", {**GPUS, "lora": {"rank": 8}}, "object_store", "", "an adapter is small"),
        ("in_process", {}, "in_process", "", "in one process"),
    ],
)
def test_the_way_follows_from_the_placement(config, wanted, keys, way, backend, reason):
    found = placed(config, wanted, **keys).transfer
    assert (found.way, found.backend) == (way, backend) and reason in found.reason
    assert config.engine_spec.broadcasts_by == backend and str(found).startswith(way)


@pytest.mark.parametrize(
    ("wanted", "keys", "match"),
    [
        ("collective", {}, "can only go by in_process here: learner and engine are in one process"),
        ("in_process", {"num_engines": 1}, "can only go by object_store here: on CPUs"),
        ("object_store", {}, "can only go by in_process here"),
        ("collective", {"num_engines": 1, "lora": {}}, "an adapter is small"),
        ("collective", {**GPUS, "num_gpus_per_engine": 0.5}, "share a GPU, on which NCCL does not work"),
        ("colective", {"num_engines": 1}, "'colective' and must be one of auto, in_process, collective, object_store"),
    ],
)
def test_a_way_that_is_not_there_is_refused(config, wanted, keys, match):
    with pytest.raises(ValueError, match=rf"engine_config\['weight_transfer'\] is .*{match}"):
        placed(config, wanted, **keys).validate()


def test_an_engine_that_takes_no_broadcasts_is_given_weights_by_the_store(config, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", PlainEngine)
    config.engines(engine_config={"engine": "plain"})
    assert "'plain' takes no broadcasts" in placed(config, **GPUS).transfer.reason
    assert config.engine_spec.broadcasts() is None


def test_every_worker_of_every_engine_takes_part(config):
    config.engines(engine_config={"tensor_parallel_size": 2})
    spec = placed(config, "collective", num_engines=3).engine_spec
    assert isinstance(spec.settings, VLLMSettings) and spec.broadcasts()._receivers == 6


def test_the_limit_of_a_broadcast_is_below_those_of_engine_and_learner(config):
    def limit(**keys) -> float:
        config.engine_config = {"timeout_s": keys.pop("timeout_s", 600)}
        return placed(config, "collective", num_engines=1, **keys).engine_spec.broadcast_timeout_s

    assert limit() == 60
    assert limit(timeout_s=40) == 20
    assert limit(learner_timeout_s=30) == 10


def test_a_dry_run_names_the_way(config):
    lines = list(memory_lines(placed(config, num_engines=1)))
    (line,) = [line for line in lines if line.startswith("a sync of weights carries")]
    assert line.endswith(" GiB, object_store: on CPUs it is faster than a broadcast")
