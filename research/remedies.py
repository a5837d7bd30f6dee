"""What makes the critic know more of wins, and what that does to success: ``python -m research.remedies [--seeds 0 1 2]``.

NLAC in text house 4, two locks deep, as ``make compare`` has it, for 192 episodes, by when some games are won and some lost;
each remedy changes one thing. Then the policy plays 256 episodes, and of 400 of their turns the critic says k = 24 futures
each: how well do they tell the games that were won (area under the ROC curve)? The same is asked of the model that the run
began with, and of a linear model of the words that the critic sees. The games are other ones in each run, so areas are to be
compared within a row.

A run's row is in the CSV as soon as it has ended, and runs that are there are not run again. ``--rows CSV`` prints the table
of rows that are kept.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)

import torch

from research.compare_plan import HERE, Plan
from research.critic import Examination
from research.rows import Row, apart, generated_tokens, read, write
from rllib_nlac.command.evaluate import evaluation_runner
from rllib_nlac.diagnostics.calibration import auc, brier
from rllib_nlac.envs.registry import register
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.learner.batch import CRITIC, POLICY
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.learner.losses import answer_mean, refinement_loss
from rllib_nlac.nlac import NLAC
from rllib_nlac.types import Weights

WORLD, EPISODES = "house_4", 192
PLAYED, TURNS, FUTURES = 256, 400, 24
OUTCOME_WEIGHT = 10.0
FOUND = (
    "success",
    "wins_trained",
    "wins_untrained",
    "wins_words",
    "wins_left",
    "brier_trained",
    "brier_untrained",
    "progress_trained",
    "progress_untrained",
    "generated_tokens",
    "seconds",
)
KINDS = {"remedy": str, "seed": int, **dict.fromkeys(FOUND, float)}


def outcome_losses(logprobs: torch.Tensor, answer_mask: torch.Tensor) -> torch.Tensor:
    """As ``successor_loss``, with a weight of ``OUTCOME_WEIGHT`` on the word before the end, SUCCESS or FAILURE; shape (B,)."""
    mask = answer_mask.to(logprobs.dtype)
    tokens_to_come = mask.flip(-1).cumsum(-1).flip(-1)
    return answer_mean(-logprobs * (1.0 + (OUTCOME_WEIGHT - 1.0) * (tokens_to_come == 2) * mask), answer_mask)


class OutcomeLearner(LanguageLearner):
    """The critic's loss counts the outcome's word more."""

    def _sequence_losses(self, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
        logprobs, mask, _, kl = self._answers(rows["ids"], rows["prompt_length"], rows["length"])
        role = rows["role"]
        losses = torch.where(role == CRITIC, outcome_losses(logprobs, mask), refinement_loss(logprobs, mask))
        return losses, (role == POLICY) * kl


class HouseWithTurns(TextHouse):
    """Says with every reply how many turns are left."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text, reward, terminated, truncated, info = super().step(action)
        if not terminated and not truncated:
            text = f"{text} {self.max_turns - info['turn']} turns left."
        return text, reward, terminated, truncated, info


#: Changes of the configuration, with ``learner_class`` and ``env`` for classes of their own.
REMEDIES: dict[str, dict[str, Any]] = {
    "none": {},
    "the outcome that came (Monte Carlo)": {"n_step": 1000},
    "the outcome's word counts ten times": {"learner_class": OutcomeLearner},
    "both": {"n_step": 1000, "learner_class": OutcomeLearner},
    "the policy's loss a third": {"policy_loss_coeff": 0.1},
    "the turns that are left in view": {"env": HouseWithTurns},
}


def outcome_of(remedy: str, seed: int) -> Row:
    """Trains, asks, and gives the row. To be called in a process of its own."""
    import ray

    changes = dict(REMEDIES[remedy])
    # By the same name, as the prompts go by it.
    register("TextHouse", changes.pop("env", TextHouse))
    learner_class = changes.pop("learner_class", LanguageLearner)
    experiment = Plan(HERE / "compare.yaml", Path()).cell(WORLD, "NLAC", seed).experiment
    settings = {**experiment["config"], "env": "TextHouse", **changes}
    settings["evaluation_interval"] = EPISODES // settings["episodes_per_iteration"]
    config = NLAC.get_default_config().update_from_dict(settings).training(learner_class=learner_class)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algorithm, tokens, started = config.build_algo(), 0.0, time.perf_counter()
    try:
        for _ in range(settings["evaluation_interval"]):
            result = algorithm.train()
            tokens += generated_tokens(result)
        seconds = time.perf_counter() - started
        asked = Examination(algorithm, evaluation_runner(algorithm), PLAYED, TURNS, FUTURES, 0)
        row = {"remedy": remedy, "seed": seed, "success": result["evaluation"]["env_runners"]["success_rate"]}
        won, made = asked.came["success"], asked.came["progress"]
        for name, weights in (("trained", Weights.POLICY), ("untrained", Weights.INITIAL)):
            shares, _ = asked.said_by(weights)
            row[f"wins_{name}"], row[f"brier_{name}"] = auc(shares["success"], won), brier(shares["success"], won)
            row[f"progress_{name}"] = auc(shares["progress"], made)
        row |= {"wins_words": auc(asked.told_by_words(), won), "wins_left": auc(asked.left, won)}
        row |= {"generated_tokens": tokens, "seconds": seconds}
        return {name: round(row[name], 3) if kind is float else row[name] for name, kind in KINDS.items()}
    finally:
        algorithm.stop()
        ray.shutdown()


def table(rows: Sequence[Row]) -> str:
    """As Markdown, a line a remedy."""
    lines = [
        "| changed | wins: trained | untrained | gain | the words | progress: trained | untrained | success | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for remedy in dict.fromkeys(row["remedy"] for row in rows):
        own = sorted((row for row in rows if row["remedy"] == remedy), key=lambda row: row["seed"])

        def each(name: str, own: Sequence[Row] = own) -> str:
            return ", ".join("-" if math.isnan(row[name]) else f"{row[name]:.3f}" for row in own)

        gains = [gain for row in own if not math.isnan(gain := row["wins_trained"] - row["wins_untrained"])]
        gain = f"{statistics.fmean(gains):+.3f}" if gains else "-"
        fields = [remedy, each("wins_trained"), each("wins_untrained"), gain, each("wins_words")]
        fields += [each("progress_trained"), each("progress_untrained"), each("success")]
        fields.append(f"{statistics.fmean(row['generated_tokens'] for row in own):,.0f}")
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remedies", nargs="+", choices=REMEDIES, default=list(REMEDIES), metavar="REMEDY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/remedies.csv"))
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    arguments = parser.parse_args()
    if arguments.rows:
        print(table(read(arguments.rows, KINDS)))
        return
    rows = read(arguments.out, KINDS) if arguments.out.exists() else []
    for seed in arguments.seeds:
        for remedy in arguments.remedies:
            if any((row["remedy"], row["seed"]) == (remedy, seed) for row in rows):
                continue
            rows.append(row := apart(outcome_of, remedy, seed))
            told = f"area {row['wins_trained']:.3f}, untrained {row['wins_untrained']:.3f}, success {row['success']:.3f}"
            print(f"{remedy}, seed {seed}: {told}", flush=True)
            write(arguments.out, KINDS, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
