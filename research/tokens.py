"""What an example's tokens go to, and where they could be saved: ``python -m research.tokens [--iterations 4]``.

The quick start and the text house, each as it is and with settings that spend less, for a few iterations without evaluation.
Figures are generated tokens by role, in a unit that is the same in all columns: for each transition that the example itself
replays, 512 an iteration. What settings do to success is not asked here: that is ``make compare``'s. Nothing is recorded.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"
Setting = Mapping[str, Any]
HALF = {"num_next_actions": 1, "judged_fraction": 0.25}
# Of each example what is tried beside what it says; with half the batch each transition is trained on twice as often.
WORLDS: dict[str, tuple[str, tuple[Setting, ...]]] = {
    "quick_start": (
        "twenty_questions_nlac",
        ({}, {"judged_fraction": 0.5}, {"train_batch_size_per_learner": 256, "num_epochs": 2}),
    ),
    "house": (
        "text_house_nlac",
        (
            {},
            {"num_next_actions": 1},
            {"num_refinements": 2},
            {"judged_fraction": 0.25},
            HALF,
            {"train_batch_size_per_learner": 256, "num_epochs": 10},
            {**HALF, "train_batch_size_per_learner": 256, "num_epochs": 10},
        ),
    ),
}


def config_of(example: str, setting: Setting) -> Any:
    """An example's configuration with other settings, without evaluation and what only that needs.

    Args:
        example: Its name.
        setting: Keys and values.
    """
    from rllib_nlac.algorithms import OURS
    from rllib_nlac.command.experiment import load_experiments

    (found,) = load_experiments(EXAMPLES / f"{example}.yaml")
    own = {**found.config, **setting, "evaluation_interval": None, "record": {"transitions": 0}}
    return OURS[found.run].get_default_config().update_from_dict(own)


def spent(config: Any, iterations: int) -> Counter[str]:
    """Generated tokens by role of so many iterations."""
    tokens: Counter[str] = Counter()
    algorithm = config.build_algo()
    try:
        for _ in range(iterations):
            tokens.update(algorithm.train()["tokens"])
    finally:
        algorithm.stop()
    return tokens


def table(settings: Sequence[Setting], found: Sequence[Mapping[str, int]], transitions: int) -> str:
    """As Markdown, a column for each setting.

    Args:
        settings: The first is the example's own.
        found: Tokens by role, of each.
        transitions: So many does the example replay meanwhile.
    """
    totals = [sum(tokens.values()) for tokens in found]
    by_cost = Counter[str]()
    for tokens in found:
        by_cost.update(tokens)
    names = [", ".join(f"`{key}: {value}`" for key, value in setting.items()) or "as it is" for setting in settings]
    lines = [f"| tokens of | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for role, cost in by_cost.most_common():
        if cost:
            cells = [
                f"{tokens.get(role, 0) / transitions:.1f} ({tokens.get(role, 0) / total:.0%})"
                for tokens, total in zip(found, totals, strict=True)
            ]
            lines.append(f"| `{role}` | {' | '.join(cells)} |")
    lines.append(f"| all | {' | '.join(f'{total / transitions:.1f}' for total in totals)} |")
    lines.append(f"| of the example's | {' | '.join(f'{total / totals[0]:.0%}' for total in totals)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--iterations", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.iterations < 1:
        parser.error("--iterations must be at least 1")
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    for world in arguments.worlds:
        example, settings = WORLDS[world]
        configs = [config_of(example, setting) for setting in settings]
        found = [spent(config, arguments.iterations) for config in configs]
        transitions = arguments.iterations * configs[0].train_batch_size_per_learner
        print(f"\n{example}, {arguments.iterations} iterations\n\n{table(settings, found, transitions)}", flush=True)


if __name__ == "__main__":
    main()
