"""What to try next, of what the critic and the refinement measured. Each rule: None, or what was seen and what to do."""

from __future__ import annotations

import math

from rllib_nlac.algorithm.model_defaults import SHIPPED_MODELS
from rllib_nlac.diagnostics.results import ROLES, WITH_FORM, Run, figure
from rllib_nlac.diagnostics.rules import CRITIC, critic_figures

STAGES = "language_stages"


def critic_knows_nothing(run: Run) -> str | None:
    """The critic does not tell wins from losses better than chance."""
    critic = critic_figures(run)
    if critic is None or math.isnan(area := critic["auc"]):
        return None
    wins = critic["success"] * critic["num_states"]
    losses = critic["num_states"] - wins
    if min(wins, losses) < 1 or area - 1.96 * math.sqrt((wins + losses + 1) / (12 * wins * losses)) > 0.5:
        return None
    return (
        f"The critic predicts who wins no better than chance (AUC {area:.2f}): try Monte Carlo targets (n_step: 1000), more "
        "training for it (num_epochs, or judged_fraction below 1), or longer futures (max_future_tokens)."
    )


def refinement_harms(run: Run) -> str | None:
    """Refined actions do worse than those that they replace."""
    if not run.evaluated:
        return None
    high, rate, count = (
        figure(run.evaluated[-1], f"{CRITIC}/refinement/{name}") for name in ("win_high", "win_rate", "num_decided")
    )
    if not high < 0.5:
        return None
    return (
        f"Refined actions do worse than the played ones: of {count:.0f} turns where it mattered they won {rate:.2f}. Try "
        "judge_weights: initial, or rejected_weight below 1, so that what the critic does not accept counts little."
    )


def nothing_refined(run: Run) -> str | None:
    """The critic is content with everything, or with nothing."""
    rate = figure(run.last, f"{STAGES}/verdict_yes_rate")
    success = figure(run.last, run.score) if run.measures_success else math.nan
    if rate > 0.95 and success < 0.8:
        return f"The critic approves {rate:.0%} of the actions although {success:.0%} of the episodes succeed: read critiques."
    if rate < 0.02 and success > 0.2:
        return f"The critic approves {rate:.1%} of the actions although {success:.0%} of the episodes succeed: read critiques."
    return None


def no_parsing(run: Run) -> str | None:
    """Answers that do not parse are lost."""
    worst, name = 0.1, ""
    for role in ROLES:
        if (rate := figure(run.last, f"{STAGES}/{role}/unparsed_answer_rate")) > worst:
            worst, name = rate, role
    if not name:
        return None
    what, limit = ROLES[name]
    if name in WITH_FORM and not _is_structured(run):
        return f"Of the {what} {worst:.0%} do not parse: set structured_answers: true, so that the engine enforces their form."
    if 2 * figure(run.last, f"{STAGES}/{name}/cut_off_rate") > worst:
        return f"Of the {what} {worst:.0%} do not parse, most of them cut off: raise {limit}."
    return (
        f"Of the {what} {worst:.0%} do not parse: see that the prompts suit the model (an instruction-tuned one, or its own)."
    )


def _is_structured(run: Run) -> bool:
    """Whether the engine enforced the form of the critic's answers: by default for all models but the shipped ones."""
    asked = run.config.get("structured_answers")
    return asked if isinstance(asked, bool) else run.config.get("language_model") not in SHIPPED_MODELS


def policy_idle(run: Run) -> str | None:
    """Next to nothing teaches the policy."""
    rates = {
        f"{STAGES}/policy_trained_rate": "of the judged transitions teach the policy: see train_on_yes",
        "informative_group_rate": "of the groups hold different returns: harder or easier tasks, or more episodes_per_task",
        "accepted_rate": "of the episodes are imitated: easier tasks, or more episodes an iteration",
    }
    for path, text in rates.items():
        if (rate := figure(run.last, path)) < 0.05:
            return f"Only {rate:.1%} {text}."
    return None
