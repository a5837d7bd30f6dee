"""What a report advises: each rule speaks where it should and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from told_runs import GOOD, changed, evaluation, result, run_of

from rllib_nlac.diagnostics.results import Run, largest_k
from rllib_nlac.reporting.advice import RULES, advise


def _numbered(results: list[dict]) -> list[dict]:
    return [{**result, "training_iteration": number} for number, result in enumerate(results, start=1)]


# Each rule: a run in which it speaks, and one, as near as can be, in which it does not.
STAGES, CRITIC, PLAYED = "language_stages", "evaluation/critic", "evaluation/env_runners"


def several(run: Run, **figures) -> Run:
    for path, value in figures.items():
        run = changed(run, path.replace("__", "/"), value)
    return run


def critic(run: Run, place: int = -1, **figures: float) -> Run:
    for name, value in figures.items():
        run = changed(run, f"{CRITIC}/{name}", value, place)
    return run


def intervals(*three: tuple[float, float, float]) -> Run:
    """Success with its interval, of three evaluations."""
    run = GOOD
    for place, values in enumerate(three):
        for name, value in zip(("success_low", "success_rate", "success_high"), values, strict=True):
            run = changed(run, f"{PLAYED}/{name}", value, place)
    return run


def lost(run: Run, *places: int) -> Run:
    for place in places:
        run = changed(changed(run, "env_runners/success_rate", 0.0, place), f"{PLAYED}/success_rate", 0.0, place)
    return run


RULE_CASES = {
    "failed": (replace(GOOD, end="failed"), GOOD),
    "interrupted": (replace(GOOD, end="interrupted"), GOOD),
    "updates_stopped": (changed(GOOD, "learners/default_policy/num_stopped_steps", 1, 0), GOOD),
    "engine_differs": (changed(GOOD, "logprob_gap", 0.002), changed(GOOD, "logprob_gap", 0.0005)),
    "no_parsing": (
        changed(GOOD, f"{STAGES}/critique/unparsed_answer_rate", 0.11),
        changed(GOOD, f"{STAGES}/critique/unparsed_answer_rate", 0.09),
    ),
    "turns_unparsed": (
        changed(GOOD, "env_runners/action_parse_failures", 11),
        changed(GOOD, "env_runners/action_parse_failures", 9),
    ),
    "never_won": (lost(GOOD, 0, 1, 2), lost(GOOD, 0, 1)),
    "not_evaluated": (run_of(result(1, interval=None)), run_of(result(1, 0.5, evaluation(0.5)))),
    "fell_back": (
        intervals((0.2, 0.3, 0.4), (0.6, 0.7, 0.8), (0.4, 0.5, 0.59)),
        intervals((0.2, 0.3, 0.4), (0.6, 0.7, 0.8), (0.4, 0.5, 0.61)),
    ),
    "refinement_harms": (
        several(GOOD, evaluation__critic__refinement={"win_high": 0.49, "win_rate": 0.4, "num_decided": 80}),
        several(GOOD, evaluation__critic__refinement={"win_high": 0.51, "win_rate": 0.4, "num_decided": 60}),
    ),
    # 32 wins and 32 losses: the area's standard error by chance is 0.0727.
    "critic_knows_nothing": (critic(GOOD, auc=0.64, success=0.5), critic(GOOD, auc=0.645, success=0.5)),
    "critic_biased": (
        critic(GOOD, predicted_success=0.80, success=0.6),
        critic(GOOD, predicted_success=0.80, success=0.6, bias_error=0.11),
    ),
    "nothing_refined": (
        several(GOOD, language_stages__verdict_yes_rate=0.96),
        several(GOOD, language_stages__verdict_yes_rate=0.96, env_runners__success_rate=0.9),
    ),
    "policy_idle": (
        several(GOOD, language_stages__policy_trained_rate=0.04),
        several(GOOD, language_stages__policy_trained_rate=0.06),
    ),
    "less_variety": (
        changed(GOOD, "evaluation/repeated/pass_at_4", 0.2),
        changed(changed(GOOD, "evaluation/repeated/pass_at_4", 0.2), "evaluation/repeated/num_tasks", 3),
    ),
    "critic_forgets": (
        critic(GOOD, auc=0.5, success=0.6),
        critic(intervals((0.2, 0.3, 0.4), (0.2, 0.3, 0.4), (0.2, 0.3, 0.4)), auc=0.5, success=0.6),
    ),
    "still_rising": (
        intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.61, 0.7, 0.8)),
        intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.59, 0.7, 0.8)),
    ),
    "wide_interval": (
        intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.39, 0.5, 0.6)),
        intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.41, 0.5, 0.6)),
    ),
    "evaluation_costs": (
        several(changed(changed(GOOD, "seconds/evaluation", 6.0, 0), "seconds/evaluation", 6.0, 1), seconds__evaluation=3.1),
        several(changed(changed(GOOD, "seconds/evaluation", 6.0, 0), "seconds/evaluation", 6.0, 1), seconds__evaluation=2.9),
    ),
    "few_seeds": (GOOD, intervals((0.1, 0.2, 0.3), (0.2, 0.3, 0.4), (0.29, 0.4, 0.5))),
}


# Further runs at the edges of the rules, and whether each speaks.
RISING = intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.7, 0.8, 0.9))
EDGES = [
    ("never_won", replace(lost(GOOD, 0, 1, 2), results=[{**r, "learners": {}} for r in lost(GOOD, 0, 1, 2).results]), False),
    ("turns_unparsed", changed(RULE_CASES["turns_unparsed"][0], "env_runners/num_env_steps_sampled", 0), False),
    ("turns_unparsed", changed(RULE_CASES["turns_unparsed"][0], "env_runners/num_env_steps_sampled", 1), True),
    ("still_rising", intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.9, 0.96, 1.0)), False),  # there is not much left
    ("still_rising", intervals((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.8, 0.94, 1.0)), True),
    ("still_rising", replace(RISING, results=RISING.results[1:]), True),
    # Of six evaluations the fifth counts: the rise was over by then.
    ("still_rising", replace(RISING, results=_numbered([*RISING.results[:2], *[RISING.results[2]] * 4])), False),
    ("fell_back", replace(RULE_CASES["fell_back"][0], results=RULE_CASES["fell_back"][0].results[1:]), True),
    (
        "evaluation_costs",
        changed(run_of(*GOOD.results[:1]), "seconds/evaluation", 9.0),
        False,
    ),  # one says nothing of the interval
    (
        "evaluation_costs",
        several(changed(run_of(*GOOD.results[:2]), "seconds/evaluation", 8.0, 0), seconds__evaluation=8.0),
        True,
    ),
    # In bfloat16 both sides round: some tenths are healthy.
    ("engine_differs", several(GOOD, config__num_gpus_per_learner=1, logprob_gap=0.6), False),
    ("engine_differs", several(GOOD, config__num_gpus_per_learner=1, logprob_gap=1.1), True),
    ("engine_differs", several(GOOD, config__learner_model={"dtype": "bfloat16"}, logprob_gap=0.6), False),
    ("engine_differs", several(GOOD, config__engine_config={"dtype": "auto"}, logprob_gap=0.6), True),
    ("few_seeds", run_of(*GOOD.results[:2]), True),
    ("few_seeds", replace(GOOD, end="interrupted"), False),
    ("few_seeds", intervals((0.3, 0.4, 0.5), (0.1, 0.2, 0.3), (0.41, 0.5, 0.6)), False),  # from the first, not from the worst
    ("critic_biased", critic(GOOD, predicted_success=0.74, success=0.6), False),
    ("critic_biased", critic(GOOD, predicted_success=0.76, success=0.6), True),
    ("critic_biased", critic(GOOD, predicted_success=0.80, success=0.6, bias_error=0.09), True),
    ("critic_biased", critic(GOOD, predicted_success=0.80, success=0.6, num_states=30.0), True),
    ("nothing_refined", several(GOOD, language_stages__verdict_yes_rate=0.022), False),
    ("nothing_refined", several(GOOD, language_stages__verdict_yes_rate=0.01, env_runners__success_rate=0.19), False),
    ("nothing_refined", several(GOOD, language_stages__verdict_yes_rate=0.01, env_runners__success_rate=0.21), True),
    ("nothing_refined", several(GOOD, language_stages__verdict_yes_rate=0.94), False),
    ("less_variety", changed(run_of(*GOOD.results[:2]), "evaluation/repeated/pass_at_4", 0.1), True),
    ("less_variety", several(GOOD, evaluation__repeated__pass_at_4=0.29, evaluation__repeated__num_tasks=10**6), True),
    ("less_variety", several(GOOD, evaluation__repeated__pass_at_4=0.31, evaluation__repeated__num_tasks=10**6), False),
    ("less_variety", changed(RULE_CASES["less_variety"][0], "env_runners/success_rate", 0.1), True),  # that is of collecting
    ("less_variety", changed(RULE_CASES["less_variety"][0], f"{PLAYED}/success_rate", 0.1), False),  # all fell
]


class TestAdvice:
    def test_every_rule_has_its_case(self):
        assert {rule.__name__ for rule in RULES} == set(RULE_CASES)

    @pytest.mark.parametrize("rule", RULE_CASES)
    def test_a_rule_speaks_where_it_should_and_nowhere_else(self, rule):
        speaks, silent = ({each.rule for each in advise(run)} for run in RULE_CASES[rule])
        assert rule in speaks and rule not in silent

    @pytest.mark.parametrize(("rule", "run", "speaks"), EDGES, ids=[f"{n}-{rule}" for n, (rule, *_) in enumerate(EDGES)])
    def test_at_its_edges_too(self, rule, run, speaks):
        assert (rule in {each.rule for each in advise(run)}) is speaks

    def test_the_most_pressing_comes_first(self):
        run = changed(replace(GOOD, end="failed"), f"{STAGES}/future/unparsed_answer_rate", 0.5)
        assert [each.rule for each in advise(run)][:2] == ["failed", "no_parsing"]

    def test_the_words_fit_the_figures(self):
        def text(run: Run, rule: str) -> str:
            return next(each.text for each in advise(run) if each.rule == rule)

        enforced = changed(RULE_CASES["no_parsing"][0], "config/structured_answers", True)
        cut = changed(enforced, f"{STAGES}/critique/cut_off_rate", 0.1)
        assert text(cut, "no_parsing") == (
            "Of the critic's critiques 11% do not parse, most of them cut off: raise max_critique_tokens."
        )
        some = changed(enforced, f"{STAGES}/critique/cut_off_rate", 0.05)
        assert "see that the prompts suit the model" in text(some, "no_parsing")
        free = changed(cut, "config/structured_answers", False)
        assert text(free, "no_parsing") == (
            "Of the critic's critiques 11% do not parse: set structured_answers: true, so that the engine enforces their form."
        )
        turns = changed(RULE_CASES["turns_unparsed"][0], "env_runners/action_parse_failures_cut_off", 6)
        assert text(turns, "turns_unparsed") == "Of the policy's turns 11% do not parse: raise max_action_tokens."
        assert "see that action_format suits" in text(RULE_CASES["turns_unparsed"][0], "turns_unparsed")
        fell = RULE_CASES["fell_back"][0]
        assert "Success fell from 0.70 (iteration 2) to 0.50" in text(fell, "fell_back")
        assert text(changed(fell, f"{STAGES}/yes_success_rate", 0.09), "fell_back").endswith("and try a lower lr.")
        assert "or train_on_yes: never, for" in text(changed(fell, f"{STAGES}/yes_success_rate", 0.11), "fell_back")
        assert "hopes for more than comes: it predicts 0.80 where 0.60 came" in text(
            RULE_CASES["critic_biased"][0], "critic_biased"
        )
        less = critic(GOOD, predicted_success=0.3, success=0.6)
        assert "expects less than comes: it predicts 0.30 where 0.60 came" in text(less, "critic_biased")
        assert "before its first evaluation (evaluation_interval 5)" in text(run_of(result(1, interval=5)), "not_evaluated")
        none = several(GOOD, language_stages__verdict_yes_rate=0.01)
        assert "approves 1.0% of the actions although 75% of the episodes succeed" in text(none, "nothing_refined")

    def test_few_turns_say_nothing_of_the_critic(self):
        run = critic(GOOD, num_states=29.0, auc=0.5, predicted_success=0.9, success=0.1)
        assert {each.rule for each in advise(run)}.isdisjoint({"critic_knows_nothing", "critic_biased"})


@pytest.mark.parametrize(
    ("repeated", "k"),
    [
        ({"pass_at_1": 0.1, "pass_at_64": 0.2, "pass_at_100": 0.3, "num_tasks": 4}, 100),
        ({"pass_at_1": 0.1}, None),
        ({"pass_at_best": 1.0, "pass_at_²": 1.0}, None),
        (None, None),
        ("pass_at_4", None),
    ],
)
def test_the_largest_k_is_found_wherever_it_lies(repeated, k):
    assert largest_k(repeated) == k
