"""Stage 5, the language critic: k futures of (s, a) and the evaluator's judgement of them."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_nlac.language.forms import CritiqueForm, FutureForm
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


def future_stage(
    role: str,
    prompts: Sequence[PromptSet],
    states: Sequence[tuple[Message, ...]],
    actions: Sequence[str | None],
    seen: Sequence[Seen | None],
    sampling: Sampling,
    k: int,
    weights: Weights,
    report: StageReport | None = None,
    about: Sequence[int] = (),
) -> Stage[list[tuple[Future, ...]]]:
    """k futures of each action, those that parse; none where there is no action.

    Args:
        role: What these futures are for.
        prompts: The prompt set of each state.
        states: The states.
        actions: The action in each; None: nothing is asked.
        seen: What an engine has seen of each state and action.
        sampling: How they are answered.
        k: Futures of each.
        weights: Which weights predict.
        report: Counts what does not parse.
        about: The ids of the transitions, each with equally many actions in turn; see ``StageReport.note``.
    """
    asked = [
        p.predict_messages(s, a) if a is not None else None
        for p, s, a in zip(prompts, states, actions, strict=True)
        for _ in range(k)
    ]
    forms = [p.forms.future for p in prompts for _ in range(k)]
    answers = yield Ask(role, asked, sampling, weights, [each for each in seen for _ in range(k)], sampling.patterns(forms))
    read = [read_future(answer, form) for answer, form in zip(answers, forms, strict=True)]
    if report is not None:
        report.note("future", answers, read, about)
    return [tuple(filter(None, read[i * k : (i + 1) * k])) for i in range(len(actions))]


def critique_stage(
    role: str,
    prompts: Sequence[PromptSet],
    states: Sequence[tuple[Message, ...]],
    actions: Sequence[str | None],
    futures: Sequence[Sequence[Future]],
    seen: Sequence[Seen | None],
    settings: StageSettings,
    report: StageReport,
    about: Sequence[int],
) -> Stage[list[Critique | None]]:
    """What the evaluator says of each action, given its futures; None where there is no action or no future.

    Args:
        role: What these critiques are for.
        prompts: The prompt set of each state.
        states: The states.
        actions: The action in each; None: nothing is asked.
        futures: What is predicted of each; none: nothing is asked.
        seen: What an engine has seen of each state and action.
        settings: Sampling and weights.
        report: Counts what does not parse.
        about: The ids of the transitions, each with equally many actions in turn; see ``StageReport.note``.
    """
    forms = [p.forms.critique for p in prompts]
    answers = yield Ask(
        role,
        [
            evaluate_prompt(p, s, a, d) if a is not None else None
            for p, s, a, d in zip(prompts, states, actions, futures, strict=True)
        ],
        settings.critique,
        settings.judge_weights,
        seen,
        settings.critique.patterns(forms),
    )
    critiques = [read_critique(answer, form) for answer, form in zip(answers, forms, strict=True)]
    report.note("critique", answers, critiques, about)
    return critiques


def predicts_success(futures: Sequence[Future]) -> bool:
    """Whether at least half of the futures end well."""
    return 2 * sum(future.success for future in futures) >= len(futures) > 0


def transcript(transition: Transition) -> Future:
    """What really followed, as far as the transition brings it along: the environment's own words, and the outcome."""
    replies = " ".join(step.observation for step in (transition, *transition.following))
    success = transition.episode_success
    return Future(f"{replies} {'SUCCESS' if success else 'FAILURE'}", success)
