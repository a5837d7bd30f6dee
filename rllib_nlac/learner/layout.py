"""How the sequences of a micro-batch are laid before the model: padded, one a row, or packed, all in one row.

In a pack the tokens that sequences begin with alike, as the turns of an episode do, stand once. Sequences are taken in an order
that puts what begins alike side by side, so that each shares most with the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rllib_nlac.learner.losses import answer_logprobs, token_entropy, token_kl
from rllib_nlac.learner.packed_attention import Segments

# Where beginnings are shared, attention is given keys and values of each sequence: of what layers keep of a token at most this.
KEYS_SHARE = 1 / 8


def shared_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    least = min(len(one), len(other))
    apart = one[:least] != other[:least]
    return int(apart.argmax()) if apart.any() else least


def in_order(sequences: Sequence[np.ndarray]) -> list[int]:
    """Places of the sequences by the order of their bytes: what begins alike stands together, a beginning before the rest."""
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def packs(sequences: Sequence[np.ndarray], max_tokens: int) -> Iterator[list[int]]:
    """Groups sequences so that the tokens of each group, shared ones once, are at most ``max_tokens``.

    Args:
        sequences: Token ids of each.
        max_tokens: The budget; it also covers the keys and values that sharing repeats. A single sequence that is longer forms
            a group of its own.

    Yields:
        Places in ``sequences``. Every one is in exactly one group.
    """
    group: list[int] = []
    tokens = keys = 0
    for i in in_order(sequences):
        size = len(sequences[i])
        shared = shared_beginning(sequences[group[-1]], sequences[i]) if group else 0
        repeated = 0 if group and shared == len(sequences[group[-1]]) else shared
        if group and tokens + size - shared + KEYS_SHARE * (keys + repeated) > max_tokens:
            yield group
            group, tokens, keys, shared, repeated = [], 0, 0, 0, 0
        group.append(i)
        tokens, keys = tokens + size - shared, keys + repeated
    if group:
        yield group


@dataclass(frozen=True)
class Pack:
    """Sequences as one row of R tokens.

    Attributes:
        ids: Shape (R,).
        positions: Position of each token within its sequence, shape (R,).
        paths: Rows of each sequence's tokens, each of shape (length,).
        starts: How many tokens of each sequence stand with another one before it.
        queries: Rows of each segment: tokens that stand side by side and follow each other in their sequence.
        keys: The rows that a segment's last token looks at; it and its segment end alike.
    """

    ids: np.ndarray
    positions: np.ndarray
    paths: list[np.ndarray]
    starts: list[int]
    queries: list[range]
    keys: list[np.ndarray]

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> Pack:
        """Packs sequences, each of at least one token."""
        ids, positions, rows = [], [], 0
        paths, starts = [np.zeros(0, np.int64)] * len(sequences), [0] * len(sequences)
        queries: list[range] = []
        keys: list[np.ndarray] = []
        before, path = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for i in in_order(sequences):
            sequence = sequences[i]
            start = shared_beginning(before, sequence)
            goes_on = 0 < start == len(before)
            new = len(sequence) - start
            path = np.concatenate([path[:start], np.arange(rows, rows + new)])
            if goes_on:  # from the whole sequence before, and what follows it stands beside it
                queries[-1], keys[-1] = range(queries[-1].start, rows + new), path
            elif new:
                queries.append(range(rows, rows + new))
                keys.append(path)
            ids.append(sequence[start:])
            positions.append(np.arange(start, len(sequence)))
            paths[i], starts[i], before, rows = path, start, sequence, rows + new
        return cls(np.concatenate(ids), np.concatenate(positions), paths, starts, queries, keys)

    def predicting(self, prompts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens of answers are predicted.

        Args:
            prompts: Length of each sequence's prompt, at least 1.

        Returns:
            The rows that predict any, each once, and of each answer's tokens, one answer after the other, which of them.
        """
        rows = np.concatenate([path[prompt - 1 : -1] for path, prompt in zip(self.paths, prompts, strict=True)])
        return np.unique(rows, return_inverse=True)


class Layout:
    """A micro-batch as the model is given it, and how its answers are read from what the model says.

    Args:
        ids: Shape (B, T), padded on the right.
        prompt_length: Shape (B,), each at least 1.
        length: Length of prompt and answer together, shape (B,).
    """

    arguments: dict[str, Any]  # of the model
    ends: torch.Tensor  # where the last token of each sequence stands within its row, shape (B,)
    beginnings: torch.Tensor  # where the last token of each prompt does, shape (B,)

    def __init__(self, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor) -> None:
        self.shortest, self.longest = int(prompt_length.min()), int(length.max())
        places = torch.arange(self.shortest, self.longest, device=ids.device)
        #: Which tokens are the answer's, shape (B, T'), from the shortest prompt on.
        self.mask = (places >= prompt_length[:, None]) & (places < length[:, None])

    def logprobs(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities of the answers' tokens, shape (B, T')."""
        raise NotImplementedError

    def kl(self, logits: torch.Tensor, base_logits: torch.Tensor) -> torch.Tensor:
        """KL(π_θ || π_base) at the places of the answers' tokens, shape (B, T')."""
        raise NotImplementedError

    def entropy(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Entropy of the distribution that each of the answers' tokens was drawn from, shape (B, T')."""
        raise NotImplementedError


class Padded(Layout):
    """One sequence a row. Padding stands on the right of a causal model, so no attention mask is needed."""

    def __init__(self, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor) -> None:
        super().__init__(ids, prompt_length, length)
        ids = ids[:, : self.longest]
        # Logits of the last positions only, which spares a large vocabulary's memory on the prompts.
        self.arguments = {"input_ids": ids, "logits_to_keep": self.mask.shape[1] + 1, "use_cache": False}
        self.ends, self.beginnings = length - 1, prompt_length - 1
        self._predicted = ids[:, self.shortest :]

    def logprobs(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return answer_logprobs(logits[:, :-1], self._predicted, temperature)

    def kl(self, logits: torch.Tensor, base_logits: torch.Tensor) -> torch.Tensor:
        return token_kl(logits[:, :-1], base_logits[:, :-1])

    def entropy(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return token_entropy(logits[:, :-1], temperature)


class Packed(Layout):
    """All sequences in one row, by ``Pack``. Logits are computed where an answer's token is predicted, at each place once.

    Args:
        ids: As of any layout.
        prompt_length: As of any layout.
        length: As of any layout.
        by_kernel: Whether attention is torch's kernel for sequences of different lengths.
    """

    def __init__(self, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor, by_kernel: bool = False) -> None:
        super().__init__(ids, prompt_length, length)
        device = ids.device
        sequences, prompts = rows_of(ids, length), prompt_length.tolist()
        pack = Pack.of(sequences)
        places, which = pack.predicting(prompts)
        predicted = np.concatenate([sequence[prompt:] for sequence, prompt in zip(sequences, prompts, strict=True)])
        self.ends = torch.tensor([int(path[-1]) for path in pack.paths], device=device)
        own = zip(pack.paths, prompts, strict=True)
        self.beginnings = torch.tensor([int(path[prompt - 1]) for path, prompt in own], device=device)
        self._which, self._predicted = torch.from_numpy(which).to(device), torch.from_numpy(predicted).to(device)
        self.arguments = {
            "input_ids": torch.from_numpy(pack.ids).to(device)[None],
            "position_ids": torch.from_numpy(pack.positions).to(device)[None],
            "logits_to_keep": torch.from_numpy(places).to(device),
            "use_cache": False,
            "segments": Segments.of(pack.queries, pack.keys, device, by_kernel),
        }

    def logprobs(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return self._table(answer_logprobs(logits[0], self._predicted, temperature, self._which))

    def kl(self, logits: torch.Tensor, base_logits: torch.Tensor) -> torch.Tensor:
        return self._table(token_kl(logits[0], base_logits[0])[self._which])

    def entropy(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return self._table(token_entropy(logits[0], temperature)[self._which])

    def _table(self, values: torch.Tensor) -> torch.Tensor:
        """The answers' tokens, one after the other, as (B, T'); 0 elsewhere."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)

    def by_answer(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits that predict the tokens of each answer, shape (length, V) each."""
        return logits[0][self._which].split(self.mask.sum(-1).tolist())


def rows_of(ids: torch.Tensor, length: torch.Tensor) -> list[np.ndarray]:
    """The sequences of a padded table, in the host's memory."""
    table = ids.cpu().numpy()
    return [np.ascontiguousarray(row[:size]) for row, size in zip(table, length.tolist(), strict=True)]
