"""How well a trained critic predicts, beside the one that the run began with: ``python -m benchmarks.critic CHECKPOINT``.

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

from rllib_nlac.algorithm.calibration import auc, brier
from rllib_nlac.command.evaluate import evaluation_runner
from rllib_nlac.episode import episode_success
from rllib_nlac.learner.rl_module import served_state
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.branches import Prefix, play_branches
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.tiny.text_house import HORIZON, distance, next_of, progress_of
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
        turns: Of at least ``FOLDS`` episodes.
        episodes: Which one each is of, shape (N,); no turn is spoken of by what was learned of its own.
        came: Whether it came true; shape (N,).

    Returns:
        Shape (N,); the mean where all are alike.
    """
    if len(set(came.tolist())) < 2:
        return np.full(len(turns), float(np.mean(came)))
    texts = [f"{turn.state[-1].content} does {turn.action}" for turn in turns]
    words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\w+", binary=True)
    model = make_pipeline(words, LogisticRegression(C=0.1, max_iter=2000))
    return cross_val_predict(model, texts, came, groups=episodes, cv=GroupKFold(FOLDS), method="predict_proba")[:, 1]


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
    episodes = runner.sample_tasks(range(arguments.episodes))
    every = [[transition_at(str(algorithm.config.env), episode, t, 0) for t in range(len(episode))] for episode in episodes]
    rng = np.random.default_rng(arguments.seed)
    places = [(e, t) for e, steps in enumerate(every) for t in range(len(steps))]
    drawn = [places[i] for i in rng.permutation(len(places))[: arguments.pairs]]
    transitions = [every[e][t] for e, t in drawn]
    outcomes = {"success": np.array([t.episode_success for t in transitions])}
    says: dict[str, Callable[[Future], bool]] = {"success": lambda future: future.success}
    truths = [next_progress(every[e][t:]) for e, t in drawn] if str(algorithm.config.env) == "TextHouse" else []
    if truths:
        outcomes["progress"] = np.array([truth is not None for truth in truths])
        says["progress"] = lambda future: distance(future.text) <= HORIZON
    if algorithm.config.lora is None:  # else they are the base
        dtype = algorithm.config.model_settings["dtype"]
        initial = AutoModelForCausalLM.from_pretrained(algorithm.config.model_path, dtype=dtype)
        algorithm.engine.set_weights(Weights.INITIAL, 0, served_state(initial))
    examiner = algorithm.examiner(arguments.k)
    print(f"{len(transitions)} turns of {len(episodes)} episodes, k = {arguments.k}")
    for what, labels in outcomes.items():
        print(f"{what} follows {labels.mean():.3f} of them; to say that always has a Brier score of {labels.var():.3f}")
    for name, weights in (("trained", Weights.POLICY), ("initial", Weights.INITIAL)):
        futures = examiner.predict(transitions, weights)
        line = f"{name:8s}"
        for what, labels in outcomes.items():
            scores = np.array([statistics.mean(map(says[what], fs)) if fs else labels.mean() for fs in futures])
            line += f" {what}: AUC {auc(scores, labels):.3f}  Brier {brier(scores, labels):.3f}  mean {scores.mean():.3f} "
        if truths:
            hits = [
                statistics.mean(named(f) == truth for f in fs) if fs else 0.0
                for truth, fs in zip(truths, futures, strict=True)
                if truth
            ]
            line += f" named {statistics.mean(hits):.3f} of {len(hits)}" if hits else ""
        print(line, flush=True)
    left = -np.array([t for _, t in drawn])
    print(f"turns left success: AUC {auc(left, outcomes['success']):.3f}")
    seen = [turn for steps in every for turn in steps]
    chances = told_by_words(seen, [e for e, _ in places], np.array([turn.episode_success for turn in seen]))
    of_drawn = np.array([chances[places.index(place)] for place in drawn])
    line = f"AUC {auc(of_drawn, outcomes['success']):.3f}  Brier {brier(of_drawn, outcomes['success']):.3f}"
    print(f"words success: {line}", flush=True)
    if arguments.branches:
        shares = played_on(runner, [(episodes[e], t) for e, t in drawn], arguments.branches, rng)
        known = ~np.isnan(shares)
        of_open = outcomes["success"][known]
        spread = f"of {known.sum()} turns that are not the last; wins by {shares[known].mean():.3f} of the games"
        print(f"played on success: AUC {auc(shares[known], of_open):.3f}  Brier {brier(shares[known], of_open):.3f}  {spread}")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
