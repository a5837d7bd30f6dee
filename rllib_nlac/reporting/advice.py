"""What to try next: rules that follow from what a run measured, each with the figures on which it rests.

A rule speaks only where its figures are there and say more than chance does; the page "Reading a run" has the ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllib_nlac.diagnostics.results import Run
from rllib_nlac.diagnostics.rules import Rule, critic_biased, critic_forgets, fell_back, less_variety
from rllib_nlac.reporting import critic_rules, run_rules


@dataclass(frozen=True)
class Advice:
    """One thing to try.

    Attributes:
        rule: Name of the rule that speaks.
        text: What was seen, and what to do; figures and keys alone, nothing that somebody else wrote.
    """

    rule: str
    text: str


RULES: tuple[Rule, ...] = (
    run_rules.failed,
    run_rules.interrupted,
    run_rules.updates_stopped,
    run_rules.engine_differs,
    critic_rules.no_parsing,
    run_rules.turns_unparsed,
    run_rules.never_won,
    run_rules.not_evaluated,
    fell_back,
    critic_rules.refinement_harms,
    critic_rules.critic_knows_nothing,
    critic_biased,
    critic_forgets,
    critic_rules.nothing_refined,
    critic_rules.policy_idle,
    less_variety,
    run_rules.still_rising,
    run_rules.wide_interval,
    run_rules.evaluation_costs,
    run_rules.few_seeds,
)


def advise(run: Run) -> list[Advice]:
    """What follows from a run, the most pressing first; never nothing."""
    found = [Advice(rule.__name__, text) for rule in RULES if (text := rule(run))]
    if not found:
        text = "Nothing stands out. Run other seeds: what is chance here, and what is not, one run does not tell."
        return [Advice("nothing", text)]
    return found
