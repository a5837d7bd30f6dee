"""What to try next, of how a run ended and what it reached. Each rule: None, or what was seen and what to do."""

from __future__ import annotations

from rllib_nlac.algorithm.model_defaults import SHIPPED_MODELS
from rllib_nlac.diagnostics.results import Run, figure, lookup
from rllib_nlac.reporting.words import EVALUATION

WIDE = 0.2  # of an interval, from which on it tells little
GAP, GAP_IN_FLOAT32 = 1.0, 1e-3  # of a log-probability: more than rounding makes, in bfloat16 and in float32


def failed(run: Run) -> str | None:
    """It did not come to its end because of an error."""
    if run.end != "failed":
        return None
    way = "the same command with --resume goes on from its last checkpoint" if run.checkpoint else "it has no checkpoint yet"
    return f"The run failed: mend what is said under *How it ended* first; {way}."


def interrupted(run: Run) -> str | None:
    """It was stopped by hand."""
    if run.end != "interrupted":
        return None
    return "The run was interrupted: the same command with --resume goes on with it. What stands here is of its part so far."


def updates_stopped(run: Run) -> str | None:
    """Losses or gradients were not finite."""
    count = run.total("learners/default_policy/num_stopped_steps")
    return (
        f"{count:.0f} updates were stopped because a loss or gradient was not finite: a lower lr or grad_clip."
        if count
        else None
    )


def engine_differs(run: Run) -> str | None:
    """The engine does not serve the learner's weights."""
    gap = figure(run.last, "logprob_gap")
    if not gap > (GAP_IN_FLOAT32 if _rounds_in_float32(run) else GAP):
        return None
    return (
        f"Engine and learner differ by {gap:.2g} in a token's log-probability: the engine serves another precision "
        "(learner_model: {dtype: ...} and engine_config: {dtype: ...}), or other weights, which would be a bug to report."
    )


def _rounds_in_float32(run: Run) -> bool:
    """Whether engine and learner are known to compute in float32, as they do on a CPU unless told otherwise."""
    if not run.config or any(run.config.get(f"num_gpus_per_{of}") for of in ("learner", "engine", "env_runner")):
        return False
    asked = [lookup(run.config, f"{of}/dtype") for of in ("learner_model", "engine_config")]  # a damaged file has anything
    # Left out, the precision of a pretrained model depends on the processor; the shipped models are saved in float32.
    is_shipped = run.config.get("language_model") in tuple(SHIPPED_MODELS)
    return all(each == "float32" or (is_shipped and each in (None, "auto")) for each in asked)


def turns_unparsed(run: Run) -> str | None:
    """The policy's own turns do not parse."""
    steps = figure(run.last, "env_runners/num_env_steps_sampled")
    failed_, cut = (figure(run.last, f"env_runners/action_parse_failures{tail}") for tail in ("", "_cut_off"))
    if not steps > 0 or not failed_ / steps > 0.1:
        return None
    way = "raise max_action_tokens" if 2 * cut > failed_ else "see that action_format suits the model"
    return f"Of the policy's turns {failed_ / steps:.0%} do not parse: {way}."


def not_evaluated(run: Run) -> str | None:
    """Nothing was measured on fixed tasks."""
    if run.evaluated or not run.results or not run.learns:
        return None
    interval = run.config.get("evaluation_interval")
    if interval:
        return f"The run ended before its first evaluation (evaluation_interval {interval}): train for longer, or lower it."
    return "Nothing was evaluated: set evaluation_interval, with evaluation_duration for how many episodes."


def never_won(run: Run) -> str | None:
    """Without a success there is nothing to learn from."""
    if not run.measures_success or not run.results or not run.learns:
        return None
    if any(figure(r, path) > 0 for r in run.results for path in (run.score, f"evaluation/{run.score}")):
        return None
    return (
        f"No episode was won in {run.num_iterations} iterations: begin with easier tasks (env_config), a model that wins now "
        "and then, or logged dialogues that hold successes (input_)."
    )


def still_rising(run: Run) -> str | None:
    """The last third of training still gained, beyond chance."""
    if not run.measures_success or len(run.evaluated) < 2:
        return None
    before, last = run.evaluated[min(2 * len(run.evaluated) // 3, len(run.evaluated) - 2)], run.evaluated[-1]
    if not figure(last, f"{EVALUATION}/success_low") > figure(before, f"{EVALUATION}/success_high"):
        return None
    rate = figure(last, f"{EVALUATION}/success_rate")
    if rate > 0.95:
        return None
    return (
        f"Success was still rising at the end, to {rate:.2f}: train for longer (--restore with a checkpoint and a larger stop)."
    )


def wide_interval(run: Run) -> str | None:
    """The evaluation has too few tasks to say much."""
    if not run.measures_success or not run.evaluated:
        return None
    last = run.evaluated[-1]
    low, high = (figure(last, f"{EVALUATION}/success_{end}") for end in ("low", "high"))
    if not high - low > WIDE:
        return None
    return (
        f"The last evaluation's interval is wide ({low:.2f} to {high:.2f}): more episodes "
        f"(evaluation_duration, now {run.config.get('evaluation_duration')})."
    )


def evaluation_costs(run: Run) -> str | None:
    """Evaluation takes more of the time than training."""
    total, evaluation = run.total("time_this_iter_s"), run.total("seconds/evaluation")
    if not total or evaluation < 0.5 * total or len(run.evaluated) < 2:
        return None
    return f"Evaluation took {evaluation / total:.0%} of the time: a larger evaluation_interval, or fewer branches."


def few_seeds(run: Run) -> str | None:
    """A good result of one run."""
    if not run.measures_success or len(run.evaluated) < 2 or not run.learns or run.end != "done":
        return None
    first, last = run.evaluated[0], run.evaluated[-1]
    if not figure(last, f"{EVALUATION}/success_low") > figure(first, f"{EVALUATION}/success_high"):
        return None
    return (
        "Success rose beyond chance. Run two more seeds before you compare it with anything: seeds can differ by more than "
        "this interval."
    )
