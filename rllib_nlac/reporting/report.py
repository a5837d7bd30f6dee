"""A run told to a person: a few lines for the screen, and ``report.md`` in the trial's folder.

Whatever a run has is told, and what it lacks is said to be missing. Texts of environments, models, files and errors stand in
fences or as code, so they cannot be taken for the report's own. ``rllib inspect`` and TensorBoard draw the curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rllib_nlac.diagnostics.results import Run, figure, largest_k, lookup
from rllib_nlac.diagnostics.rules import CRITIC
from rllib_nlac.inputs.foreign import code, fenced, visible
from rllib_nlac.reporting.advice import Advice, advise
from rllib_nlac.reporting.costs import roles, stages
from rllib_nlac.reporting.critic import critic, ends
from rllib_nlac.reporting.transitions import transitions
from rllib_nlac.reporting.words import EVALUATION, collected, iteration, number, score, thousands, when

REPORT = "report.md"
MAX_ROWS = 12  # of a table of evaluations


def write_report(run: Run) -> Path:
    """Writes ``report.md`` into the run's folder.

    Raises:
        OSError: The folder cannot be written.
    """
    file = run.folder / REPORT
    file.write_text(markdown(run), encoding="utf-8")
    return file


def summary(run: Run) -> list[str]:
    """The run in a few lines for the screen."""
    lines = [f"Run:         {_name(run)}: {_length(run)}"]
    rows = scores(run)
    if rows:
        lines.append(f"{'Success:' if run.measures_success else 'Return:':12} {' -> '.join(f'{v} ({w})' for w, v in rows)}")
    if known := ends(run):
        words = [f"{name} {' -> '.join(number(value) for value in values)}" for name, values in known.items()]
        lines.append(f"Critic:      {', '.join(words)}")
    took = sorted((each for each in stages(run) if each.seconds > 0), key=lambda each: -each.seconds)[:4]
    if took:
        total = run.total("time_this_iter_s") or math.nan
        lines.append(f"Time:        {', '.join(f'{each.name} {each.seconds / total:.0%}' for each in took)}")
    if count := len(run.notices):
        lines.append(f"Warnings:    {count}, see the report")
    lines += [f"{'Try next:' if number == 0 else '':12} {each.text}" for number, each in enumerate(advise(run)[:3])]
    return lines


def markdown(run: Run) -> str:
    """The whole report."""
    parts = [
        f"# Report of {code(run.folder.name)}",
        _overview(run),
        _settings(run),
        _success(run),
        critic(run),
        _costs(run),
        f"## Three transitions\n\n{transitions(run.examples)}",
        _warnings(run),
        _next(advise(run)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def scores(run: Run) -> list[tuple[str, str]]:
    """What the run reached before and after, as pairs of when and how much: by evaluation, or else while collecting."""
    if run.evaluated:
        ends = [run.evaluated[0], run.evaluated[-1]] if len(run.evaluated) > 1 else run.evaluated
        return [(f"evaluation {when(r)}", score(run, r)) for r in ends]
    played = [r for r in run.results if not math.isnan(figure(r, run.score))]
    ends = [played[0], played[-1]] if len(played) > 1 else played
    return [(f"episodes of iteration {iteration(r)}", collected(run, r)) for r in ends]


def _overview(run: Run) -> str:
    rows = {
        "Algorithm": code(run.algorithm),
        "Environment": code(run.config.get("env") or _set(run, "env") or "not known"),
        "Model": code(run.config.get("language_model") or _set(run, "language_model") or "none named"),
        "Began with": f"the checkpoint {code(run.restored)}" if run.restored else "the model as it was",
        "Length": _length(run),
        "How it ended": {"done": "as it should", "failed": "**it failed**", "interrupted": "it was interrupted"}[run.end],
        "Last checkpoint": code(run.checkpoint) if run.checkpoint else "none",
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    parts = ["## What was trained", table]
    if run.error:
        parts += ["### How it ended", fenced(visible(run.error))]
    if run.unreadable:
        parts.append(f"{run.unreadable} lines of its results could not be read, and are left out.")
    return "\n\n".join(parts)


def _settings(run: Run) -> str:
    if not run.settings:
        return "### Settings\n\nAll are the algorithm's defaults, or the run ended before it said."
    lines = [f"{each.key}: {_plain(each.value)}   # default: {_plain(each.default)}" for each in run.settings]
    return f"### Settings that are not the defaults\n\n{fenced(visible(chr(10).join(lines)), 'yaml')}"


def _success(run: Run) -> str:
    what = "Success" if run.measures_success else "Return"
    parts = [f"## {what}"]
    if not run.results:
        return f"{parts[0]}\n\nThe run ended before its first result."
    played = [r for r in run.results if not math.isnan(figure(r, run.score))]
    rows = [*scores(run)] if run.evaluated else []
    if played:
        first, last = played[0], played[-1]
        begins = ", by the weights that it began with" if iteration(first) == "1" and not run.restored else ""
        rows += [(f"episodes of iteration {iteration(first)}{begins}", collected(run, first))]
        rows += [(f"episodes of iteration {iteration(last)}", collected(run, last))] if last is not first else []
    if rows:
        parts.append("\n".join(["| measured in | " + what.lower() + " |", "|---|---|", *(f"| {w} | {v} |" for w, v in rows)]))
        if run.measures_success:
            parts.append("In brackets 95 % intervals. Episodes of training are sampled, and each iteration's are few.")
    if not run.evaluated:
        parts.append("Nothing was evaluated, so there is no measure on fixed tasks.")
    if run.evaluated:
        parts.append(_evaluations(run))
    return "\n\n".join(parts)


def _evaluations(run: Run) -> str:
    """Each evaluation with what should not fall as success rises."""
    columns: dict[str, str] = {}
    if (k := _attempts(run)) is not None:
        columns = {f"pass@{j}": f"evaluation/repeated/pass_at_{j}" for j in (1, k)}
    columns |= {"action entropy": f"{EVALUATION}/action_entropy", "token entropy": f"{EVALUATION}/token_entropy"}
    columns |= {"AUC": f"{CRITIC}/auc", "Brier": f"{CRITIC}/brier"}
    known = {name: path for name, path in columns.items() if any(not math.isnan(figure(r, path)) for r in run.evaluated)}
    step = max(1, math.ceil(len(run.evaluated) / MAX_ROWS))
    shown = [r for place, r in enumerate(reversed(run.evaluated)) if place % step == 0][::-1]
    head = ["iteration", "episodes", "success" if run.measures_success else "return", *known]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in shown:
        cells = [iteration(r), number(figure(r, "env_runners/num_episodes_lifetime"), 0), score(run, r)]
        lines.append(f"| {' | '.join([*cells, *(number(figure(r, path)) for path in known.values())])} |")
    note = f"\n\nOf {len(run.evaluated)} evaluations each {_ordinal(step)} is shown." if step > 1 else ""
    return "\n".join(lines) + note


def _attempts(run: Run) -> int | None:
    """The largest k of pass@k, of the last evaluation that has one; None where no task is attempted several times."""
    ks = (largest_k(lookup(result, "evaluation/repeated")) for result in reversed(run.evaluated))
    return next((k for k in ks if k is not None), None)


def _costs(run: Run) -> str:
    found = stages(run)
    if not found:
        return "## Time and tokens\n\nThe run ended before its first result."
    total = run.total("time_this_iter_s")
    lines = ["| stage | seconds | share | tokens |", "|---|---|---|---|"]
    for each in found:
        share = f"{each.seconds / total:.0%}" if total and not math.isnan(each.seconds) else "-"
        lines.append(f"| {each.name} | {number(each.seconds, 1)} | {share} | {thousands(each.tokens)} |")
    lines.append(f"| all | {number(total, 1)} | | |")
    note = "The learner's tokens are those that it trained on, evaluation's those of its episodes."
    return "\n\n".join(["## Time and tokens", "\n".join(lines), note, *_roles(run)])


def _roles(run: Run) -> list[str]:
    """What the engines generated, by what it was for."""
    found = roles(run)
    if not found:
        return []
    generated, prompts = sum(each.generated for each in found), sum(each.prompts for each in found)
    lines = ["| role | generated | share | prompts |", "|---|---|---|---|"]
    for each in found:
        share = f"{each.generated / generated:.0%}" if generated else "-"
        lines.append(f"| {code(each.name)} | {thousands(each.generated)} | {share} | {thousands(each.prompts)} |")
    lines.append(f"| all | {thousands(generated)} | | {thousands(prompts)} |")
    note = "Tokens of all that the engines answered; those of prompts as they were asked, the prefix cache's included."
    return ["\n".join(lines), note]


def _warnings(run: Run) -> str:
    if not run.notices:
        return "## Warnings\n\nNone."
    lines = [f"iteration {iteration}: {text}" for iteration, text in run.notices]
    return f"## Warnings\n\n{fenced(visible(chr(10).join(lines)))}"


def _next(found: Sequence[Advice]) -> str:
    lines = [f"{number}. {each.text}" for number, each in enumerate(found, start=1)]
    page = "Each follows from the figures above; the documentation's page *Reading a run* says of every metric what is healthy."
    return "\n\n".join(["## What to try next", "\n".join(lines), page])


def _name(run: Run) -> str:
    words = [run.algorithm, "on", run.config.get("env") or _set(run, "env") or "an environment that is not known"]
    model = run.config.get("language_model") or _set(run, "language_model")
    return " ".join(map(str, [*words, "from", model] if model else words))


def _length(run: Run) -> str:
    count = run.num_iterations
    if not count:
        return "no iteration was ended"
    episodes = run.total("env_runners/num_episodes")  # its own, without those before a checkpoint that it began from
    played = f", {episodes:.0f} episodes" if run.plays else ""
    minutes = run.total("time_this_iter_s") / 60
    took = f"{minutes:.0f} minutes" if minutes >= 10 else f"{minutes:.1f} minutes"
    return f"{count} iteration{'s' if count > 1 else ''}{played} in {took}"


def _set(run: Run, key: str) -> object:
    return next((each.value for each in run.settings if each.key == key), None)


def _plain(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
