"""Stage 5, the language critic: k futures of (s, a) and the evaluator's judgement of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_nlac.language.forms import FAILURE, SUCCESS, CritiqueForm, FutureForm
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.language.variant import Answer, Ask, Stage
from rllib_nlac.types import Critique, Future, Message, Seen, Transition, Weights


def read_future(answer: Answer | None, form: FutureForm) -> Future | None:
    """The future; None where it does not parse or was cut off."""
    return form.parse(answer[1]) if answer is not None and answer[0].finished else None


def evaluate_prompt(
    prompts: PromptSet, state: Sequence[Message], action: str, futures: Sequence[Future]
) -> tuple[Message, ...] | None:
    """Prompt of E(s, a, d_1..d_k); None where no future parsed."""
    return prompts.evaluate_messages(state, action, futures) if futures else None


def read_critique(answer: Answer | None, form: CritiqueForm) -> Critique | None:
    """The critique; None where it does not parse or was cut off."""
    return form.parse(answer[1]) if answer is not None and answer[0].finished else None


@dataclass(frozen=True)
class Judged:
    """An action that the critic is asked about.

    Attributes:
        prompts: Prompt set of the environment.
        state: Dialogue before the action.
        action: The turn; None: nothing is asked.
        seen: What an engine has seen of state and action, where that is known.
        transition: Id of the transition that the action belongs to; None: no raw text is kept of answers that do not parse.
    """

    prompts: PromptSet
    state: tuple[Message, ...]
    action: str | None
    seen: Seen | None = None
    transition: int | None = None


def future_stage(
    role: str,
    judged: Sequence[Judged],
    sampling: Sampling,
    k: int,
    weights: Weights,
    report: StageReport | None = None,
) -> Stage[list[tuple[Future, ...]]]:
    """k futures of each action, those that parse; none where there is no action.

    Args:
        role: What these futures are for.
        judged: The actions.
        sampling: How they are answered.
        k: Number of futures of each action.
        weights: Which weights predict.
        report: Counts what does not parse.
    """
    every = [each for each in judged for _ in range(k)]
    asked = [e.prompts.predict_messages(e.state, e.action) if e.action is not None else None for e in every]
    forms = [e.prompts.forms.future for e in every]
    answers = yield Ask(role, asked, sampling, weights, [e.seen for e in every], sampling.patterns(forms))
    read = [read_future(answer, form) for answer, form in zip(answers, forms, strict=True)]
    if report is not None:
        report.note("future", answers, read, [e.transition for e in every])
    return [tuple(filter(None, read[i * k : (i + 1) * k])) for i in range(len(judged))]


def critique_stage(
    role: str, judged: Sequence[Judged], futures: Sequence[Sequence[Future]], settings: StageSettings, report: StageReport
) -> Stage[list[Critique | None]]:
    """What the evaluator says of each action, given its futures; None where there is no action or no future.

    Args:
        role: What these critiques are for.
        judged: The actions.
        futures: What is predicted of each; none: nothing is asked.
        settings: Sampling and weights.
        report: Counts what does not parse.
    """
    forms = [e.prompts.forms.critique for e in judged]
    answers = yield Ask(
        role,
        [
            evaluate_prompt(e.prompts, e.state, e.action, d) if e.action is not None else None
            for e, d in zip(judged, futures, strict=True)
        ],
        settings.critique,
        settings.judge_weights,
        [e.seen for e in judged],
        settings.critique.patterns(forms),
    )
    critiques = [read_critique(answer, form) for answer, form in zip(answers, forms, strict=True)]
    report.note("critique", answers, critiques, [e.transition for e in judged])
    return critiques


def predicts_success(futures: Sequence[Future]) -> bool:
    """Whether at least half of the futures end well."""
    return 2 * sum(future.success for future in futures) >= len(futures) > 0


def transcript(transition: Transition) -> Future:
    """What really followed, as far as the transition brings it along: the environment's own words, and the outcome."""
    replies = " ".join(step.observation for step in (transition, *transition.following))
    success = transition.episode_success
    return Future(f"{replies} {SUCCESS if success else FAILURE}", success)
