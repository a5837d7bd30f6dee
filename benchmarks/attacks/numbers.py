"""Numbers that are not finite: what is refused, what stops an update, and what the look at the weights costs.

    python -m benchmarks.attacks.numbers

No engine and no Ray is started.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rllib_nlac import NLACConfig, algorithms
from rllib_nlac.algorithm.ranges import Flag
from rllib_nlac.engine.shared import broken_tensors, checksum
from rllib_nlac.envs.answers import AnswerError, checked_step
from rllib_nlac.learner.deepspeed import DeepSpeedTrainer

NO_REWARDS = [math.nan, math.inf, -math.inf, 10**400, 1e39, "1.0", None, np.array(1.0), [1.0], 1j, np.float32("inf")]
NO_FLAGS = [math.nan, "no", "yes", "", 0.5, 2, [], {}, np.array([True])]
NO_INFOS: list[Any] = [
    None,
    [],
    "x",
    *({"success": flag} for flag in NO_FLAGS),
    *({"discard": flag} for flag in NO_FLAGS),
    {"system_prompt": 7},
    {"stop_reason": "a/b"},
    {"stop_reason": "x" * 1_000_000},
    {"stop_reason": []},
    {"subgoals": {"a": math.nan}},
    {"subgoals": {1: 1}},
    {"subgoals": dict.fromkeys(map(str, range(65)), 1)},
    {"task_id": []},
    {"privileged": "x"},
]
NO_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", [], {}, 10**400]
NO_BOOLS = [math.nan, "no", 0, 1, None, []]


def answers() -> tuple[int, int]:
    """Answers of an environment that nobody should learn from, and how many of them are refused."""
    bad = [("x", reward, False, False, {}) for reward in NO_REWARDS]
    bad += [("x", 0.0, flag, False, {}) for flag in NO_FLAGS] + [("x", 0.0, False, flag, {}) for flag in NO_FLAGS]
    bad += [("x", 0.0, False, False, info) for info in NO_INFOS]
    return sum(_refuses(lambda answer=answer: checked_step(answer), AnswerError) for answer in bad), len(bad)


def keys() -> tuple[int, int]:
    """Numeric keys and flags of all algorithms with values that are none, and how many of them are refused."""
    refused = total = 0
    classes = {**algorithms.OURS, **algorithms.STOCK_ON_TEXT}
    for cls in classes.values():
        config = cls.get_default_config().environment("TwentyQuestions")
        ranges: dict[str, Any] = {}
        for base in reversed(type(config).__mro__):
            ranges |= vars(base).get("RANGES", {})
        for key, allowed in ranges.items():
            if not hasattr(config, key):
                continue
            good = getattr(config, key)
            for value in NO_BOOLS if isinstance(allowed, Flag) else NO_NUMBERS:
                if value is math.inf and getattr(allowed, "infinite", False):
                    continue
                setattr(config, key, value)
                refused += _refuses(config.validate, ValueError)
                total += 1
            setattr(config, key, good)
    return refused, total


def steps() -> tuple[int, int]:
    """Gradients that are not finite, by ZeRO stage and precision, and how many changed neither weights nor later steps."""
    kept = total = 0
    for stage in (0, 1, 2, 3):
        for dtype in (torch.float32, torch.bfloat16):
            for times in (math.nan, math.inf, 2e38):
                trainer, fresh = _trainer(stage, dtype), _trainer(stage, dtype)
                before = _weights(trainer)
                _backward(trainer, times)
                norm = trainer.step()
                same = _weights(trainer) == before and not math.isfinite(norm)
                for each in (trainer, fresh):
                    _backward(each, 1.0)
                    each.step()
                kept += same and _weights(trainer) == _weights(fresh) != before
                total += 1
    return kept, total


def cost(numbers: int = 1 << 26) -> dict[str, float]:
    """Seconds for a billion weights on one core: the look for numbers that are not finite, beside the checksum of a sync."""
    torch.set_num_threads(1)
    times: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        state = {"w": torch.randn(numbers).to(dtype)}
        for name, work in {"look": lambda s=state: broken_tensors(s), "checksum": lambda s=state: checksum(s.values())}.items():
            work()
            started = time.perf_counter()
            work()
            times[f"{name}, {str(dtype).removeprefix('torch.')}"] = (time.perf_counter() - started) * 1e9 / numbers
    return times


def _refuses(call: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def _trainer(stage: int, dtype: torch.dtype) -> DeepSpeedTrainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)
    settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": dtype is torch.bfloat16}, "gradient_clipping": 1.0}
    return DeepSpeedTrainer(model, torch.optim.AdamW(model.parameters(), lr=0.1), settings)


def _backward(trainer: DeepSpeedTrainer, times: float) -> None:
    x = torch.ones(2, 3, dtype=next(trainer.engine.module.parameters()).dtype)
    trainer.backward(trainer(x).float().sum() * times)


def _weights(trainer: DeepSpeedTrainer) -> list[float]:
    return [x for part in trainer.parts() for p in part.values() for x in p.detach().float().flatten().tolist()]


def main() -> None:
    """Prints the figures."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    NLACConfig()  # imports RLlib before anything is timed
    print("answers refused:               {} of {}".format(*answers()))
    print("values of keys refused:        {} of {}".format(*keys()))
    print("updates stopped without trace: {} of {}".format(*steps()))
    for name, seconds in cost().items():
        print(f"{name + ':':<30} {seconds:.1f} s for a billion weights on one core")


if __name__ == "__main__":
    main()
