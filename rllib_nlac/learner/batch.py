"""From targets and refinements to one batch of token sequences, and from there to micro-batches by token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_nlac.episode import generations_of

CRITIC, POLICY = 0, 1


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence to train on: the loss is on ``answer_ids`` alone.

    Attributes:
        prompt_ids: Token ids of the prompt.
        answer_ids: The sampled ids.
        role: CRITIC (L1) or POLICY (L2).
        item: Which transition of the sampled batch it belongs to, or which sequence it is where there is none; -1 of a copy
            that only fills up.
        minibatch: Which gradient step it belongs to.
        weight: Its share in that step's loss, importance weight and mean included.
        scalar: Advantage in a policy gradient, regression target in a scalar critic.
        logprobs: Log-probabilities of the answer's tokens when they were sampled, for policy gradients.
        origin: What it was made of, for messages: a transition, or an episode's turn.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    role: int
    item: int
    minibatch: int
    weight: float
    scalar: float = 0.0
    logprobs: Sequence[float] | np.ndarray = ()
    origin: str = ""


def to_multi_agent_batch(sequences: Sequence[TrainingSequence], env_steps: int) -> MultiAgentBatch:
    """The batch in RLlib's own form, one row a sequence, padded on the right with zeros.

    Columns: ``ids`` (N, T) int64; ``prompt_length``, ``length``, ``role``, ``item``, ``minibatch`` (N,) int64; ``weight``
    and ``scalar`` (N,) float32; ``logprobs`` (N, T) float32, each beside its token, 0 elsewhere.
    """
    longest = max(len(s.prompt_ids) + len(s.answer_ids) for s in sequences)
    ids = np.zeros((len(sequences), longest), np.int64)
    logprobs = np.zeros((len(sequences), longest), np.float32)
    for row, s in enumerate(sequences):
        ids[row, : len(s.prompt_ids) + len(s.answer_ids)] = (*s.prompt_ids, *s.answer_ids)
        logprobs[row, len(s.prompt_ids) : len(s.prompt_ids) + len(s.logprobs)] = s.logprobs
    columns = {
        "ids": ids,
        "prompt_length": np.array([len(s.prompt_ids) for s in sequences]),
        "length": np.array([len(s.prompt_ids) + len(s.answer_ids) for s in sequences]),
        "role": np.array([s.role for s in sequences]),
        "item": np.array([s.item for s in sequences]),
        "minibatch": np.array([s.minibatch for s in sequences]),
        "weight": np.array([s.weight for s in sequences], np.float32),
        "scalar": np.array([s.scalar for s in sequences], np.float32),
        "logprobs": logprobs,
    }
    return MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, env_steps=env_steps)


def shard_evenly(sequences: Sequence[TrainingSequence], num_learners: int) -> list[TrainingSequence]:
    """Orders and fills up sequences so that each learner's share holds equally many of every gradient step.

    RLlib cuts a batch into contiguous shares. Learners that disagreed about the number of steps would wait for each other
    for ever, so missing sequences are filled up by copies of weight 0, with ``item`` -1.
    """
    steps: dict[int, list[TrainingSequence]] = {}
    for sequence in sequences:
        steps.setdefault(sequence.minibatch, []).append(sequence)
    shares: list[list[TrainingSequence]] = [[] for _ in range(num_learners)]
    for members in steps.values():
        ordered = sorted(members, key=lambda s: len(s.prompt_ids) + len(s.answer_ids))
        idle = replace(ordered[0], item=-1, weight=0.0)
        ordered += [idle] * (-len(ordered) % num_learners)
        for learner, share in enumerate(shares):
            share += ordered[learner::num_learners]
    return [sequence for share in shares for sequence in share]


def into_minibatches(
    sequences: Sequence[TrainingSequence], size: int, epochs: int, rng: np.random.Generator | None
) -> list[TrainingSequence]:
    """Divides sequences into gradient steps, ``epochs`` times, and makes the weights of each step sum to 1.

    Args:
        sequences: Their weights count relative to each other.
        size: The most sequences of a gradient step.
        epochs: How often each sequence is trained on.
        rng: Shuffles them; None keeps their order.
    """
    steps: list[list[TrainingSequence]] = []
    sequences = [replace(sequence, item=item) for item, sequence in enumerate(sequences)]
    for _ in range(epochs):
        order = np.arange(len(sequences)) if rng is None else rng.permutation(len(sequences))
        steps += [[sequences[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    return [
        replace(sequence, minibatch=number, weight=sequence.weight / sum(s.weight for s in step))
        for number, step in enumerate(steps)
        for sequence in step
    ]


def turn_sequences(episode: SingleAgentEpisode, advantage: float = 0.0) -> list[TrainingSequence]:
    """The agent's turns of an episode as policy sequences.

    Each turn weighs what its tokens are of the episode's, so that an episode's loss is the mean over its tokens.
    """
    generations = generations_of(episode)
    tokens = sum(len(g.token_ids) for g in generations)
    sequences = []
    for t, g in enumerate(generations):
        if g.token_ids:
            share, origin = len(g.token_ids) / tokens, f"episode {episode.id_}, turn {t}"
            logprobs = g.sampled_logprobs
            sequences.append(TrainingSequence(g.prompt_ids, g.token_ids, POLICY, 0, 0, share, advantage, logprobs, origin))
    return sequences


def micro_batches(lengths: torch.Tensor, rows: torch.Tensor, max_tokens: int) -> Iterator[torch.Tensor]:
    """Groups rows of similar length so that each group, padded to its longest, holds at most ``max_tokens`` tokens.

    Args:
        lengths: Length of every row, shape (N,).
        rows: The rows to group, shape (M,).
        max_tokens: The budget; a single row that is longer than it forms a group of its own.

    Yields:
        Row indices of one group. Every row of ``rows`` is in exactly one group.
    """
    order = rows[lengths[rows].argsort(descending=True)]
    start = 0
    while start < len(order):
        size = max(1, max_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size
