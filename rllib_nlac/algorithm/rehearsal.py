"""What the untrained model said: answers of its own, kept so that it is not forgotten and so that forgetting is measured.

Both parts are drawn from the untrained model at temperature 1, whatever a role samples at. The gradient of their negative
log-likelihood is then that of KL(π_base || π_θ), and their loss under θ less that under the base is an unbiased estimate of it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_nlac.engine.chat import Chat, PromptTooLong
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.envs.rows import Row, read_rows
from rllib_nlac.inputs.texts import readable
from rllib_nlac.language.report import StageReport
from rllib_nlac.language.settings import Sampling
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.learner.batch import REHEARSAL, TrainingSequence
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.types import Generation, Message, Request, Transition, Weights, hash_seed

SEED = 26
MAX_PROMPTS = 1 << 16  # of a file; more than anyone rehearses
ROLES_OF_A_TURN = 4  # that a critic in words asks at least; mostly there are six


@dataclass(frozen=True)
class RehearsalSettings:
    """Answers of the untrained model; each field is a key of ``rehearsal``.

    Attributes:
        fraction: Of the sequences of each gradient step so many are answers of the untrained model, and at least one. 0: none.
            Above 0 for algorithms that imitate, not for policy gradients.
        weight: Of their mean loss per token, beside 1 for the critic's.
        num_answers: So many are asked for at the start and kept; over the steps each is trained on equally often.
        held_out: So many more are never trained on. Every evaluation reports their loss under the current weights and under the
            untrained ones, as ``evaluation/retention``. 0: none.
        prompts: JSONL or parquet with ``messages``, as of a chat, or a ``prompt`` in each row, which the untrained model
            answers in up to ``max_action_tokens``. None takes the prompts of the run's own first episodes, of all roles.
    """

    fraction: float = 0.0
    weight: float = 1.0
    num_answers: int = 256
    held_out: int = 64
    prompts: str | None = None

    def count_beside(self, own: int) -> int:
        """Answers of the untrained model beside so many other sequences of a gradient step."""
        return max(1, round(own * self.fraction / (1 - self.fraction)))


@dataclass(frozen=True)
class BaseAnswer:
    """An answer of the untrained model.

    Attributes:
        prompt_ids: The prompt's token ids.
        token_ids: The sampled ids, at least one.
        logprob: Of the whole answer under the untrained model.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class BaseAnswers:
    """What is kept of it; no prompt is in both parts. None where nothing was asked for yet.

    Attributes:
        rehearsal: Is trained on.
        retention: Is never trained on, and looked at by every evaluation.
    """

    rehearsal: tuple[BaseAnswer, ...] | None = None
    retention: tuple[BaseAnswer, ...] | None = None


@dataclass
class Recorder:
    """An engine's stand-in that lets the untrained model answer whatever is asked, at temperature 1, and keeps it all.

    Attributes:
        engine: Answers.
        weights: Those that are the untrained model's.
        answers: What it said, one for each prompt.
    """

    engine: Engine
    weights: Weights
    answers: dict[tuple[int, ...], BaseAnswer] = field(default_factory=dict)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """As ``Engine.generate``."""
        changes: dict[str, Any] = {"weights": self.weights, "temperature": 1.0, "top_p": 1.0, "logprobs": True}
        asked = [replace(r, role="base_answers", **changes) for r in requests]
        generations = self.engine.generate(asked)
        for g in generations:
            if g.token_ids:
                kept = BaseAnswer(g.prompt_ids, g.token_ids, float(g.sampled_logprobs.sum()))
                self.answers.setdefault(g.prompt_ids, kept)
        return generations


class Part(NamedTuple):
    """A part of ``BaseAnswers`` that is still to be asked for: its name, and how many answers."""

    name: str
    size: int


def wanted_parts(config: Any, kept: BaseAnswers) -> list[Part]:
    """What a configuration asks for and is not there."""
    settings, wanted = config.rehearsal_settings, []
    if settings.fraction and kept.rehearsal is None:
        wanted.append(Part("rehearsal", settings.num_answers))
    if config.evaluation_interval and settings.held_out and kept.retention is None:
        wanted.append(Part("retention", settings.held_out))
    return wanted


def ask_base(
    kept: BaseAnswers,
    wanted: Sequence[Part],
    turns: Sequence[Transition],
    engine: Engine,
    weights: Weights,
    chat: Chat,
    config: Any,
    stages: LanguageStages | None,
) -> BaseAnswers:
    """Has the untrained model answer what is wanted, all of it at once.

    Args:
        kept: What is there already.
        wanted: What is not.
        turns: Of the run's own first episodes.
        engine: Answers.
        weights: Those that are the untrained model's.
        chat: Makes tokens of messages.
        config: The algorithm's.
        stages: Of a critic in words.

    Raises:
        ValueError: There is nothing to rehearse.
    """
    seed, action = config.seed or 0, config.action_sampling
    total, recorder = sum(part.size for part in wanted), Recorder(engine, weights)
    if (files := config.rehearsal_settings.prompts) is not None:
        answer(recorder, chat, drawn(read_prompts(files), total, seed), action, seed)
    elif stages is None:
        answer(recorder, chat, [turn.state for turn in drawn(turns, total, seed)], action, seed)
    else:
        answer_roles(recorder, drawn(turns, math.ceil(total / ROLES_OF_A_TURN), seed), stages, seed)
    known = {each.prompt_ids for part in (kept.rehearsal, kept.retention) for each in part or ()}
    new = [each for ids, each in recorder.answers.items() if ids not in known]
    parts = dict(zip([part.name for part in wanted], divided(new, [part.size for part in wanted], seed), strict=True))
    if parts.get("rehearsal") == ():
        raise ValueError("config.rehearsal: none of its prompts was answered; do they fit max_context beside an answer?")
    return replace(kept, **parts)


def answer_roles(recorder: Recorder, turns: Sequence[Transition], stages: LanguageStages, seed: int) -> None:
    """Has the untrained model speak in every role about turns, in the waves of training.

    Args:
        recorder: Keeps the answers.
        turns: What is spoken about.
        stages: The algorithm's.
        seed: Of the run.
    """
    turns = [replace(turn, following=()) for turn in turns]  # equally many prompts of each, whatever is known to follow
    asking = copy.copy(stages)
    asking.engine = recorder  # type: ignore[assignment]
    asking.rng = np.random.default_rng([SEED, seed])
    own = stages.settings
    sampled = {name: replace(getattr(own, name), temperature=1.0) for name in ("backup", "critique", "refine")}
    asking.settings = replace(
        own, num_futures=1, num_next_actions=1, num_refinements=1, rejected_weight=1.0, reasoning=None, **sampled
    )
    report = StageReport()
    seeds = [hash_seed(SEED, seed, number) for number in range(len(turns))]
    asking.drive(report, asking.backup(turns, report), asking.improvement(turns, report), seeds=seeds)


def answer(recorder: Recorder, chat: Chat, prompts: Sequence[Sequence[Message]], sampling: Sampling, seed: int) -> None:
    """Has the untrained model answer prompts in one call; those that are too long are left out."""
    requests = []
    for number, messages in enumerate(prompts):
        try:
            ids = chat.prompt_ids(messages, sampling.max_tokens)
        except PromptTooLong:
            continue
        requests.append(Request(ids, sampling.max_tokens, seed=hash_seed(SEED, seed, number)))
    if requests:
        recorder.generate(requests)


def read_prompts(files: str) -> list[tuple[Message, ...]]:
    """The prompts of a user's files.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A row is malformed, or there are none, or too many; file and line are named.
    """
    prompts = [_prompt_of(row) for row in itertools.islice(read_rows(files), MAX_PROMPTS + 1)]
    if not prompts:
        raise ValueError(f"{files}: no row, so no prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{files}: more than {MAX_PROMPTS} prompts; a few hundred are enough")
    return prompts


def _prompt_of(row: Row) -> tuple[Message, ...]:
    given = row.fields.get("messages")
    if given is None:
        given = [{"role": "user", "content": row.fields.get("prompt")}]
    messages = []
    for entry in given if isinstance(given, list) else [None]:
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, Mapping) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ValueError(f"{row.place}: give 'prompt', a text, or 'messages', each with role and content")
        messages.append(Message(role, readable(content)[0]))
    if not messages or messages[-1].role != "user":
        raise ValueError(f"{row.place}: the last of 'messages' must be the user's, which the model answers")
    return tuple(messages)


def drawn(turns: Sequence[Any], count: int, seed: int) -> list[Any]:
    """At most so many, each equally likely, without replacement."""
    order = np.random.default_rng([SEED, seed]).permutation(len(turns))[:count]
    return [turns[i] for i in order]


def divided(answers: Sequence[BaseAnswer], counts: Sequence[int], seed: int) -> list[tuple[BaseAnswer, ...]]:
    """Parts of those sizes, none of which shares an answer with another; where there are too few, each has its share."""
    shuffled, total = drawn(answers, len(answers), seed), sum(counts)
    known = min(len(answers), total)
    ends = [end * known // total for end in itertools.accumulate(counts)]
    return [tuple(shuffled[start:end]) for start, end in itertools.pairwise([0, *ends])]


def with_rehearsal(
    sequences: Sequence[TrainingSequence], kept: Sequence[BaseAnswer], settings: RehearsalSettings, seed: Sequence[int]
) -> list[TrainingSequence]:
    """Adds its share of the untrained model's answers to every gradient step.

    The loss of a step is then that of its own sequences, plus ``weight`` times the mean over these.

    Args:
        sequences: What is trained on.
        kept: The answers, at least one; they come in turn, so that none is trained on twice before all were once.
        settings: Share and weight.
        seed: For their order.
    """
    rng = np.random.default_rng([SEED, *seed])
    turn = (kept[i] for _ in itertools.count() for i in rng.permutation(len(kept)))
    added: list[TrainingSequence] = []
    steps: dict[int, int] = {}
    for sequence in sequences:
        steps[sequence.minibatch] = steps.get(sequence.minibatch, 0) + 1
    for minibatch, own in steps.items():
        count = settings.count_beside(own)
        for _ in range(count):
            known, weight = next(turn), settings.weight / count
            item = len(added)
            added.append(
                TrainingSequence(
                    known.prompt_ids, known.token_ids, REHEARSAL, item, minibatch, weight, origin=f"rehearsed answer {item}"
                )
            )
    return [*sequences, *added]


def retention(learner_group: LearnerGroup, kept: Sequence[BaseAnswer]) -> dict[str, float]:
    """The loss of the kept answers in nats a token, today's and the untrained model's."""
    prompts, answers = [each.prompt_ids for each in kept], [each.token_ids for each in kept]
    now = on_every_learner(learner_group, lambda learner: learner.logprobs_of(prompts, answers))[0]
    tokens = sum(map(len, answers))
    loss, of_base = -float(np.sum(np.concatenate(now))) / tokens, -sum(each.logprob for each in kept) / tokens
    return {"loss": loss, "loss_of_base": of_base, "num_tokens": float(tokens)}
