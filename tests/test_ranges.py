"""Numeric keys: none takes NaN, infinity, a text, a flag or a number outside its range; the error names key and value."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPOConfig

from rllib_nlac import NLACConfig
from rllib_nlac.algorithm.ranges import FLAG, Flag, Range
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.nlql import NLQLConfig
from rllib_nlac.baselines.nlrl import NLRLConfig
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.baselines.rft import RFTConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig
from rllib_nlac.baselines.self_distillation import SelfDistillationConfig
from rllib_nlac.baselines.stock import TextAPPOConfig, TextPPOConfig
from rllib_nlac.engine.lora import LoRASettings

CONFIGS = [
    NLACConfig,
    NLQLConfig,
    ScalarCriticConfig,
    GRPOConfig,
    RFTConfig,
    NLRLConfig,
    SelfDistillationConfig,
    ReActConfig,
    TextPPOConfig,
    TextAPPOConfig,
]
RLLIBS = {TextPPOConfig: PPOConfig, TextAPPOConfig: APPOConfig}


def ranges_of(cls) -> dict[str, Range | Flag]:
    found: dict[str, Range | Flag] = {}
    for base in reversed(cls.__mro__):
        found |= vars(base).get("RANGES", {})
    return {key: allowed for key, allowed in found.items() if hasattr(cls(), key)}


def valid(cls):
    config = cls().environment("TwentyQuestions").language(language_model="tiny", prompts="compact")
    config.validate()
    return config


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda cls: cls.__name__)
def config(request):
    return valid(request.param)


def test_every_number_and_flag_of_our_own_has_a_range(config):
    """Whatever a class adds to RLlib's configuration and is a number, a flag, or None by default."""
    theirs, known = vars(RLLIBS.get(type(config), AlgorithmConfig)()), ranges_of(type(config))
    texts_or_none = {"preset", "prompts", "lora", "tool_template"}
    for key, value in vars(type(config)()).items():
        if not key.startswith("_") and key not in theirs and (value is None or isinstance(value, (bool, int, float))):
            assert key in known or key in texts_or_none, f"{key} is checked nowhere"
    nested = config.of_all_bases("NESTED_RANGES")
    for key, settings in {**config.of_all_bases("SETTINGS"), "lora": LoRASettings}.items():
        for field in fields(settings):
            if isinstance(field.default, (bool, int, float)):
                assert field.name in nested[key], f"{key}[{field.name!r}] is checked nowhere"


BAD = [math.nan, math.inf, -math.inf, -1, -1e-9, True, "1", "no", [], {}, np.float64("nan"), np.bool_(True), 10**400]


def test_none_of_them_takes_what_is_no_number_of_its_range(config):
    for key, allowed in ranges_of(type(config)).items():
        good = getattr(config, key)
        bad = BAD
        if isinstance(allowed, Flag):
            bad = [0.5, math.nan, "no", 0, 1, [], *([] if allowed.optional else [None])]
        if isinstance(allowed, Range):
            if allowed.infinite:
                bad = [value for value in bad if value is not math.inf]
            if allowed.low == -math.inf:
                bad = [value for value in bad if value not in (-1, -1e-9)]
            bad = [*bad, *([] if allowed.optional else [None]), *([2.5] if allowed.whole else [])]
        for value in bad:
            setattr(config, key, value)
            with pytest.raises(ValueError, match=rf"^config\.{key} is .* and must ") as raised:
                config.validate()
            assert len(str(raised.value)) < 500
        setattr(config, key, good)
    config.validate()


@pytest.mark.parametrize(
    ("cls", "key", "inner"),
    [
        (NLACConfig, "replay_buffer_config", ("capacity", "max_bytes", "alpha", "beta", "beta_final_timesteps")),
        (NLACConfig, "engine_config", ("max_num_seqs", "gpu_memory_utilization", "cpu_kv_cache_gib", "timeout_s")),
        (NLACConfig, "judge_temperatures", ("critique", "refine")),
        (NLACConfig, "evaluation_critic", ("states", "futures", "fixed_states", "branches")),
        (NLACConfig, "evaluation_repeats", ("tasks", "attempts")),
        (ReActConfig, "endpoint", ("max_concurrency", "max_retries", "timeout_s")),
        (NLACConfig, "lora", ("rank", "alpha", "dropout")),
    ],
)
def test_nor_do_those_inside_a_mapping(cls, key, inner):
    config = valid(cls)
    for name in inner:
        for value in (math.nan, math.inf, -1, True, "3"):
            setattr(config, key, {name: value})
            with pytest.raises(ValueError, match=rf"^config\.{key}\['{name}'\] is .* and must "):
                config.validate()
    setattr(config, key, "fast")
    with pytest.raises(ValueError, match=f"{key} is 'fast' and must be a mapping"):
        config.validate()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (-1, "config.lr is -1 and must not be negative"),
        ("1e-3", "YAML takes it for a text: write 0.001"),
        ([[0, 1e-3], [100, -1e-4]], "must not be negative, also at step 100"),
        ([[0, 1e-3], [100, math.nan]], "must be a finite number, also at step 100"),
        ([[10, 1e-3], [100, 1e-4]], "begin with 0 and rise"),
        ([[0, 1e-3], [0, 1e-4]], "begin with 0 and rise"),
        ([[0, 1e-3], [-5, 1e-4]], r"one entry is \[-5"),
        ([[0, 1e-3, 7]], "one entry is"),
        ([1e-3], "one entry is 0.001"),
    ],
)
@pytest.mark.parametrize("cls", [NLACConfig, TextPPOConfig])
def test_learning_rates(cls, value, complaint):
    config = valid(cls)
    config.lr = value
    with pytest.raises(ValueError, match=complaint):
        config.validate()
    for good in (0, 1e-3, np.float64(1e-3), [[0, 1e-3], [1000, 0.0]]):
        config.lr = good
        config.validate()


def test_what_bounds_are_for_is_said():
    assert Range(2, whole=True, why="it compares").complaint(1) == "must be at least 2: it compares"
    assert Range(0, above=True).complaint(0) == "must be above 0"
    assert Range(0, 1, above=True).complaint(2) == "must be above 0 and at most 1"
    assert Range(1, words=("auto",), optional=True).complaint("aut") == "must be a number or 'auto' or None"
    assert Range(1, words=("auto",)).complaint("auto") is None and FLAG.complaint("no") == "must be true or false"


@pytest.mark.parametrize(
    "settings", [{"zero_optimization": {"compute_grad_norm": False}}, {"bf16": {"check_grad_overflow": False}}]
)
def test_deepspeeds_own_guard_stays_on(settings):
    config = valid(NLACConfig).deepspeed(deepspeed_config=settings)
    with pytest.raises(ValueError, match="lets gradients pass that are not finite: leave out"):
        config.validate()
