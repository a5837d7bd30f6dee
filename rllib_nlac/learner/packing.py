"""Whether a learner packs its sequences or pads them, found out once, and the micro-batches that come of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rllib_nlac.learner.batch import micro_batches
from rllib_nlac.learner.layout import Layout, Pack, Packed, Padded, packs, rows_of
from rllib_nlac.learner.packed_attention import adopt, has_kernel, objection, restore

logger = logging.getLogger(__name__)
# By how much what a model says of a sequence may differ, packed and alone, as a share of what it says.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
WAYS = ("auto", "always", "never")  # YAML reads "off" as false


@dataclass
class Packing:
    """How the sequences of a learner reach its model.

    Attributes:
        max_tokens: Tokens of a micro-batch.
        packs: Whether sequences are packed; else they are padded.
        by_kernel: Whether attention within packs is torch's kernel for sequences of different lengths.
    """

    max_tokens: int
    packs: bool = False
    by_kernel: bool = False

    @classmethod
    def of(cls, way: str, max_tokens: int, models: list[torch.nn.Module]) -> Packing:
        """As asked for, and as far as the models allow.

        Args:
            way: One of ``WAYS``.
            max_tokens: Tokens of a micro-batch.
            models: What a micro-batch goes through: the language model, and its base where that is a copy. Those of packs are
                made to take their attention from here.
        """
        # On an H100 packs of sequences that do not begin alike took 1.7 times as long as padding.
        if way == "never" or (way == "auto" and models[0].device.type == "cuda"):
            return cls(max_tokens)
        if (why := objection(models[0])) is not None:
            _say(why)
            return cls(max_tokens)
        for model in models:
            adopt(model)
        return cls(max_tokens, True, has_kernel(models[0]))

    def check(self, run: Callable[[Layout], torch.Tensor], models: list[torch.nn.Module]) -> None:
        """Pads from now on if the model does not say the same of sequences in a pack and of each alone, or cannot say it.

        All learners must take part. A model that has a state, for example, would go on from one sequence to the next.

        Args:
            run: The forward pass; gives logits.
            models: As of ``of``.
        """
        if not self.packs:
            return
        lm = models[0]
        why = None
        try:
            apart = self._apart(run, lm)
            if not apart <= TOLERANCE.get(lm.dtype, 0.0):  # NaN, too
                why = f"{type(lm).__name__} says of sequences in a pack what differs by {apart:.1e} from what it says of each"
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            why = f"{type(lm).__name__} does not take a pack: {error}"
        if why is not None:
            self.packs = self.by_kernel = False
            for model in models:
                restore(model)
            _say(why)

    @torch.no_grad()
    def _apart(self, run: Callable[[Layout], torch.Tensor], lm: torch.nn.Module) -> float:
        """How much logits differ at most, packed and alone, for sequences of which two begin alike."""
        sizes, device = torch.tensor([9, 12, 5]), lm.device
        ids = (torch.arange(36).view(3, 12) * 7 + 3) % min(lm.config.get_text_config().vocab_size, 100)
        ids[1, :6] = ids[0, :6]
        prompts = torch.ones_like(sizes)
        whole = self.lay(ids.to(device), prompts.to(device), sizes.to(device))
        assert isinstance(whole, Packed)
        found, apart = whole.by_answer(run(whole).float()), 0.0
        for row, size, packed in zip(ids, sizes, found, strict=True):
            alone = run(Padded(row[None, :size].to(device), prompts[:1].to(device), size[None].to(device)))[0, :-1].float()
            apart = max(apart, float((packed - alone).norm() / alone.norm()))
        return apart

    def groups(self, ids: torch.Tensor, length: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Groups rows into micro-batches.

        Args:
            ids: Shape (N, T).
            length: Length of every row, shape (N,).
            rows: The rows to group, shape (M,).

        Returns:
            Row indices of each group. Every row of ``rows`` is in exactly one.
        """
        if not self.packs:
            return list(micro_batches(length, rows, self.max_tokens))
        return [rows[group] for group in packs(rows_of(ids[rows], length[rows]), self.max_tokens)]

    def lay(self, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor) -> Layout:
        """Lays out the sequences of one micro-batch; the arguments are those of ``Layout``."""
        if not self.packs:
            return Padded(ids, prompt_length, length)
        return Packed(ids, prompt_length, length, self.by_kernel)

    def computed(
        self, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor
    ) -> tuple[list[int], list[int], list[int]]:
        """What is computed of the sequences of one micro-batch, no padding.

        Returns:
            Of each sequence its length, how many logits it adds, and how many of its first tokens another one has computed.
        """
        lengths, prompts = length.tolist(), prompt_length.tolist()
        if not self.packs:
            return lengths, [size - prompt for size, prompt in zip(lengths, prompts, strict=True)], [0] * len(lengths)
        pack = Pack.of(rows_of(ids, length))
        return lengths, [len(pack.predicting(prompts)[0])], pack.starts


def _say(why: str) -> None:
    logger.warning(
        "the learner pads its sequences, as it cannot pack them (learner_model: {packing: never} asks for that): %s", why
    )
