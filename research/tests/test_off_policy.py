"""The plans of research/off_policy.py: what is learned from, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.off_policy import late_by, planned, table

QUICK_START = Path("tuned_examples/twenty_questions_nlac.yaml")


class Numbered:
    """An algorithm whose every iteration plays its own number."""

    def __init__(self) -> None:
        self.iteration, self.learned = 0, []
        self.setup(None)

    def setup(self, config) -> None: ...

    def collect(self):
        return [self.iteration]

    def training_step(self) -> None:
        self.learned.append(self.collect())

    def train(self, iterations: int) -> list[list[int]]:
        for _ in range(iterations):
            self.training_step()
            self.iteration += 1
        return self.learned


@pytest.mark.parametrize(
    ("late", "playing", "expected"),
    [
        (0, 5, [[0], [1], [2], [3], [4]]),
        (2, 5, [[0], [1], [2]]),
        (0, 2, [[0], [1], [], [], []]),
        (1, 3, [[0], [1], [2], []]),
    ],
)
def test_what_each_iteration_learns_from(late, playing, expected):
    assert late_by(Numbered, late, playing)().train(5) == expected


def test_smaller_iterations_play_and_draw_as_much_in_all():
    whole, count = planned(QUICK_START, "as it is", 3)
    parts, times = planned(QUICK_START, "1 late, smaller", 3)
    assert (count, times) == (8, 16) and whole.seed == parts.seed == 3
    assert 2 * parts.episodes_per_iteration == whole.episodes_per_iteration
    assert 2 * parts.total_train_batch_size == whole.total_train_batch_size
    assert parts.evaluation_interval == 2 * whole.evaluation_interval


def test_more_updates_draw_more_for_as_many_episodes():
    whole, _ = planned(QUICK_START, "as it is", 0)
    more, _ = planned(QUICK_START, "4 updates", 0)
    assert more.total_train_batch_size == 4 * whole.total_train_batch_size
    assert more.episodes_per_iteration == whole.episodes_per_iteration


def test_an_unknown_plan_is_refused():
    with pytest.raises(ValueError, match="no plan is called 'never'; plans are called as in 'as it is', 'stop at 4'"):
        planned(QUICK_START, "never", 0)


def test_the_table_has_the_mean_and_each_seed():
    row = {"example": "a", "plan": "1 late", "iteration": 4, "episodes": 64, "gradient_steps": 8, "seconds": 1.0}
    rows = [row | {"seed": seed, "success": success, "generated_tokens": 10.0} for seed, success in ((1, 0.5), (0, 0.25))]
    assert table(rows).splitlines()[-1] == "| a | 1 late | 4 | 64 | 8 | 0.375 (0.250, 0.500) | 10 |"
