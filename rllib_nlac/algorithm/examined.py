"""Off-policy learning with a critic in words that every evaluation examines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rllib_nlac.activity import activity
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.evaluation import play_forks
from rllib_nlac.algorithm.examination import Examiner, examine, log
from rllib_nlac.algorithm.replay import ReplayAlgorithm
from rllib_nlac.diagnostics.tensorboard import TransitionWriter
from rllib_nlac.diagnostics.watch import Watched
from rllib_nlac.language.critique import predicts_success
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.types import Future, Refinement, Transition

FIXED_STATES = "fixed_states"  # key of our part of a checkpoint


class ExaminedAlgorithm(ReplayAlgorithm):
    """A mixin between the replay loop and an algorithm. A subclass sets ``stages`` and ``writer``."""

    stages: LanguageStages
    writer: TransitionWriter
    _fixed: tuple[Transition, ...] = ()

    @override(Watched)
    def examine(self, episodes: Sequence[SingleAgentEpisode], group: EnvRunnerGroup | None) -> None:
        """Asks the critic about turns of an evaluation's episodes; see ``ExaminationSettings``.

        Args:
            episodes: As the current policy has just played them.
            group: Who plays in evaluations; None: the algorithm's own runner.
        """
        asked = self.config.examination
        with self.timing("evaluation_critic"), activity.stage("examining the critic"):
            examiner = self.examiner(asked.futures)
            results: dict[str, Any] = {}
            heard: list[tuple[Transition, Sequence[Future]]] = []
            if asked.states:
                results = examine(
                    examiner,
                    episodes,
                    list(self.local_replay_buffer.episodes),
                    self.weight_version,
                    asked.states,
                    asked.branches,
                    partial(play_forks, self, group),
                    heard,
                    self.config.played_env,
                )
            figures, fixed = self._ask_about_fixed_states(examiner, episodes)
            log(self.metrics, {**results, **figures})
            self.examined(episodes, heard, fixed)
            self.writer.write_histograms(
                self.evaluated_iteration,
                {
                    "replay_buffer/priorities": self.local_replay_buffer.priorities,
                    "replay_buffer/ages": self.local_replay_buffer.ages(self.weight_version),
                },
            )

    def examined(
        self,
        episodes: Sequence[SingleAgentEpisode],
        asked: Sequence[tuple[Transition, Sequence[Future]]],
        fixed: Sequence[Refinement],
    ) -> None:
        """Hears what an evaluation found out, for whoever keeps it; nobody does here.

        Args:
            episodes: Of the evaluation.
            asked: Turns of them with the futures that the critic predicted.
            fixed: What it says of the states that every evaluation asks about.
        """

    def examiner(self, futures: int) -> Examiner:
        """Asks the critic as the algorithm does, with this number of futures for a turn."""
        env = (self.evaluation_config or self.config).played_env
        return Examiner(self.stages, env, self.config.seed or 0, futures)

    def _ask_about_fixed_states(
        self, examiner: Examiner, episodes: Sequence[SingleAgentEpisode]
    ) -> tuple[dict[str, Any], list[Refinement]]:
        """What the critic says today of turns that the first evaluation chose, also as text for TensorBoard."""
        if not self._fixed and (count := self.config.examination.fixed_states):
            drawn = examiner.transitions(examiner.draw(episodes, count))
            self._fixed = tuple(replace(t, following=()) for t in drawn)
        figures: dict[str, Any] = {}
        refinements = examiner.refine(self._fixed)
        for number, refinement in enumerate(refinements, start=1):
            name = f"state_{number}"
            self.writer.write_state(name, self.evaluated_iteration, refinement)
            figures[name] = {
                "predicts_success": float(predicts_success(refinement.futures)),
                "optimal": float(refinement.critique.optimal) if refinement.critique else float("nan"),
            }
        return ({"fixed": figures} if figures else {}), refinements

    @override(LanguageAlgorithm)
    def own_state(self) -> dict[str, Any]:
        """Also the states that every evaluation asks about."""
        return {**super().own_state(), FIXED_STATES: self._fixed}

    @override(LanguageAlgorithm)
    def set_own_state(self, state: dict[str, Any]) -> None:
        super().set_own_state(state)
        self._fixed = tuple(state.get(FIXED_STATES, ()))  # a checkpoint of an earlier version has none
