"""What the critic is to know of wins: the loss that counts the outcome more, turns in view, and the table of rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import rllib_nlac
from research.remedies import FOUND, KINDS, OUTCOME_WEIGHT, HouseWithTurns, OutcomeLearner, outcome_losses, table
from research.rows import read
from rllib_nlac.engine.chat import Chat
from rllib_nlac.learner.batch import CRITIC, POLICY
from rllib_nlac.learner.learner import Answers
from rllib_nlac.learner.losses import successor_loss

RESEARCH = Path(__file__).parents[1]


def test_the_word_before_the_end_counts_more_and_every_other_token_as_before():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0, -8.0, -16.0], [-1.0, -2.0, -4.0, -8.0, -16.0]], requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    more = outcome_losses(logprobs, mask) - successor_loss(logprobs, mask)
    assert more.tolist() == [pytest.approx((OUTCOME_WEIGHT - 1) * 4 / 3), pytest.approx((OUTCOME_WEIGHT - 1) * 8 / 5)]
    outcome_losses(logprobs, mask).sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad * -1).tolist() == [
        pytest.approx([0, 1 / 3, OUTCOME_WEIGHT / 3, 1 / 3, 0]),
        pytest.approx([0.2, 0.2, 0.2, OUTCOME_WEIGHT / 5, 0.2]),
    ]


@pytest.mark.parametrize("outcome", ["SUCCESS", "FAILURE"])
def test_of_the_houses_model_that_word_is_the_outcome(outcome):
    chat = Chat.from_pretrained(str(Path(rllib_nlac.__file__).parent / "tiny" / "house_model"))
    ids = torch.tensor([chat.encode(f"library: blue key, then blue taken in two. {outcome}")])
    logprobs = torch.zeros(ids.shape, requires_grad=True)
    outcome_losses(logprobs, torch.ones_like(ids)).sum().backward()
    assert logprobs.grad is not None
    assert chat.decode(ids[0][logprobs.grad[0] < -1.5 / ids.shape[1]].tolist()) == outcome


def test_of_the_roles_only_the_critics_loss_changes():
    logprobs, mask = torch.tensor([[-1.0, -2.0, -4.0]] * 2), torch.ones(2, 3, dtype=torch.long)
    learner = OutcomeLearner.__new__(OutcomeLearner)
    learner._answers = lambda *_: Answers(logprobs, mask, None, torch.tensor([5.0, 5.0]))
    role = torch.tensor([CRITIC, POLICY])
    losses, kl = learner._sequence_losses({"ids": mask, "prompt_length": mask, "length": mask, "role": role})
    assert losses.tolist() == [pytest.approx((1 + 2 * OUTCOME_WEIGHT + 4) / 3), pytest.approx(7 / 3)]
    assert torch.as_tensor(kl).tolist() == [0.0, 5.0]


def test_the_house_says_how_many_turns_are_left_until_the_end():
    env = HouseWithTurns(depth=1, house=1, max_turns=3)
    env.reset(seed=0)
    said = [env.step("go to the hall")[0] for _ in range(3)]
    assert said[0].endswith(" 2 turns left.") and said[1].endswith(" 1 turns left.") and said[2].endswith(" No turns left.")


def test_the_gain_is_the_mean_over_the_runs_in_which_there_was_an_area():
    def row(seed: int, trained: float, untrained: float) -> dict:
        return {
            "remedy": "none",
            "seed": seed,
            **dict.fromkeys(FOUND, 0.5),
            "wins_trained": trained,
            "wins_untrained": untrained,
        }

    line = table([row(2, math.nan, math.nan), row(1, 0.8, 0.5), row(0, 0.6, 0.5)]).splitlines()[-1]
    assert line.startswith("| none | 0.600, 0.800, - | 0.500, 0.500, - | +0.200 | 0.500, 0.500, 0.500 |")
    assert table([row(0, math.nan, math.nan)]).splitlines()[-1].startswith("| none | - | - | - |")


def test_the_documents_table_is_that_of_the_rows_that_are_kept():
    assert table(read(RESEARCH / "rows" / "critic_of_wins.csv", KINDS)) in (RESEARCH / "comparison.md").read_text(
        encoding="utf-8"
    )
