"""What an evaluation asks the critic: how well futures tell success, what advice is worth, and a few states for a reader.

All of it uses seeds of its own and trains nothing, so that the run itself does not change.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import EVALUATION_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.activity import activity
from rllib_nlac.diagnostics.calibration import by_size, comparison, figures, reliability
from rllib_nlac.diagnostics.record import Line, age, moment, opinion
from rllib_nlac.diagnostics.recorder import Recorder
from rllib_nlac.episode import episode_success, task_of, task_seed_of
from rllib_nlac.language.critique import predicts_success
from rllib_nlac.language.prediction import predicted_success, prediction_stage
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import Future, Refinement, Transition, Weights, hash_seed

CRITIC = "critic"  # the results of all this, below those of the evaluation
SEED = 27
FIXED_STATES = "fixed_states"  # key of its part of a checkpoint
ANSWERS_PER_TRANSITION = 5  # a', d', d, critique and a_r, of which an iteration asks for a sampled transition
LEAST_STATES, MOST_STATES = 8, 64  # turns, where the configuration leaves their number out
Place = tuple[SingleAgentEpisode, int]  # an episode and one of its steps


@dataclass(frozen=True)
class ExaminationSettings:
    """What evaluation asks the critic; each field is a key of ``evaluation_critic``.

    Attributes:
        states: Number of turns drawn from the evaluation's episodes, and as many from the replay buffer. What is predicted for
            each is compared with how its episode ended. 0: none. None: 64, or fewer where that would take more than an eighth
            of the answers that the iterations between two evaluations ask for.
        futures: Futures sampled for each turn; the share that predicts success is the predicted chance.
        fixed_states: Number of turns of the first evaluation that every later one asks about again. ``rllib inspect`` shows
            futures, critique and refined action. 0: none.
        branches: Where refinement changes the action of a drawn turn, the game is played to its end from there this many times
            with each of the two actions, which tells how often the refined one does better. At most one turn of an episode.
            The environment must answer alike after a reset with the same seed. 0: none.
    """

    states: int | None = None
    futures: int = 4
    fixed_states: int = 3
    branches: int = 0

    def resolved(self, batch: int, evaluation_interval: int | None) -> ExaminationSettings:
        """The same with a number of turns.

        Args:
            batch: Transitions of an iteration.
            evaluation_interval: Iterations between two evaluations.
        """
        if self.states is not None:
            return self
        answers = ANSWERS_PER_TRANSITION * batch * (evaluation_interval or 1)
        # Each turn takes this many futures, and as many turns are taken from the replay buffer.
        affordable = answers // (8 * 2 * self.futures)
        return replace(self, states=max(LEAST_STATES, min(MOST_STATES, affordable)))


class Examiner:
    """Asks the critic of an algorithm about turns of whole episodes.

    Args:
        stages: The algorithm's; what they draw and how often they refine is left alone.
        env: Name of the environment, for episodes that name none.
        seed: Seeds the draws and all requests.
        futures: Asked of each turn.
    """

    def __init__(self, stages: LanguageStages, env: str, seed: int, futures: int) -> None:
        self._stages = copy.copy(stages)
        # One round whose refined action is not judged again; its reasoning need not fit for training.
        self._stages.settings = replace(stages.settings, num_refinements=1, rejected_weight=1.0, reasoning=None)
        self._stages.purpose = "evaluation_critic"
        self._env, self._seed, self._k = env, seed, futures

    def draw(self, episodes: Sequence[SingleAgentEpisode], count: int) -> list[Place]:
        """Up to ``count`` turns, drawn uniformly without replacement."""
        places = [(episode, t) for episode in episodes for t in range(len(episode))]
        order = np.random.default_rng([SEED, self._seed]).permutation(len(places))[:count]
        return [places[i] for i in order]

    def transitions(self, places: Sequence[Place], env: str | None = None) -> list[Transition]:
        """The turns as the stages take them; ``env`` is theirs, where another than evaluation's."""
        return [replace(transition_at(env or self._env, episode, t), id=i) for i, (episode, t) in enumerate(places)]

    def predict(self, transitions: Sequence[Transition], weights: Weights | None = None) -> list[tuple[Future, ...]]:
        """The futures of each turn, those that parse.

        Args:
            transitions: The turns.
            weights: Which predict; None: those that do in training.
        """
        asked = weights if weights is not None else self._stages.variant.future_weights
        prompts = [self._stages.prompts_for(t.env) for t in transitions]
        stage = prediction_stage(transitions, prompts, self._stages.settings.future, self._k, asked)
        return self._drive(stage, len(transitions))

    def refine(self, transitions: Sequence[Transition]) -> list[Refinement]:
        """Futures, critique and refined action of each turn, as in the first round of training."""
        self._stages.rng = np.random.default_rng([SEED, self._seed])
        return self._drive(self._stages.improvement(transitions, StageReport()), len(transitions))

    def _drive(self, stage: Any, count: int) -> list[Any]:
        if not count:
            return []
        (result,) = self._stages.drive(StageReport(), stage, seeds=[hash_seed(SEED, self._seed, i) for i in range(count)])
        return result


def predictions(
    transitions: Sequence[Transition], futures: Sequence[Sequence[Future]]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """What was predicted and what came, of the turns with a future that parses.

    Returns:
        The predicted chances of success and whether it was one, shape (M,); and which turns these are.
    """
    chances = [predicted_success(own) for own in futures]
    known = [i for i, chance in enumerate(chances) if chance is not None]
    predicted = np.array([chances[i] for i in known], float)
    return predicted, np.array([transitions[i].episode_success for i in known], bool), known


def calibration(
    transitions: Sequence[Transition], futures: Sequence[Sequence[Future]], sizes: Sequence[int | None], name: str
) -> dict[str, Any]:
    """The figures of a set of turns, nested as in the results.

    Args:
        transitions: The turns.
        futures: The futures that the critic predicted for each turn.
        sizes: A number for each turn, by which the figures are given too; None where nobody knows it.
        name: What the sizes are, as in the key ``by_NAME``: "turn" or "age".
    """
    predicted, came, known = predictions(transitions, futures)
    curve = reliability(predicted, came)
    sized = [(place, size) for place, i in enumerate(known) if (size := sizes[i]) is not None]
    places = np.array([place for place, _ in sized], int)
    parts = {bin_: places[own] for bin_, own in by_size([size for _, size in sized]).items()}
    unparsed = 1 - len(known) / len(transitions) if transitions else math.nan
    return {
        **figures(predicted, came),
        "unparsed_rate": unparsed,
        f"by_{name}": {
            bin_: {key: value for key, value in figures(predicted[own], came[own]).items() if key in OF_PARTS}
            for bin_, own in parts.items()
        },
        "reliability": {"predicted": curve.predicted, "came": curve.came, "count": curve.count},
    }


OF_PARTS = ("num_states", "auc", "brier", "predicted_success", "success")


def forks_of(places: Sequence[Place], refinements: Sequence[Refinement], count: int) -> list[Start]:
    """How the game goes on from each turn: ``count`` times with its action, and as often with the refined one.

    One turn of a task is taken at most, and only where refinement changed the action. Both go on with the same seeds.
    """
    starts: list[Start] = []
    taken: set[int | str] = set()
    for number, ((episode, t), refinement) in enumerate(zip(places, refinements, strict=True)):
        refined = refinement.generation
        if refined is None or refinement.kept or task_of(episode) in taken:
            continue
        taken.add(task_of(episode))
        judged = refinement.transition.generation  # of the action that was played, or an ablation's own
        for arm, turn in (("action", judged), ("refined", refined)):
            for branch in range(count):
                seed = hash_seed(SEED, task_seed_of(episode), t, branch)
                name = f"fork-{number:06d}-{arm}-{branch:04d}"
                starts.append(Start(name, task_seed_of(episode), seed, (episode, t), turn, role="evaluation"))
    return starts


def compared(episodes: Sequence[SingleAgentEpisode], starts: Sequence[Start]) -> dict[str, float]:
    """What came of the forks; a turn of which a fork was lost is left out.

    Args:
        episodes: Those that were played to the end.
        starts: All that were asked for, as many of each turn's action as of its refined one.
    """
    won: dict[str, dict[str, list[bool]]] = {}
    for episode in episodes:
        _, number, arm, _ = episode.id_.split("-")
        won.setdefault(number, {}).setdefault(arm, []).append(episode_success(episode))
    asked = Counter(start.name.split("-")[1] for start in starts)
    whole = [arms for number, arms in won.items() if sum(map(len, arms.values())) == asked[number]]
    figures_ = comparison(np.array([np.mean(a["action"]) for a in whole]), np.array([np.mean(a["refined"]) for a in whole]))
    return {**figures_, "num_lost": float(len(asked) - len(whole))}


def log(metrics: MetricsLogger, values: Mapping[str, Any]) -> None:
    """Books nested figures below ``evaluation/critic``; lists as they stand.

    Metrics (evaluation/critic):
        auc: Probability that a turn of a won episode has a higher predicted chance than one of a lost episode. 0.5 is chance.
            For more: `num_epochs`, `judged_fraction`.
        brier, brier_of_base_rate: Mean squared error of the predicted chance, and that of always predicting the mean, which
            should be larger.
        ece, reliability/predicted, reliability/came, reliability/count: Mean distance of predicted chance and outcome; by bins:
            its mean, the share of successes, the number of turns.
        predicted_success, success, bias_error: Means of predicted chance and outcome, and the standard error of their
            difference. Far apart, old play misleads the critic: smaller `capacity`.
        unparsed_rate: Share of turns without a future that parses.
        by_turn/...: The same figures by turn: 1, 2 to 3, 4 to 7 and so on. They should be best near the end.
        replayed/...: The same figures for turns in the buffer, also by the age of the weights that played them.
        refinement/win_rate, refinement/win_low, refinement/win_high: With `branches`: where playing on from the played and from
            the refined action ends differently, the share in which the refined one did better.
        refinement/gain, refinement/gain_low, refinement/gain_high: Mean difference of success between refined and played
            action, with its interval.
        refinement/num_states, refinement/num_decided, refinement/num_lost: Turns whose action was changed, those whose outcomes
            differ, and those left out because a continuation was lost.
        refinement/success_of_action, refinement/success_of_refined: Success after each of the two.
        fixed/...: What the critic says of the same few turns at every evaluation: `predicts_success`, `optimal`. Their texts
            are on the page of `rllib inspect`.
        one_class, num_states: 1 if all turns are of won episodes or all of lost ones, so that `auc` is NaN; the number of
            turns.
    """
    summary = MetricsLogger(root=False)
    _log(summary, values, ())
    metrics.aggregate([summary.reduce()], key=(EVALUATION_RESULTS, CRITIC))


def _log(metrics: MetricsLogger, values: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _log(metrics, value, (*path, name))
        elif isinstance(value, list):
            metrics.log_value((*path, name), value, reduce="item")
        else:
            metrics.log_value((*path, name), value, window=1)


def examine(
    examiner: Examiner,
    episodes: Sequence[SingleAgentEpisode],
    replayed: Sequence[SingleAgentEpisode],
    version: int,
    states: int,
    branches: int,
    play: Callable[[Sequence[Start]], list[SingleAgentEpisode]],
    asked: list[tuple[Transition, Sequence[Future]]] | None = None,
    trained_env: str | None = None,
) -> dict[str, Any]:
    """All figures of one evaluation, nested as in the results.

    Args:
        examiner: Asks the critic.
        episodes: Episodes of the evaluation, played by the current policy.
        replayed: Episodes of the replay buffer.
        version: Version of the current weights.
        states: Number of turns that are examined of either set.
        branches: Continuations of an action and of its refined one; 0: none.
        play: Plays them.
        asked: Takes the turns of the evaluation's episodes, with what was predicted of each.
        trained_env: Name of the environment that is replayed, where evaluations play another.
    """
    results: dict[str, Any] = {}
    places = examiner.draw(episodes, states)
    fresh = examiner.transitions(places)
    futures = examiner.predict(fresh)
    if asked is not None:
        asked += zip(fresh, futures, strict=True)
    results |= calibration(fresh, futures, [t + 1 for _, t in places], "turn")
    old = examiner.transitions(examiner.draw(replayed, states), trained_env)
    if old:
        ages = [None if (born := age(t, version)) is None else max(born, 0) for t in old]
        results["replayed"] = calibration(old, examiner.predict(old), ages, "age")
    if branches:
        starts = forks_of(places, examiner.refine(fresh), branches)
        results["refinement"] = compared(play(starts), starts)
    return results


class CriticExamination:
    """Examines the critic of an algorithm in every evaluation.

    Args:
        algorithm: The algorithm, with ``stages``, ``watch``, ``metrics`` and ``local_replay_buffer``.
        recorder: Keeps what is found.
        play_forks: Plays episodes that begin with the first turns of others, on the runners of a group.

    Attributes:
        fixed: Turns that every evaluation asks about; the first one chooses them. They are part of a checkpoint.
    """

    def __init__(
        self,
        algorithm: Any,
        recorder: Recorder,
        play_forks: Callable[[EnvRunnerGroup | None, Sequence[Start]], list[SingleAgentEpisode]],
    ) -> None:
        self._algorithm, self._recorder, self._play_forks = algorithm, recorder, play_forks
        self.fixed: tuple[Transition, ...] = ()

    def __call__(self, episodes: Sequence[SingleAgentEpisode], group: EnvRunnerGroup | None) -> None:
        """Asks the critic about turns of an evaluation's episodes; see ``ExaminationSettings``.

        Args:
            episodes: Episodes that the current policy has just played.
            group: Runners that play in evaluations; None: the algorithm's own runner.
        """
        algorithm = self._algorithm
        asked, buffer, version = algorithm.config.examination, algorithm.local_replay_buffer, algorithm.weight_version
        with algorithm.watch.timing("evaluation_critic"), activity.stage("examining the critic"):
            examiner = self.examiner(asked.futures)
            results: dict[str, Any] = {}
            heard: list[tuple[Transition, Sequence[Future]]] = []
            if asked.states:
                results = examine(
                    examiner,
                    episodes,
                    list(buffer.episodes),
                    version,
                    asked.states,
                    asked.branches,
                    partial(self._play_forks, group),
                    heard,
                    algorithm.config.played_env,
                )
            figures, fixed = self._ask_about_fixed_states(examiner, episodes, asked.fixed_states)
            log(algorithm.metrics, {**results, **figures})
            self._recorder.evaluation(algorithm.watch.evaluated_iteration, episodes, heard, fixed)

    def examiner(self, futures: int) -> Examiner:
        """Asks the critic as the algorithm does, with this number of futures for a turn."""
        config = self._algorithm.config
        env = (self._algorithm.evaluation_config or config).played_env
        return Examiner(self._algorithm.stages, env, config.seed or 0, futures)

    def _ask_about_fixed_states(
        self, examiner: Examiner, episodes: Sequence[SingleAgentEpisode], count: int
    ) -> tuple[dict[str, Any], list[Line]]:
        """Asks about the fixed turns.

        Returns:
            Figures, nested as in the results, and a line of the record for each turn.
        """
        if not self.fixed and count:
            drawn = examiner.transitions(examiner.draw(episodes, count))
            self.fixed = tuple(replace(t, following=()) for t in drawn)
        refinements = examiner.refine(self.fixed)
        figures = {
            f"state_{number}": {
                "predicts_success": float(predicts_success(refinement.futures)),
                "optimal": float(refinement.critique.optimal) if refinement.critique else float("nan"),
            }
            for number, refinement in enumerate(refinements, start=1)
        }
        lines = [{**moment(refinement.transition), **opinion(refinement)} for refinement in refinements]
        return ({"fixed": figures} if figures else {}), lines
