"""From targets and refinements to one batch of token sequences, and from there to micro-batches by token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

CRITIC, POLICY = 0, 1


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence to train on: the loss is on ``answer_ids`` alone.

    Attributes:
        prompt_ids: Token ids of the prompt.
        answer_ids: The sampled ids.
        role: CRITIC (L1) or POLICY (L2).
        item: Which transition of the sampled batch it belongs to.
        minibatch: Which gradient step it belongs to.
        weight: Its share in that step's loss, importance weight and mean included.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    role: int
    item: int
    minibatch: int
    weight: float


def to_multi_agent_batch(sequences: Sequence[TrainingSequence], env_steps: int) -> MultiAgentBatch:
    """The batch in RLlib's own form, one row a sequence, padded on the right with zeros.

    Columns: ``ids`` (N, T) int64; ``prompt_length``, ``length``, ``role``, ``item``, ``minibatch`` (N,) int64; ``weight``
    (N,) float32.
    """
    longest = max(len(s.prompt_ids) + len(s.answer_ids) for s in sequences)
    ids = np.zeros((len(sequences), longest), np.int64)
    for row, s in enumerate(sequences):
        ids[row, : len(s.prompt_ids) + len(s.answer_ids)] = (*s.prompt_ids, *s.answer_ids)
    columns = {
        "ids": ids,
        "prompt_length": np.array([len(s.prompt_ids) for s in sequences]),
        "length": np.array([len(s.prompt_ids) + len(s.answer_ids) for s in sequences]),
        "role": np.array([s.role for s in sequences]),
        "item": np.array([s.item for s in sequences]),
        "minibatch": np.array([s.minibatch for s in sequences]),
        "weight": np.array([s.weight for s in sequences], np.float32),
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
