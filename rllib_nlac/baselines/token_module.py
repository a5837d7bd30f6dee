"""Text for RLlib's own learners: an RLModule, an action distribution and a learner connector, all by RLlib's interfaces.

An action is a whole turn, a sequence of tokens. RLlib's losses touch it only through ``logp``, ``kl`` and ``entropy`` of a
distribution, and read the value of a state from the module, so PPO's and APPO's learners run unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from torch import nn

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.episode import answer_at, generation_at, generations_of, messages_at
from rllib_nlac.learner.adapter import has_adapter
from rllib_nlac.learner.packing import Packing
from rllib_nlac.learner.rl_module import copied, load_own_entries, own_entries, served_state
from rllib_nlac.learner.value_head import ValueHeadModel, ValueHeadModule
from rllib_nlac.types import dialogue_after, goes_on

PAD = -1  # fills prompts and actions up on the right


class TokenSequence(Distribution):
    """The distribution of a turn, known at the sampled tokens only: a product over them.

    Args:
        inputs: Shape (B, T, 2): log-probability of each sampled token, and the entropy of the distribution it was drawn
            from; zeros behind the turn's end. What stands in a vocabulary's other places is never stored.
    """

    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.token_logprobs, self.token_entropies = inputs[..., 0], inputs[..., 1]

    @classmethod
    @override(Distribution)
    def from_logits(cls, logits: torch.Tensor, **kwargs: Any) -> TokenSequence:
        return cls(logits)

    @override(Distribution)
    def logp(self, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """log π(turn | state), shape (B,); the inputs were made for the very tokens in ``value``."""
        return self.token_logprobs.sum(-1)

    @override(Distribution)
    def entropy(self, **kwargs: Any) -> torch.Tensor:
        """Sum of the tokens' entropies, shape (B,): the turn's entropy, estimated at one sample of its prefixes."""
        return self.token_entropies.sum(-1)

    @override(Distribution)
    def kl(self, other: Distribution, **kwargs: Any) -> torch.Tensor:
        """KL(self || other) estimated from the tokens that self sampled, never negative, shape (B,).

        Source: the k3 estimator, J. Schulman, "Approximating KL divergence", 2020.
        """
        assert isinstance(other, TokenSequence)
        difference = other.token_logprobs - self.token_logprobs
        return (difference.exp() - 1 - difference).sum(-1)

    @override(Distribution)
    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("turns are sampled by the engine, not by the learner's module")

    rsample = sample

    @staticmethod
    @override(Distribution)
    def required_input_dim(space: gym.Space, **kwargs: Any) -> int:
        return 2


class TokenValueModule(ValueHeadModule, ValueFunctionAPI, TargetNetworkAPI):
    """The language model as policy, with a value of the state beside it, as RLlib's PPO and APPO learners want it.

    Observations are prompts, shape (B, P), and actions turns, shape (B, T), both padded by ``PAD``. The value is read at the
    prompt's last token. ``model_config`` further holds ``temperature``, at which the engine samples, and
    ``max_tokens_per_micro_batch`` and ``packing``.
    """

    @override(ValueHeadModule)
    def setup(self) -> None:
        super().setup()
        self._found_packing: Packing | None = None
        self.action_dist_cls = TokenSequence
        if has_adapter(self.lm):
            # RLlib steps on these very numbers, and in bfloat16 most steps of a small learning rate are rounded away.
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()

    @override(ValueHeadModule)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """All weights as CPU tensors; for inference the language model's alone, by their Hugging Face names."""
        return copied(served_state(self.lm) if inference_only else own_entries(self))

    @override(ValueHeadModule)
    def set_state(self, state: Any) -> None:
        load_own_entries(self, state)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._forward_train(batch)[Columns.ACTION_DIST_INPUTS]}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        inputs, values = self._run(self.model, batch)
        return {Columns.ACTION_DIST_INPUTS: inputs, Columns.EMBEDDINGS: values}

    @override(ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: torch.Tensor | None = None) -> torch.Tensor:
        """V(s), shape (B,); ``embeddings`` are the values that a training pass has found on its way."""
        return embeddings if embeddings is not None else self._without_gradients(self.model, batch)[1]

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        self.target_model = make_target_network(self.model)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.model, self.target_model)]

    @override(TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: self._without_gradients(self.target_model, batch)[0]}

    @torch.no_grad()
    def _without_gradients(self, model: ValueHeadModel, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass over the whole batch, however large."""
        return self._run(model, batch)

    def _packing(self) -> Packing:
        """How turns reach the models: found out at the first pass, when they are where they will be."""
        if self._found_packing is None:
            models = [model.lm for model in (self.model, getattr(self, "target_model", None)) if model is not None]
            own = Packing.of(self.model_config["packing"], self.model_config["max_tokens_per_micro_batch"], models)
            own.check(lambda layout: self.model(positions=layout.ends, **layout.arguments)[0], models)
            self._found_packing = own
        return self._found_packing

    def _run(self, model: ValueHeadModel, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of ``TokenSequence`` (B, T, 2) and values (B,), micro-batch by micro-batch."""
        prompts, turns = batch[Columns.OBS].long(), batch[Columns.ACTIONS].long()
        starts, mask = (prompts != PAD).sum(-1), turns != PAD
        lengths = starts + mask.sum(-1)
        # Each turn directly behind its prompt.
        ids = nn.functional.pad(prompts.clamp(min=0), (0, turns.shape[1]))
        places = starts.unsqueeze(-1) + torch.arange(turns.shape[1], device=turns.device)
        ids = ids.scatter(1, places, torch.where(mask, turns, 0))
        packing, temperature = self._packing(), self.model_config["temperature"]
        groups = packing.groups(ids, lengths, torch.arange(len(ids), device=ids.device))
        tables, values = [], []
        for group in groups:
            layout = packing.lay(ids[group], starts[group], lengths[group])
            logits, value = model(positions=layout.beginnings, **layout.arguments)
            found = torch.stack([layout.logprobs(logits, temperature), layout.entropy(logits, temperature)], -1)
            # From places in the layout to places in the turn.
            table = found.new_zeros(*turns[group].shape, 2)
            tables.append(table.masked_scatter(mask[group].unsqueeze(-1), found[layout.mask]))
            values.append(value)
        inverse = torch.cat(groups).argsort()
        return torch.cat(tables)[inverse], torch.cat(values)[inverse]


class TextToTokens(ConnectorV2):
    """Learner connector: the columns of RLlib's batch from the text episodes of ``TextEnvRunner``.

    Args:
        chat: Writes the prompt of the state that an episode was cut off in.
        max_prompt_tokens: Width of the observations.
        max_action_tokens: Width of the actions.
        history_turns: As in the config.
    """

    def __init__(
        self, *args: Any, chat: Chat, max_prompt_tokens: int, max_action_tokens: int, history_turns: int | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._chat, self._history_turns = chat, history_turns
        self._widths = (max_prompt_tokens, max_action_tokens)

    @override(ConnectorV2)
    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[SingleAgentEpisode], **kwargs: Any) -> Any:
        width, turn_width = self._widths
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            count = len(episode)
            generations = generations_of(episode)
            # RLlib has added one step that repeats the last one: it stands for the state after the end.
            prompts = [g.prompt_ids for g in generations[:-1]] + [self._after_the_end(episode)]
            inputs = np.zeros((count, turn_width, 2), np.float32)
            for row, generation in enumerate(generations):
                inputs[row, : len(generation.token_ids), 0] = generation.sampled_logprobs
            columns = {
                Columns.OBS: _padded(prompts, width),
                Columns.ACTIONS: _padded([g.token_ids for g in generations], turn_width),
                Columns.ACTION_LOGP: inputs[..., 0].sum(-1),
                Columns.ACTION_DIST_INPUTS: inputs,
            }
            for name, column in columns.items():
                self.add_n_batch_items(batch, name, column, count, episode)
            episode.extra_model_outputs.clear()  # texts and records, which RLlib would try to put into the batch
        return batch

    def _after_the_end(self, episode: SingleAgentEpisode) -> tuple[int, ...]:
        """Prompt of the last state; its value counts only where the episode was cut off, never behind a real end."""
        last: tuple[int, ...] = generation_at(episode, -1).prompt_ids
        if episode.is_terminated:
            return last
        messages = messages_at(episode, -1)
        after = dialogue_after(messages, episode.get_actions(-1), answer_at(episode, -1), self._history_turns)
        seen = generation_at(episode, -1).seen if goes_on(after, messages) else None
        (prompt,) = self._chat.prompts([Wanted(after, seen=seen)])
        return last if isinstance(prompt, PromptTooLong) else prompt.ids


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    table = np.full((len(rows), width), PAD, np.int32)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table
