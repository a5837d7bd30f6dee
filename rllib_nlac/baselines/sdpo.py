"""SDPO, Self-Distillation Policy Optimization (arXiv 2601.20802): the same model, shown what came of it, is the teacher.

The policy plays several episodes of each task. The teacher is the same model under averaged weights, and its prompt holds what
the policy did not know: the replies that a turn brought about and how the episode ended, and where that was lost and another
one of the same task was won, the turn of that one. Every turn is moved, token by token, from what the policy thinks of it to
what the teacher does: the gradient of KL(policy || teacher) on the policy's own samples.

Simplified: the KL is estimated by the sampled token alone, where the paper compares whole distributions or their likeliest
tokens; it is the reverse KL, without the Jensen-Shannon mixture, the importance ratio and its clipping. The teacher judges one
turn of a dialogue at a time, by the refine prompt, in the critique's place: it sees the turn that it judges, and of a sibling's
success only the turn of the same number, not the whole of it. A won episode's feedback is its own end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.diagnostics.metrics import timed
from rllib_nlac.engine.chat import Prompt, Wanted
from rllib_nlac.episode import episode_success, generations_of, task_seed_of
from rllib_nlac.language.critique import transcript
from rllib_nlac.learner.batch import TrainingSequence, into_minibatches, turn_sequences
from rllib_nlac.learner.group import on_first_learner
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.learner.losses import sampled_kl_loss
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.types import Transition


class SDPOConfig(LanguageAlgorithmConfig):
    """Configures SDPO. ``minibatch_size`` counts turns, ``episodes_per_iteration`` all episodes of all tasks."""

    serves_target = False  # the learner asks its own
    RANGES = {
        **ranges.POLICY_GRADIENT,
        "episodes_per_task": ranges.COUNT,
        "tau": ranges.Range(0, 1, why="the teacher has the target weights, 0 freezes and 1 copies them"),
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or SDPO)
        self.tau = 0.05
        self.episodes_per_task = 8

    @override(AlgorithmConfig)
    def training(self, *, episodes_per_task: int | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets SDPO's hyper-parameters; ``tau`` is the step of the teacher's average after each gradient step.

        Args:
            episodes_per_task: Episodes of each task, among which a lost one looks for a success; 1: none has a sibling.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        return SDPOLearner

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check(
            self.zero_stage < 3,
            "deepspeed_config",
            "must have a zero_optimization.stage below 3: the teacher needs whole parameters",
        )


class SDPOLearner(LanguageLearner):
    """The gradient step on turns that carry the teacher's log-probabilities."""

    divides_target = False  # the first learner is the teacher

    @override(LanguageLearner)
    def _sequence_losses(self, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
        temperature = self.config.action_temperature
        logprobs, mask, _, kl = self._answers(rows["ids"], rows["prompt_length"], rows["length"], temperature)
        teacher = rows["logprobs"][:, int(rows["prompt_length"].min()) : int(rows["length"].max())]
        return sampled_kl_loss(logprobs, teacher, mask), kl

    def teacher_logprobs(self, prompt_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """What θ̄ says of each turn's tokens under other prompts than the turn was sampled from, shape (len(token_ids[i]),)."""
        return self._by_text(
            prompt_ids, token_ids, partial(self._logits_by, self.target_weights()), self.config.action_temperature
        )


class SDPO(LanguageAlgorithm):
    """On-policy: play groups, ask the teacher of every token, distil."""

    nothing_to_learn = (
        "no turn had a teacher: its prompt, which holds the turn and what came of it, was beyond max_context for all of them"
    )

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> SDPOConfig:
        return SDPOConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def training_sequences(self, episodes: list[SingleAgentEpisode]) -> list[TrainingSequence]:
        turns: list[TrainingSequence] = []
        wanted: list[Wanted] = []
        for episode, sibling in zip(episodes, self.siblings(episodes), strict=True):
            spoken = [t for t, g in enumerate(generations_of(episode)) if g.token_ids]
            for t, turn in zip(spoken, turn_sequences(episode), strict=True):
                transition = transition_at(str(self.config.env), episode, t, n_step=len(episode))
                demonstration = sibling.get_actions(min(t, len(sibling) - 1)) if sibling is not None else None
                turns.append(turn)
                wanted.append(self.privileged(transition, demonstration))
        prompts = self.chat.prompts(wanted)
        taught = [(turn, prompt.ids) for turn, prompt in zip(turns, prompts, strict=True) if isinstance(prompt, Prompt)]
        self.metrics.log_value("taught_rate", len(taught) / max(len(turns), 1), window=1)
        if not taught:
            return []
        with timed(self.metrics, "teacher", "asking the teacher"):
            answers = ([ids for _, ids in taught], [turn.answer_ids for turn, _ in taught])
            teacher = self._with_learners(
                lambda: on_first_learner(self.learner_group, lambda learner: learner.teacher_logprobs(*answers))
            )
        gaps = [np.asarray(turn.logprobs) - own for (turn, _), own in zip(taught, teacher, strict=True)]
        self.metrics.log_value("kl_to_teacher", float(np.mean(np.concatenate(gaps))), window=1)
        sequences = [replace(turn, logprobs=own) for (turn, _), own in zip(taught, teacher, strict=True)]
        return into_minibatches(sequences, self.config.minibatch_size, self.config.num_epochs, self.rng)

    def siblings(self, episodes: Sequence[SingleAgentEpisode]) -> list[SingleAgentEpisode | None]:
        """For each lost episode a won one of the same task, drawn at random; None where there is none, or it was won itself."""
        won: dict[int, list[SingleAgentEpisode]] = defaultdict(list)
        for episode in episodes:
            if episode_success(episode):
                won[task_seed_of(episode)].append(episode)
        lost = [not episode_success(episode) for episode in episodes]
        found = [won[task_seed_of(e)] if is_lost else [] for e, is_lost in zip(episodes, lost, strict=True)]
        self.metrics.log_value("demonstrated_rate", sum(map(bool, found)) / max(sum(lost), 1), window=1)
        return [known[int(self.rng.integers(len(known)))] if known else None for known in found]

    def privileged(self, transition: Transition, demonstration: str | None) -> Wanted:
        """The teacher's prompt: the turn, and in a critique's form what came of it and what a sibling did that was won."""
        prompts = self.prompts_for(transition.env)
        messages = prompts.refine_messages(transition.state, transition.action, feedback(transition, demonstration))
        return Wanted(messages, len(transition.generation.token_ids), transition.seen)


def feedback(transition: Transition, demonstration: str | None) -> str:
    """What came of a turn, in the form of a critique: whether its episode was won, what was replied, and what to do instead."""
    came = transcript(transition)
    lines = [f"Optimal: {'Yes' if came.success else 'No'}", f"Reason: {came.text}"]
    return "\n".join(lines if demonstration is None else [*lines, f"Fix: {demonstration}"])
