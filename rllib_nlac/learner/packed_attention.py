"""Attention within the sequences of a pack: the seam between a pack and Transformers' models, and torch's own kernel.

A model is made to take its attention from here by Transformers' ``AttentionInterface``, and hands ``segments`` on to it with
what else its layers are given. ``tests/compatibility`` pins what this takes from Transformers and torch.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

logger = logging.getLogger(__name__)
NAME = "packed"  # of the attention
GROUP = 2048  # rows of keys that are padded to one length and looked at together, where there is no kernel
# What layers hand on that attention may leave alone. Anything else would be another kind of attention.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_causal"}


class CannotPack(ValueError):
    """A model's attention asks for what is not done here; the message says for what."""


@dataclass(frozen=True)
class Group:
    """Segments of similar length, padded on the right by any row.

    Attributes:
        queries: Rows of each segment's tokens, shape (S, Q).
        keys: Rows of what they look at, shape (S, K), in the order of the sequence.
        positions: Position of each query within its sequence, shape (S, Q).
        alike: Whether queries and keys are the same, so that the mask is the causal one.
        masks: Those that were made, by window and precision: all layers share them.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    alike: bool
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """From and to tensors of shape (rows, heads, width); the result has S · Q rows."""
        q, k, v = (
            tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for tensor, rows in ((query, self.queries), (key, self.keys), (value, self.keys))
        )
        mask = None
        if window or not self.alike:
            kind = window, query.dtype
            if kind not in self.masks:
                self.masks[kind] = _mask(self.positions, self.keys.shape[1], *kind)
            mask = self.masks[kind]
        return _dense(q, k, v, scaling, mask).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Segments:
    """Which rows of a pack look at which.

    Attributes:
        groups: Groups of all segments, where there is no kernel.
        places: Where each row of the pack stands among the results of the groups, shape (R,).
        queries: For the kernel, where each segment begins, and where the last one ends, shape (S + 1,).
        keys: The same of the rows that segments look at.
        key_rows: These rows, segment by segment; None where each segment looks at itself alone.
        longest: Queries and keys of the longest segments.
    """

    groups: tuple[Group, ...] = ()
    places: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None
    longest: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls, queries: Sequence[range], keys: Sequence[np.ndarray], device: torch.device, by_kernel: bool = False
    ) -> Segments:
        """Segments of a ``Pack``'s queries and keys."""
        if not by_kernel:
            groups, places = _grouped(queries, keys, device)
            return cls(groups, places)
        sizes = [[len(rows) for rows in side] for side in (queries, keys)]
        begins = [torch.tensor([0, *np.cumsum(side)], dtype=torch.int32, device=device) for side in sizes]
        key_rows = None if sizes[0] == sizes[1] else torch.from_numpy(np.concatenate(keys)).to(device)
        return cls((), None, begins[0], begins[1], key_rows, (max(sizes[0]), max(sizes[1])))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """From and to tensors of shape (rows, heads, width)."""
        if self.places is not None:
            results = [group.attend(query, key, value, scaling, window) for group in self.groups]
            return torch.cat(results).index_select(0, self.places)
        if self.key_rows is not None:
            key, value = key.index_select(0, self.key_rows), value.index_select(0, self.key_rows)
        limits = {"scale": scaling, "window_size": (window - 1 if window else -1, 0)}  # how far one sees to the left and right
        if "enable_gqa" in _arguments(varlen_attn):  # torch 2.11 has no such argument, and needs none
            limits["enable_gqa"] = query.shape[1] != key.shape[1]
        # The mask of fewer queries than keys is aligned with the last key, so a segment's last token sees all.
        return varlen_attn(query, key, value, self.queries, self.keys, *self.longest, **limits)


def objection(lm: torch.nn.Module) -> str | None:
    """Why a model cannot be made to take its attention from here; None where it can."""
    if not isinstance(lm, PreTrainedModel) or not lm._supports_attention_backend:
        return f"{type(lm).__name__} takes no attention from outside"
    if (chosen := lm.config._attn_implementation) != "sdpa":
        return f"learner_model has attn_implementation {chosen!r}, and packs go with 'sdpa' alone"
    return None


def adopt(lm: torch.nn.Module) -> None:
    """Makes a model take its attention from here, packed or not."""
    lm.set_attn_implementation(NAME)


def restore(lm: torch.nn.Module) -> None:
    """Undoes ``adopt``."""
    lm.set_attn_implementation("sdpa")


def has_kernel(lm: torch.nn.Module) -> bool:
    """Whether torch's kernel does the attention of a model in its place and precision, forward and backward."""
    device, dtype, config = lm.device, lm.dtype, lm.config.get_text_config()
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(12, count, width, generator=generator).to(device, dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    # The second segment sees three rows of the first.
    queries, keys = [range(7), range(7, 12)], [np.arange(7), np.array([0, 1, 2, *range(7, 12)])]
    found = []
    for by_kernel in (True, False):
        try:
            out = Segments.of(queries, keys, device, by_kernel).attend(query, key, value, None, None)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))])
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            logger.warning("torch's kernel for sequences of different lengths is not used: %s", error)
            return False
    apart = max(float((one - other).detach().float().norm() / other.float().norm()) for one, other in zip(*found, strict=True))
    if not apart < 0.05:
        logger.warning("torch's kernel for sequences of different lengths is not used: it is %.1e off", apart)
        return False
    return True


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What a layer calls; tensors are (B, heads, T, width), the result (B, T, heads, width).

    Without segments each row is one sequence, padded on the right.

    Raises:
        CannotPack: The layer asks for another kind of attention.
    """
    asked = sorted(name for name, other in others.items() if other is not None and name not in HARMLESS)
    if asked or dropout or attention_mask is not None:
        raise CannotPack(f"its attention has {', '.join(asked) or ('dropout' if dropout else 'a mask of its own')}")
    if segments is not None:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return segments.attend(query, key, value, scaling, sliding_window)[None], None
    size = query.shape[2]
    positions = torch.arange(size, device=query.device)[None]
    mask = _mask(positions, size, sliding_window, query.dtype) if sliding_window and size > sliding_window else None
    return _dense(query, key, value, scaling, mask).transpose(1, 2).contiguous(), None


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Causal where there is no mask."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def _mask(positions: torch.Tensor, keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores, shape (S, 1, Q, K): a query sees the keys up to its own position, as many as the window has."""
    places = torch.arange(keys, device=positions.device)
    seen = places <= positions[..., None]
    if window:
        seen &= places > positions[..., None] - window
    return torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill(~seen, -torch.inf)[:, None]


def _grouped(
    queries: Sequence[range], keys: Sequence[np.ndarray], device: torch.device
) -> tuple[tuple[Group, ...], torch.Tensor]:
    # Neither queries nor keys are padded to much more than they are: not to twice as many queries, and to the next keys.
    order = sorted(range(len(queries)), key=lambda i: (len(queries[i]).bit_length(), len(keys[i])), reverse=True)
    groups: list[Group] = []
    places = np.zeros(sum(map(len, queries)), np.int64)
    start = padded = 0
    while start < len(order):
        longest, kind = len(keys[order[start]]), len(queries[order[start]]).bit_length()
        fitting = order[start : start + max(1, GROUP // longest)]
        members = [i for i in fitting if len(queries[i]).bit_length() == kind]
        start += len(members)
        width = max(len(queries[i]) for i in members)
        rows, looked_at = np.zeros((len(members), width), np.int64), np.zeros((len(members), longest), np.int64)
        positions = np.zeros((len(members), width), np.int64)
        for place, i in enumerate(members):
            size, of_keys = len(queries[i]), len(keys[i])
            rows[place, :size], looked_at[place, :of_keys] = queries[i], keys[i]
            positions[place, :size] = range(of_keys - size, of_keys)
            places[queries[i].start : queries[i].stop] = range(padded + place * width, padded + place * width + size)
        padded += len(members) * width
        alike = all(len(queries[i]) == len(keys[i]) for i in members)
        queried, keyed, placed = (torch.from_numpy(table).to(device) for table in (rows, looked_at, positions))
        groups.append(Group(queried, keyed, placed, alike))
    return tuple(groups), torch.from_numpy(places).to(device)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Parameters of a function; looked up once, because every layer asks."""
    return frozenset(inspect.signature(function).parameters)


AttentionInterface.register(NAME, attention)
