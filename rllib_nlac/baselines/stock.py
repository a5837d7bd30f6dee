"""RLlib's own PPO and APPO on text environments: their training steps, learners, connectors and losses, unchanged.

What RLlib asks users to bring is brought here: an EnvRunner, an RLModule, a learner connector. ``rllib train`` takes these
classes for ``run: PPO`` and ``run: APPO`` wherever the environment is text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPO, APPOConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_MODULE_STEPS_TRAINED

from rllib_nlac.activity import activity
from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.algorithm.placement import Kind, hold_own_gpu
from rllib_nlac.baselines.stock_runner import StockTextEnvRunner
from rllib_nlac.baselines.token_module import TextToTokens, TokenValueModule
from rllib_nlac.checkpoints.checked import CheckedCheckpoints
from rllib_nlac.diagnostics.notices import Notices
from rllib_nlac.diagnostics.results import figure
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.engine.shared import NotFiniteError, broken_tensors
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.learner.stopped import MAX_IN_A_ROW
from rllib_nlac.sampling.env_runner import LEAP, NEXT_EPISODE

NEXT_EPISODES = "next_episodes"  # key of our part of a checkpoint


class StockConfig(LanguageConfig):
    """Makes one of RLlib's configurations fit for text. A mixin: it goes before RLlib's class.

    Each EnvRunner has an engine of its own, in its process; RLlib's own sync feeds it. The turn limit ends an episode
    (``truncation_ends``), as it does for NLAC; RLlib would otherwise bootstrap from a state that nobody ever acts in.
    """

    truncation_ends = True
    RANGES = {
        **ranges.POLICY_GRADIENT,
        "lambda_": ranges.SHARE,
        "entropy_coeff": ranges.Range(0, schedule=True),
        "vf_loss_coeff": ranges.NOT_NEGATIVE,
        "clip_param": ranges.POSITIVE,
        "vf_clip_param": ranges.Range(0, infinite=True),
        "kl_coeff": ranges.NOT_NEGATIVE,
        "kl_target": ranges.NOT_NEGATIVE,
        "tau": ranges.SHARE,
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.env_runner_cls = StockTextEnvRunner
        self.gamma = 1.0
        self.lambda_ = 0.95
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        self.entropy_coeff = 0.0

    def _text_to_tokens(self, *spaces: Any) -> TextToTokens:
        chat = self.make_chat()
        return TextToTokens(
            *spaces,
            chat=chat,
            max_prompt_tokens=chat.max_context,
            max_action_tokens=self.model_defaults.max_action_tokens,
            history_turns=self.history_turns,
        )

    @override(AlgorithmConfig)
    def build_learner_connector(self, *args: Any, **kwargs: Any) -> Any:
        """RLlib's, behind ours. A bound method among the keys would go to Tune with a half-made copy of this."""
        own = self.copy(copy_frozen=False)
        own.learners(learner_connector=self._text_to_tokens)
        return super(StockConfig, own).build_learner_connector(*args, **kwargs)

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=TokenValueModule, model_config=self.model_settings)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check(
            self.num_engines == 0,
            "num_engines",
            "must be 0: under RLlib's own algorithms each EnvRunner has its engine; raise num_env_runners",
        )
        self._check(
            self.output is None,
            "output",
            "is not written under RLlib's own algorithms: leave it out, or let GRPO or ReAct play",
        )
        self._check(
            self.lora is None or not self.lora.get("dropout"),
            "lora",
            "has dropout, and RLlib's own losses are computed without, as the engine plays without: leave it out",
        )
        self._check(
            self.lora is not None or self.held_model.dtype == "float32",
            "learner_model",
            "has dtype: bfloat16, in which RLlib's own learners would round most of their steps away, for they keep no float32 "
            "weights beside: leave it out, or train an adapter (lora), which is kept in float32",
        )
        self._check_parts("num_gpus_per_env_runner")
        self._check_gpus()

    def _check_gpus(self) -> None:
        """vLLM's build for GPUs does not run without one, and each process that plays has an engine."""
        if not self.num_gpus_per_learner:
            return
        remote = self.evaluation_interval and self.evaluation_num_env_runners
        own = self.get_evaluation_config_object() if remote else None
        together = "On one GPU for all set num_env_runners, evaluation_num_env_runners and num_learners to 0"
        self._check(
            not self.num_env_runners or self.num_gpus_per_env_runner > 0,
            "num_gpus_per_env_runner",
            f"must be above 0 where learners have GPUs, for each EnvRunner has an engine. {together}",
        )
        self._check(
            own is None or own.num_gpus_per_env_runner > 0,
            "evaluation_config",
            "must have a num_gpus_per_env_runner above 0 where learners have GPUs, for each EnvRunner of evaluations has an "
            f"engine. {together}",
        )
        plays_here = not self.num_env_runners or (self.evaluation_interval and not remote)
        self._check(
            not (self.num_learners and plays_here),
            "num_learners",
            "must be 0 where learners have GPUs and the trial's own process plays (num_env_runners: 0) or evaluates "
            "(evaluation_num_env_runners: 0): with 0 that process has the learner's GPU, else its engine would have none",
        )


class TextPPOConfig(StockConfig, PPOConfig):
    """RLlib's ``PPOConfig`` with ``.language()`` and ``.engines()``.

    .. testcode::

        from rllib_nlac.baselines.stock import TextPPOConfig

        config = (
            TextPPOConfig()
            .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
            .language(language_model="tiny", prompts="compact", max_action_tokens=12)
            .training(lr=1e-3, train_batch_size_per_learner=256, minibatch_size=64, num_epochs=4)
        )
        print(config.build_algo().train()["env_runners"]["success_rate"])
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or TextPPO)


class StockOnText(CheckedCheckpoints):
    """What RLlib's algorithms lack on text: checkpoints with checksums, and an end to runs whose numbers are not finite.

    Remote EnvRunners go on with the next of their episodes after a resume or a restart: RLlib keeps the local one's place.
    RLlib's learners put zeros in the place of gradients that are not finite and go on, with the same weights for ever, or with
    weights that are not finite themselves. Training step, learner and loss stay RLlib's; results are looked at.
    """

    engine = None  # each runner has one of its own
    weight_version = None  # RLlib's own sync numbers none

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.notices = Notices()
        self.watch = Watch(self)
        self._broken_losses = 0
        self._next_episodes: dict[int, int] = {}  # by the index of each remote runner there ever was, as last heard or told
        super().__init__(*args, **kwargs)

    @override(Algorithm)
    def setup(self, config: Any) -> None:
        own = self.config
        number = own.num_env_runners + own.evaluation_num_env_runners
        runners = Kind("EnvRunner", {"GPU": own.num_gpus_per_env_runner}, number, "num_gpus_per_env_runner")
        self._own_gpu = hold_own_gpu(own, [runners] if number else [])  # held as long as this refers to it
        self.watch.setup(partial(super().setup, config))

    @override(Algorithm)
    def cleanup(self) -> None:
        activity.withdraw()
        super().cleanup()

    @override(Algorithm)
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.watch.evaluate(partial(super().evaluate, *args, **kwargs))

    @override(CheckedCheckpoints)
    def save(self, *args: Any, **kwargs: Any) -> Any:
        return self.watch.save(partial(super().save, *args, **kwargs))

    @override(CheckedCheckpoints)
    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        self.watch.last_checkpoint = super().save_to_path(path, **kwargs)
        return self.watch.last_checkpoint

    @override(Algorithm)
    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        if components is None:
            state[NEXT_EPISODES] = self._ask_next_episodes()
        return state

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if NEXT_EPISODES in state:  # the state of some components has none
            self._next_episodes = dict(state[NEXT_EPISODES])
            self._tell_next_episodes()

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        restored = super().restore_env_runners(env_runner_group)
        if restored and env_runner_group is self.env_runner_group:
            self._next_episodes |= {index: self._next_episodes.get(index, 0) + LEAP for index in restored}
            self._tell_next_episodes(restored)
        return restored

    def _ask_next_episodes(self) -> dict[int, int]:
        """Next episode number of each remote runner; for a lost or silent runner, a number that was not played yet."""
        timeout_s = self.config.sample_timeout_s
        answers = self.env_runner_group.foreach_env_runner(_next_episode, local_env_runner=False, timeout_seconds=timeout_s)
        self._next_episodes |= dict(answers)
        silent = set(range(1, self.config.num_env_runners + 1)) - dict(answers).keys()
        return self._next_episodes | {index: self._next_episodes.get(index, 0) + LEAP for index in silent}

    def _tell_next_episodes(self, runners: Sequence[int] | None = None) -> None:
        """Has remote runners go on where they were, all or those of these indices; new ones begin."""
        self.env_runner_group.foreach_env_runner(
            partial(_go_on, next_episodes=self._next_episodes),
            local_env_runner=False,
            remote_worker_ids=runners,
            timeout_seconds=self.config.sample_timeout_s,
        )

    @override(CheckedCheckpoints)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                group.foreach_env_runner(_forget_version)
        super().restore_from_path(path, *args, **kwargs)
        if kwargs.get("component") is None:
            self.watch.last_checkpoint = str(path)

    @override(Algorithm)
    def step(self) -> dict[str, Any]:
        """RLlib's iteration. One without an update says nothing of the loss.

        Raises:
            NotFiniteError: A loss was not finite and neither are the weights, or it was the third such iteration in a row.
        """
        results = self.watch.step(super().step)
        learned = f"{LEARNER_RESULTS}/{DEFAULT_MODULE_ID}"
        if not figure(results, f"{learned}/{NUM_MODULE_STEPS_TRAINED}") > 0:
            return results  # no update came back: an asynchronous algorithm's learner is still at work, or lacks data
        loss = figure(results, f"{learned}/total_loss")
        self._broken_losses = 0 if math.isfinite(loss) else self._broken_losses + 1
        found = on_every_learner(self.learner_group, _broken_weights) if self._broken_losses else []
        if broken := next(filter(None, found), None):
            raise NotFiniteError(f"the loss is {loss}, and {broken}. {self.watch.way_back()}")
        if self._broken_losses >= MAX_IN_A_ROW:
            count = self._broken_losses
            raise NotFiniteError(f"the loss was not finite in {count} iterations in a row. {self.watch.way_back()}")
        return results


def _forget_version(runner: Any) -> None:
    """What is restored may be older than what this runner plays by, and is not to be ignored for that."""
    runner.forget_version()


def _next_episode(runner: Any) -> tuple[int, int]:
    return runner.worker_index, runner.get_state(not_components=COMPONENT_RL_MODULE)[NEXT_EPISODE]


def _go_on(runner: Any, next_episodes: Mapping[int, int]) -> None:
    runner.set_state({NEXT_EPISODE: next_episodes.get(runner.worker_index, 0)})


def _broken_weights(learner: Any) -> str | None:
    broken = broken_tensors(dict(learner.module[DEFAULT_MODULE_ID].named_parameters()))
    return f"{len(broken)} of the model's tensors are not finite, first {next(iter(broken))}" if broken else None


class TextPPO(StockOnText, PPO):
    """RLlib's PPO; only its default configuration differs."""

    @classmethod
    @override(PPO)
    def get_default_config(cls) -> AlgorithmConfig:
        return TextPPOConfig(algo_class=cls)


class TextAPPOConfig(StockConfig, APPOConfig):
    """RLlib's ``APPOConfig`` with ``.language()`` and ``.engines()``."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or TextAPPO)


class TextAPPO(StockOnText, APPO):
    """RLlib's APPO; only its default configuration differs."""

    @classmethod
    @override(APPO)
    def get_default_config(cls) -> AlgorithmConfig:
        return TextAPPOConfig(algo_class=cls)
