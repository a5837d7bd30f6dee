"""How well a trained critic predicts, beside the one that the run began with: ``python -m research.critic CHECKPOINT``.

The checkpoint's policy plays; of its turns some are drawn, and both critics say of each k futures. Success: the share of
futures that predict it, against what the episode came to (area under the ROC curve, Brier score, and that of a predictor that
always says the mean). Beside them what playing on tells: from each of these turns, its action included, the policy plays to the
end some times more, and the share of wins is the prediction. Nobody can know more than that, but for the noise of so few games.
And what the number of turns that are left tells, and what a logistic regression on the words that the critic sees tells of
other episodes than it learned from. In the text house the same of progress, a key taken or a chest opened, by the
command or within the four after it, which is as far as its futures look; and how often a future names that key or chest, where
there is one.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)

import numpy as np
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from transformers import AutoModelForCausalLM

from research.tiny.text_house import HORIZON, distance, next_of, progress_of
from rllib_nlac.command.evaluate import evaluation_runner
from rllib_nlac.diagnostics.calibration import auc, brier
from rllib_nlac.episode import episode_success
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.branches import Prefix, play_branches
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Future, Transition, Weights


def next_progress(steps: Sequence[Transition]) -> str | None:
    """What a perfect future would name, within its horizon; "... later" where it is not the immediate reply. None: nothing."""
    for number, step in enumerate(steps[: HORIZON + 1]):
        if made := progress_of(step.observation):
            return made if number == 0 else f"{made} later"
    return None


def named(future: Future) -> str:
    """What a future names, in the same form."""
    return next_of(future.text) if distance(future.text) == 0 else f"{next_of(future.text)} later"


def played_on(runner: TextEnvRunner, turns: Sequence[Prefix], count: int, rng: np.random.Generator) -> np.ndarray:
    """Share of wins of so many games that go on after each turn; NaN where the turn was the last one. Shape (N,)."""
    shares = np.full(len(turns), np.nan)
    open_ = [i for i, (episode, t) in enumerate(turns) if t + 1 < len(episode)]
    branches = play_branches([(turns[i][0], turns[i][1] + 1) for i in open_], count, rng, runner.play_forks)
    for i, own in zip(open_, branches, strict=True):
        if own:
            shares[i] = statistics.mean(map(episode_success, own))
    return shares


FOLDS = 5  # parts of the episodes; what is said of each was learned of the others


def told_by_words(turns: Sequence[Transition], episodes: Sequence[int], came: np.ndarray) -> np.ndarray:
    """The chance that a linear model gives each turn, by the words and pairs of words of what was seen last and of the action.

    Args:
        turns: Turns of at least ``FOLDS`` episodes.
        episodes: Which one each is of, shape (N,); no turn is spoken of by what was learned of its own.
        came: Whether it came true; shape (N,).

    Returns:
        Shape (N,); the mean where those that it would learn of are all alike, as with one lost game among won ones.
    """
    parts = list(GroupKFold(FOLDS).split(came, groups=episodes))
    if any(len(np.unique(came[others])) < 2 for others, _ in parts):
        return np.full(len(turns), float(np.mean(came)))
    texts = [f"{turn.state[-1].content} does {turn.action}" for turn in turns]
    words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\w+", binary=True)
    model = make_pipeline(words, LogisticRegression(C=0.1, max_iter=2000))
    return cross_val_predict(model, texts, came, cv=parts, method="predict_proba")[:, 1]


class Examination:
    """Turns of episodes that the policy has just played, and what is said of them.

    Args:
        algorithm: Trained.
        runner: Plays as its evaluations do.
        episodes: How many it plays.
        turns: How many of their turns are asked about.
        k: Futures of each.
        seed: Chooses the turns.
    """

    def __init__(self, algorithm: NLAC, runner: TextEnvRunner, episodes: int, turns: int, k: int, seed: int) -> None:
        self.algorithm, self.runner, self.k = algorithm, runner, k
        name = str(algorithm.config.env)
        self.episodes = runner.sample_tasks(range(episodes))
        self.every = [[transition_at(name, episode, t, 0) for t in range(len(episode))] for episode in self.episodes]
        self.rng = np.random.default_rng(seed)
        self.places = [(e, t) for e, steps in enumerate(self.every) for t in range(len(steps))]
        self.drawn = self.rng.permutation(len(self.places))[:turns]
        places = [self.places[i] for i in self.drawn]
        self.turns = [self.every[e][t] for e, t in places]
        self.left = -np.array([t for _, t in places])
        self.came = {"success": np.array([turn.episode_success for turn in self.turns])}
        self._says: dict[str, Callable[[Future], bool]] = {"success": lambda future: future.success}
        self._progress = [next_progress(self.every[e][t:]) for e, t in places] if name == "TextHouse" else []
        if self._progress:
            self.came["progress"] = np.array([made is not None for made in self._progress])
            self._says["progress"] = lambda future: distance(future.text) <= HORIZON

    def said_by(self, weights: Weights) -> tuple[dict[str, np.ndarray], float]:
        """The share of futures that predict each outcome, shape (N,), and that of those that name the progress that is made.

        The latter is the mean over the turns with progress, NaN where there is none.
        """
        if weights is Weights.INITIAL and self.algorithm.config.lora is None:  # else they are the base
            dtype = self.algorithm.config.model_settings["dtype"]
            initial = AutoModelForCausalLM.from_pretrained(self.algorithm.config.model_path, dtype=dtype)
            self.algorithm.engine.set_weights(Weights.INITIAL, 0, served_state(initial))
        futures = self.algorithm.examination.examiner(self.k).predict(self.turns, weights)
        shares = {
            what: np.array([statistics.fmean(map(says, own)) if own else self.came[what].mean() for own in futures])
            for what, says in self._says.items()
        }
        hits = [
            statistics.fmean(named(future) == made for future in own) if own else 0.0
            for made, own in zip(self._progress, futures, strict=False)
            if made
        ]
        return shares, statistics.fmean(hits) if hits else math.nan

    def told_by_words(self) -> np.ndarray:
        """The chance of success that a linear model of the words gives each turn, learned from all turns of other episodes."""
        seen = [turn for steps in self.every for turn in steps]
        came = np.array([turn.episode_success for turn in seen])
        return told_by_words(seen, [e for e, _ in self.places], came)[self.drawn]

    def told_by_playing_on(self, branches: int) -> np.ndarray:
        """The share of wins of so many games from each turn on, shape (N,); NaN of a last turn."""
        places = [self.places[i] for i in self.drawn]
        return played_on(self.runner, [(self.episodes[e], t) for e, t in places], branches, self.rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--k", type=int, default=24)
    parser.add_argument("--branches", type=int, default=8, help="games that are played on from each turn; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.episodes < FOLDS:
        parser.error(f"--episodes must be at least {FOLDS}, got {arguments.episodes}")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algorithm = Algorithm.from_checkpoint(str(arguments.checkpoint.absolute()))
    if not isinstance(algorithm, NLAC):
        parser.error(f"{arguments.checkpoint} is of {type(algorithm).__name__}, which has no such critic: give one of NLAC")
    runner = evaluation_runner(algorithm)
    if runner is None:
        parser.error(f"{arguments.checkpoint} is of logged dialogues alone, without an environment to play in")
    asked = Examination(algorithm, runner, arguments.episodes, arguments.pairs, arguments.k, arguments.seed)
    print(f"{len(asked.turns)} turns of {len(asked.episodes)} episodes, k = {arguments.k}")
    for what, came in asked.came.items():
        print(f"{what} follows {came.mean():.3f} of them; to say that always has a Brier score of {came.var():.3f}")
    for name, weights in (("trained", Weights.POLICY), ("initial", Weights.INITIAL)):
        shares, hits = asked.said_by(weights)
        line = f"{name:8s}"
        for what, said in shares.items():
            came = asked.came[what]
            line += f" {what}: AUC {auc(said, came):.3f}  Brier {brier(said, came):.3f}  mean {said.mean():.3f} "
        print(line + (f" named {hits:.3f}" if math.isfinite(hits) else ""), flush=True)
    won = asked.came["success"]
    print(f"turns left success: AUC {auc(asked.left, won):.3f}")
    chances = asked.told_by_words()
    print(f"words success: AUC {auc(chances, won):.3f}  Brier {brier(chances, won):.3f}", flush=True)
    if arguments.branches:
        shares_won = asked.told_by_playing_on(arguments.branches)
        known = ~np.isnan(shares_won)
        spread = f"of {known.sum()} turns that are not the last; wins by {shares_won[known].mean():.3f} of the games"
        score = f"AUC {auc(shares_won[known], won[known]):.3f}  Brier {brier(shares_won[known], won[known]):.3f}"
        print(f"played on success: {score}  {spread}")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
