"""The environments of this package, by their classes."""

from __future__ import annotations

from rllib_nlac.envs import registry
from rllib_nlac.envs.adapters.gymnasium_text import GymnasiumText
from rllib_nlac.envs.adapters.harness import Harness
from rllib_nlac.envs.adapters.open_env import OpenEnv
from rllib_nlac.envs.adapters.reasoning_gym import ReasoningGym
from rllib_nlac.envs.adapters.tau2_bench import Tau2Bench
from rllib_nlac.envs.adapters.tau_bench import TauBench
from rllib_nlac.envs.adapters.text_arena import TextArena
from rllib_nlac.envs.guess_number import GuessNumber, GuessNumberTools
from rllib_nlac.envs.logged import LoggedDialogues
from rllib_nlac.envs.math_reasoning import MathReasoning
from rllib_nlac.envs.miniwob.env import MiniWoB
from rllib_nlac.envs.service_desk.env import ServiceDesk
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.envs.tools import ToolTasks
from rllib_nlac.envs.twenty_questions import TwentyQuestions

CLASSES = (
    GuessNumber,
    GuessNumberTools,
    TwentyQuestions,
    TextHouse,
    MathReasoning,
    ServiceDesk,
    MiniWoB,
    TaskSet,
    ToolTasks,
    Harness,
    TextArena,
    ReasoningGym,
    OpenEnv,
    TauBench,
    Tau2Bench,
    GymnasiumText,
    LoggedDialogues,
)


def register_all() -> None:
    """Registers every environment of this package with Tune."""
    for environment in CLASSES:
        registry.register(environment.__name__, environment)
