"""The RLlib Learner whose gradient step runs in a DeepSpeed engine."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from rllib_nlac.activity import STEPS, activity
from rllib_nlac.engine.weight_transfer import WeightSender
from rllib_nlac.learner.adapter import as_base, has_adapter, served_names, with_dropout
from rllib_nlac.learner.batch import CRITIC, POLICY
from rllib_nlac.learner.deepspeed import DeepSpeedTrainer
from rllib_nlac.learner.flops import arithmetic_of, peak_flops
from rllib_nlac.learner.heap import give_back_large_tensors
from rllib_nlac.learner.layout import Layout
from rllib_nlac.learner.losses import answer_mean, refinement_loss, successor_loss
from rllib_nlac.learner.packing import Packing
from rllib_nlac.learner.rl_module import own_entries
from rllib_nlac.learner.target import TargetWeights
from rllib_nlac.types import Weights

SEQUENCE_LOSSES = "sequence_losses"


class Answers(NamedTuple):
    """What the model says of a micro-batch's answers, from the shortest prompt on.

    Attributes:
        logprobs: Log-probability of each token, shape (B, T').
        mask: Whether a token is the answer's, shape (B, T').
        values: What a head says of each sequence's end, shape (B,); None without a head.
        kl: KL(π_θ || π_base) over all tokens there might have been, mean over the answer's places, shape (B,); 0 where it has
            no weight.
    """

    logprobs: torch.Tensor
    mask: torch.Tensor
    values: torch.Tensor | None
    kl: torch.Tensor | float


class LanguageLearner(TorchLearner):
    """Trains θ on L1 + L2, keeps the target weights θ̄ and hands back every sequence's loss.

    One ``update`` call is one batch; its column ``minibatch`` says which rows make up which gradient step.
    """

    divides_target = True  # where ZeRO divides the optimizer among the learners, whether they divide the target weights, too
    restored_from: str | None = None  # the checkpoint
    outgoing: dict[Weights, dict[str, torch.Tensor]]  # what is about to be sent to the engines
    _whole_state: dict[str, torch.Tensor] | None = None
    _has_new_schedule = False  # of the learning rate, since a restore; RLlib's would be in force after the next update

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        model = self.module[module_id].trained.to(self._device)
        give_back_large_tensors(torch.device(self._device), sum(parameter.numel() for parameter in model.parameters()))
        # What the policy came from: the model without its adapter, or a copy of all weights where it is asked for.
        self._base = None
        if config.kl_to_base_coeff is not None and not has_adapter(self.lm):
            self._base = copy.deepcopy(self.lm).requires_grad_(False)
        held = config.held_model
        models = [self.lm] if self._base is None else [self.lm, self._base]
        self.packing = Packing.of(held.packing, config.max_tokens_per_micro_batch, models)
        self._peak = peak_flops(torch.device(self._device), held.dtype)
        self._arithmetic = arithmetic_of(self.lm)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self._first_lr(config.lr), **_adam(config))
        self.trainer = DeepSpeedTrainer(model, optimizer, config.deepspeed_settings)
        self.packing.check(lambda layout: self._run_model(layout)[0], models)
        # With a scheduler of DeepSpeed's own in the configuration, RLlib's schedule must not overrule it.
        own_schedule = "scheduler" in config.deepspeed_settings
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=None if own_schedule else config.lr
        )
        self.target = self._target_of_today()

    def _target_of_today(self) -> TargetWeights | None:
        """θ̄ as a copy of θ; None where the algorithm has none."""
        if self.config.tau is None:
            return None
        num_shares = self.trainer.world_size if self.trainer.is_sharded and self.divides_target else 1
        # With an adapter θ̄ averages A and B, whose product is not the average of the products.
        return TargetWeights(self.trainer.parts(), self.config.tau, num_shares, self.trainer.rank)

    def target_weights(self) -> dict[str, torch.Tensor]:
        """θ̄ by the parameters' names, in θ's precision; of a learner that keeps all of it."""
        assert self.target is not None
        own = dict(self.trained.named_parameters())
        return {name: tensor.to(own[name].dtype) for name, tensor in self.target.state.items()}

    def take_over(self) -> None:
        """Goes on from weights that were put into the module alone: DeepSpeed's own copies and θ̄ become theirs."""
        self.trainer.take_over()
        self.target = self._target_of_today()

    @staticmethod
    def _first_lr(lr: Any) -> float:
        return float(lr[0][1] if isinstance(lr, (list, tuple)) else lr)

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """DeepSpeed reduces the gradients, so nothing is wrapped."""

    @override(TorchLearner)
    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        if self._has_new_schedule:
            optimizer = self.get_optimizer(DEFAULT_MODULE_ID)
            schedule, now = self._optimizer_lr_schedules[optimizer], timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0)
            self._set_optimizer_lr(optimizer, lr=schedule.update(timestep=now))
            self._has_new_schedule = False

    @override(TorchLearner)
    def _update(self, batch: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        started = time.perf_counter()
        rows = batch[DEFAULT_MODULE_ID]
        losses, norms = torch.zeros(len(rows["length"])), torch.zeros(len(rows["length"]), dtype=torch.float64)
        steps: list[float] = []
        for minibatch in rows["minibatch"].unique().tolist():
            members = (rows["minibatch"] == minibatch).nonzero().squeeze(-1)
            with with_dropout(self.lm, (self.config.seed or 0, self._learner_index, self.trainer.engine.global_steps)):
                steps.append(self._gradient_step(rows, members, losses))
            activity.advance(STEPS)
            norms[members.cpu()] = steps[-1]
        self._log(rows, losses, norms, steps, time.perf_counter() - started)
        done = norms.isfinite()
        return {}, {DEFAULT_MODULE_ID: (losses * rows["weight"].cpu())[done].sum()}, {}

    def _gradient_step(self, rows: dict[str, torch.Tensor], members: torch.Tensor, losses: torch.Tensor) -> float:
        """One optimizer step on the given rows, in micro-batches.

        Args:
            rows: The batch.
            members: The rows of this step.
            losses: Takes up each of their losses, without the KL to the base, shape (N,).

        Returns:
            The gradient's norm before clipping. Where it is not finite no learner has made the step, and the target weights
            stay where they are, too.
        """
        groups = self.packing.groups(rows["ids"], rows["length"], members)
        missing = self.trainer.most_of_any_learner(len(groups)) - len(groups)
        for number, group in enumerate([*groups, *[groups[-1][:1]] * missing]):
            micro_batch = {name: column[group] for name, column in rows.items()}
            if number >= len(groups):  # ZeRO 3 gathers in every forward pass, so all learners make equally many
                micro_batch["weight"] = torch.zeros_like(micro_batch["weight"])
            own, kl = self._sequence_losses(micro_batch)
            whole = own + kl
            loss = self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID, config=self.config, batch=micro_batch, fwd_out={SEQUENCE_LOSSES: whole}
            )
            self.trainer.backward(loss)
            # Where the KL alone is not finite, its sequence is named all the same.
            losses[group.cpu()] = torch.where(whole.isfinite(), own, whole).detach().float().cpu()
        norm = self.trainer.step()
        if math.isfinite(norm) and self.target is not None and self.config.tau > 0:
            self.target.update(self.trainer.parts())
        return norm

    @override(TorchLearner)
    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """A micro-batch's share of L1 + L2: the weights hold importance weight and mean, so shares just add up."""
        return (fwd_out[SEQUENCE_LOSSES] * batch["weight"]).sum()

    def _sequence_losses(self, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
        """L1 of each critic sequence and L2 of each policy sequence, shape (B,).

        Beside them what is added to each for the KL to the base, which is neither logged as a loss nor part of a priority.
        """
        logprobs, mask, _, kl = self._answers(rows["ids"], rows["prompt_length"], rows["length"])
        role = rows["role"]
        own = torch.where(role == POLICY, refinement_loss(logprobs, mask), successor_loss(logprobs, mask))
        return own, (role == POLICY) * kl

    def _answers(
        self, ids: torch.Tensor, prompt_length: torch.Tensor, length: torch.Tensor, temperature: float = 1.0
    ) -> Answers:
        """Runs the model on prompts and answers; ``Answers.kl`` holds ``kl_to_base_coeff`` already."""
        layout = self.packing.lay(ids, prompt_length, length)
        logits, values = self._run_model(layout)
        kl: torch.Tensor | float = 0.0
        if self.config.kl_to_base_coeff and torch.is_grad_enabled():
            kl = self.config.kl_to_base_coeff * answer_mean(layout.kl(logits, self._base_logits(layout)), layout.mask)
        return Answers(layout.logprobs(logits, temperature), layout.mask, values, kl)

    @torch.no_grad()
    def _base_logits(self, layout: Layout) -> torch.Tensor:
        """Logits of what the policy came from; all learners must take part."""
        if self._base is not None:
            return self._base(**layout.arguments).logits
        with as_base(self.lm):
            return self.lm(**layout.arguments).logits

    def _run_model(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, and what a head says of each sequence's end where the module has one."""
        return self.trainer(**layout.arguments).logits, None

    def _logits(self, layout: Layout) -> torch.Tensor:
        return self._run_model(layout)[0]

    def _logits_by(self, weights: Mapping[str, torch.Tensor], layout: Layout) -> torch.Tensor:
        """With some of the weights replaced by others."""
        return torch.func.functional_call(self.trained, dict(weights), kwargs=layout.arguments).logits

    def logprobs_of(
        self, prompt_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probabilities of given texts' ids, shape (len(ids),) each; all learners must take part."""
        return self._by_text(prompt_ids, token_ids, self._logits, temperature)

    def token_logprobs(
        self, prompt_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]]
    ) -> dict[Weights, list[np.ndarray]]:
        """What the model says of each token of given texts, for a reader; all learners must take part.

        Args:
            prompt_ids: The prompt of each text.
            token_ids: Each text's own ids, at least one.

        Returns:
            Log-probabilities of each text's ids by θ, shape (len(ids),), and by θ̄ where it lies here whole and in the model's
            own precision: a copy of a large model in another one is not worth it. Under ZeRO 3 no weights can stand in
            for others.
        """
        found = {Weights.POLICY: self.logprobs_of(prompt_ids, token_ids)}
        is_whole = self.target is not None and self.target.num_shares == 1 and self.trainer.zero_stage < 3
        target = self.target.state if self.target is not None and is_whole else {}
        own = dict(self.trained.named_parameters())
        if target and all(name in own and own[name].dtype == tensor.dtype for name, tensor in target.items()):
            found[Weights.TARGET] = self._by_text(prompt_ids, token_ids, functools.partial(self._logits_by, target))
        return found

    @torch.no_grad()
    def _by_text(
        self,
        prompt_ids: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        logits_of: Callable[[Layout], torch.Tensor],
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-probabilities of each text's ids."""
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(token_ids)
        for group, layout in self._layouts(prompt_ids, token_ids):
            logprobs, mask = (table.cpu() for table in (layout.logprobs(logits_of(layout), temperature).float(), layout.mask))
            for row, item in enumerate(group):
                found[item] = logprobs[row][mask[row]].numpy()
        return found

    def _layouts(
        self, prompt_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], Layout]]:
        """Micro-batches of texts: which of them, and how they are laid out."""
        texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompt_ids, token_ids, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        length, prompts = torch.tensor([len(text) for text in texts]), torch.tensor([len(prompt) for prompt in prompt_ids])
        for group in self.packing.groups(ids, length, torch.arange(len(texts))):
            own = (column[group].to(self._device) for column in (ids, prompts, length))
            yield group.tolist(), self.packing.lay(*own)

    @property
    def knows_base(self) -> bool:
        """Whether it can say what the model that the policy came from would have said."""
        return self._base is not None or has_adapter(self.lm)

    def base_logprobs_of(
        self, prompt_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """As ``logprobs_of``, of the model that the policy came from."""
        return self._by_text(prompt_ids, token_ids, self._base_logits, temperature)

    def export_weights(
        self, copies: bool = True, on_device: bool = False, of: Collection[Weights] = (Weights.POLICY, Weights.TARGET)
    ) -> dict[Weights, dict[str, torch.Tensor]]:
        """θ and, where there is one, θ̄ by the names that engines know, in the model's own precision, in the host's memory.

        All learners must take part, and all but the first get nothing.

        Args:
            copies: Whether the tensors are copies. Else they may be the learner's own, for whoever is done with them before the
                next gradient step.
            on_device: Whether they stay where they are, unless they are copies.
            of: Which of them.
        """
        copies = copies or self.trainer.zero_stage == 3  # whose parameters are whole only while they are gathered
        served = served_names(self.lm)
        names = {id(parameter): served[name] for name, parameter in self.lm.named_parameters() if name in served}
        target = self.target if Weights.TARGET in of else None
        states: dict[Weights, dict[str, torch.Tensor]] = {Weights.POLICY: {}}
        if target is not None:
            states[Weights.TARGET] = {}
        for part in self.trainer.parts():
            for own_name, parameter in part.items():
                name = names.get(id(parameter))
                if name is None:
                    continue  # a head is the learner's own
                tensors = {Weights.POLICY: parameter.detach()}
                if target is not None:
                    tensors[Weights.TARGET] = target.whole(own_name, like=parameter)
                if self._learner_index == 0:
                    for weights, tensor in tensors.items():
                        stays = on_device and not copies
                        states[weights][name] = tensor if stays else tensor.to("cpu", copy=copies)
        return states

    @functools.cached_property
    def weight_sender(self) -> WeightSender:
        """Sends weights to engines on GPUs."""
        return WeightSender(torch.device(self._device))

    @property
    def lm(self) -> torch.nn.Module:
        """The language model, which the engines serve."""
        return self.module[DEFAULT_MODULE_ID].lm

    @property
    def trained(self) -> torch.nn.Module:
        """What DeepSpeed trains: the language model, with a head where a module has one."""
        return self.module[DEFAULT_MODULE_ID].trained

    def _log(
        self, rows: dict[str, torch.Tensor], losses: torch.Tensor, norms: torch.Tensor, steps: list[float], seconds: float
    ) -> None:
        """Losses, gradient steps and speed of an update.

        Metrics (learners/default_policy):
            critic_loss, policy_loss: L1 and L2 per token. L1 settles at the entropy of the futures. If one rises, lower `lr`;
                if neither falls in 10 iterations, raise it.
            gradient_norm: Norm before clipping. Spikes: lower `lr`.
            num_gradient_steps, num_stopped_steps: Updates made, and updates dropped because a number was not finite; three in a
                row end the run.
            num_tokens_trained, tokens_per_s: Work and speed of the learners.
            mfu: Share of the device's peak FLOP/s, for known GPUs in bfloat16. For more: a larger `max_tokens_per_micro_batch`.
            default_optimizer_learning_rate: Current learning rate, which RLlib reports.
        """
        real = rows["item"].cpu() >= 0
        role, item, step = (rows[name].cpu()[real] for name in ("role", "item", "minibatch"))
        losses, norms = losses[real], norms[real]
        columns = [column.numpy() for column in (item, role, step, losses, norms)]
        # A series, which RLlib concatenates over learners; the algorithm takes it out of the results again.
        self.metrics.log_value((DEFAULT_MODULE_ID, SEQUENCE_LOSSES), np.stack(columns, axis=1), reduce="item_series")
        for name, kind in (("critic_loss", CRITIC), ("policy_loss", POLICY)):
            if (role == kind).any():
                mean = losses[(role == kind) & norms.isfinite()].mean().item()  # NaN where every step was stopped
                self.metrics.log_value((DEFAULT_MODULE_ID, name), mean, window=1)
        done = [norm for norm in steps if math.isfinite(norm)]
        self.metrics.log_value((DEFAULT_MODULE_ID, "gradient_norm"), float(np.mean(done)) if done else math.nan, window=1)
        # All learners make the same steps, and what they log is added up: the first one counts.
        made, stopped = (len(done), len(steps) - len(done)) if self._learner_index == 0 else (0, 0)
        self.metrics.log_value((DEFAULT_MODULE_ID, "num_gradient_steps"), made, reduce="sum")
        self.metrics.log_value((DEFAULT_MODULE_ID, "num_stopped_steps"), stopped, reduce="sum")
        tokens = int(rows["length"].cpu()[real].sum())
        self.metrics.log_value((DEFAULT_MODULE_ID, "num_tokens_trained"), tokens, reduce="sum")
        # Each logs that of all, as far as it knows, and RLlib takes the mean.
        speed = self.trainer.world_size * tokens / max(seconds, 1e-9)
        self.metrics.log_value((DEFAULT_MODULE_ID, "tokens_per_s"), speed, window=1)
        if self._peak and self._arithmetic:
            mfu = self.flops_of({name: column.cpu()[real] for name, column in rows.items()}) / max(seconds, 1e-9) / self._peak
            self.metrics.log_value((DEFAULT_MODULE_ID, "mfu"), mfu, window=1)

    def flops_of(self, rows: Mapping[str, torch.Tensor]) -> float:
        """Arithmetic of the gradient steps on these rows, with what the base says of the policy's where that is asked."""
        assert self._arithmetic is not None
        done = 0.0
        for minibatch in rows["minibatch"].unique():
            members = (rows["minibatch"] == minibatch).nonzero().squeeze(-1)
            for group in self.packing.groups(rows["ids"], rows["length"], members):
                columns = [rows[name][group] for name in ("ids", "prompt_length", "length")]
                done += self._arithmetic.of_step(*self.packing.computed(*columns))
                of_policy = rows["role"][group] == POLICY
                if self.config.kl_to_base_coeff and of_policy.any():
                    own = (column[of_policy] for column in columns)
                    done += self._arithmetic.of_base.of_forward(*self.packing.computed(*own))
        return done

    @override(Learner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().get_state(*args, **kwargs)
        if state.get(COMPONENT_RL_MODULE, {}).get(DEFAULT_MODULE_ID) and self._whole_state is not None:
            state[COMPONENT_RL_MODULE][DEFAULT_MODULE_ID], self._whole_state = self._whole_state, None
        return state

    def prepare_for_saving(self) -> None:
        """Under ZeRO 3, gathers the shards that ``get_state`` of the first learner will give; all learners must take part."""
        if self.trainer.zero_stage == 3:
            copies: dict[int, torch.Tensor] = {}
            for part in self.trainer.parts():
                if self._learner_index == 0:
                    copies.update({id(parameter): parameter.detach().to("cpu", copy=True) for parameter in part.values()})
            if self._learner_index == 0:  # with buffers, and with the second name of a parameter that has two
                entries = own_entries(self.trained)
                self._whole_state = {name: copies.get(id(entry), entry.detach().cpu()) for name, entry in entries.items()}

    @override(Learner)
    def _get_optimizer_state(self) -> dict[str, Any]:
        return {} if self.trainer.is_sharded else self._trainer_state()

    @override(Learner)
    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        if state:
            self._set_trainer_state(state)

    @override(Learner)
    def set_state(self, state: dict[str, Any]) -> None:
        self._weights_seq_no = -1  # or RLlib would leave out the weights of an earlier state, and take over all the rest
        super().set_state(state)
        self._weights_seq_no = max(self._weights_seq_no, 0)
        if COMPONENT_RL_MODULE in state and COMPONENT_OPTIMIZER not in state:  # as set_weights() does
            self.take_over()

    @override(Checkpointable)
    def restore_from_path(self, path: Any, **kwargs: Any) -> None:
        """Remembers that it was restored: RLlib says nothing of a learner in another process that could not be."""
        self.restored_from = None
        super().restore_from_path(path, **kwargs)
        self.restored_from = str(path)

    def get_shard(self) -> dict[str, Any] | None:
        """What only this learner knows of the optimizer; None where all learners know the same."""
        return self._trainer_state() if self.trainer.is_sharded else None

    def set_shard(self, shard: dict[str, Any]) -> None:
        """Restores what ``get_shard`` gave."""
        self._set_trainer_state(shard)

    def _trainer_state(self) -> dict[str, Any]:
        target = {name: share.to("cpu", copy=True) for name, share in self.target.state.items()} if self.target else None
        return {
            "deepspeed": self.trainer.state_dict(),
            "target": target,
            "torch_rng": torch.get_rng_state(),
            "lr": _plain(self.config.lr),
        }

    def _set_trainer_state(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state["deepspeed"])
        for group in self.get_optimizer(DEFAULT_MODULE_ID).param_groups:
            # What the configuration says now is in force, not what it said when the checkpoint was written.
            group.update(_adam(self.config))
            if "scheduler" not in self.config.deepspeed_settings:
                now = _plain(self.config.lr)
                if isinstance(now, list):
                    self._has_new_schedule = state["lr"] != now
                else:
                    group["lr"] = now
        if state["target"] is None:  # of a run without tau
            self.target = self._target_of_today()
        elif self.target is not None:
            self.target.load(state["target"])
        torch.set_rng_state(state["torch_rng"])


def _plain(lr: Any) -> Any:
    """A learning rate, or the points of its schedule, whatever sequences they came as."""
    return [list(point) for point in lr] if isinstance(lr, (list, tuple)) else lr


def _adam(config: Any) -> dict[str, float]:
    return {"weight_decay": 0.0, "eps": 1e-8, **config.optimizer}
