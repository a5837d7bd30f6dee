"""A scalar critic in NLAC's place, by the scheme of SAC (the ablation of arXiv 2512.04601).

The same replay, the same model, but the critic is a number: Q(s, a) from a head at the end of the action, trained on
y = r + γ (Q̄(s', a') - α log π(a'|s')), a' ~ π. The policy follows the score-function gradient of Q - α log π over several of
its own actions in s, each beside their mean. SAC's reparametrised gradient does not exist for text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.replay import ReplayAlgorithm, ReplayConfig
from rllib_nlac.diagnostics.metrics import log_replay
from rllib_nlac.engine.chat import Prompt, PromptTooLong, Wanted
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence
from rllib_nlac.learner.group import on_first_learner
from rllib_nlac.learner.layout import Layout
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.learner.losses import clipped_policy_loss, priorities
from rllib_nlac.learner.value_head import ValueHeadModule
from rllib_nlac.replay.buffer import ReplaySample
from rllib_nlac.types import Generation, Request, Seen, Transition


class ScalarCriticConfig(ReplayConfig):
    """Configures the scalar critic. ``minibatch_size`` counts transitions."""

    serves_target = False  # the learner asks its own
    discounts = True
    RANGES = {
        **ranges.POLICY_GRADIENT,
        "num_candidates": ranges.Range(2, whole=True, why="an advantage compares actions"),
        "tau": ranges.Range(0, 1, why="targets come from the target weights"),
        "entropy_alpha": ranges.NOT_NEGATIVE,
        "clip_param": ranges.POSITIVE,
        "vf_loss_coeff": ranges.NOT_NEGATIVE,
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ScalarCritic)
        self.tau = 0.05
        self.num_candidates = 4
        self.entropy_alpha = 0.01
        self.clip_param = 0.2
        self.vf_loss_coeff = 1.0

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        num_candidates: int | None = NotProvided,
        entropy_alpha: float | None = NotProvided,
        clip_param: float | None = NotProvided,
        vf_loss_coeff: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets the hyper-parameters.

        Args:
            num_candidates: Actions of the policy in each sampled state.
            entropy_alpha: SAC's α, the weight of the entropy.
            clip_param: ε of the clipped ratio.
            vf_loss_coeff: Weight of the critic's squared error.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        return ScalarCriticLearner

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=ValueHeadModule, model_config=self.model_settings)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check(
            self.zero_stage < 3,
            "deepspeed_config",
            "must have a zero_optimization.stage below 3: values need whole parameters",
        )


class ScalarCriticLearner(LanguageLearner):
    """Squared error of Q on critic sequences, clipped policy gradient on policy sequences."""

    divides_target = False  # Q̄ is computed by each learner for itself

    @override(LanguageLearner)
    def _run_model(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.trainer(positions=layout.ends, **layout.arguments)

    @override(LanguageLearner)
    def _sequence_losses(self, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
        logprobs, mask, values, kl = self._answers(
            rows["ids"], rows["prompt_length"], rows["length"], self.config.action_temperature
        )
        assert values is not None
        behaviour = rows["logprobs"][:, int(rows["prompt_length"].min()) : int(rows["length"].max())]
        policy = clipped_policy_loss(logprobs, behaviour, rows["scalar"], mask, self.config.clip_param)
        of_critic = rows["role"] == CRITIC
        return torch.where(of_critic, (values - rows["scalar"]).square(), policy), ~of_critic * kl

    @torch.no_grad()
    def q_values(self, sequences: Sequence[tuple[int, ...]], target: bool) -> np.ndarray:
        """Q or Q̄ at the end of each sequence of prompt and action, shape (N,)."""
        values = np.zeros(len(sequences), np.float32)
        weights = self.target_weights() if target else dict(self.trained.named_parameters())
        for group, layout in self._layouts(sequences, [()] * len(sequences)):
            arguments = {**layout.arguments, "positions": layout.ends, "logits_to_keep": 1}
            values[group] = torch.func.functional_call(self.trained, weights, kwargs=arguments)[1].cpu().numpy()
        return values


class ScalarCritic(ReplayAlgorithm):
    """Off-policy actor-critic with a number for a critic.

    Metrics (top level):
        q_mean: ScalarCritic: mean of Q - α log π over the candidates.
        num_turns_too_long: ScalarCritic: drawn turns whose prompt exceeds the context.
    """

    nothing_to_learn = "no drawn turn's prompt fits the context; raise max_context, or lower history_turns or max_action_tokens"

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> ScalarCriticConfig:
        return ScalarCriticConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def training_step(self) -> None:
        sample, states, next_states = self._prompted(self.replay(self.collect()))
        self.check_lessons(states)
        if not states:
            return
        n, transitions = self.config.num_candidates, sample.transitions
        answers = self._generate([p for p in states for _ in range(n)] + [p for p in next_states if p is not None])
        candidates, following = answers[: n * len(transitions)], iter(answers[n * len(transitions) :])
        next_actions = [None if prompt is None else next(following) for prompt in next_states]

        targets = self._targets(transitions, next_actions)
        soft = self._q(candidates, target=False) - self.config.entropy_alpha * np.array(
            [g.sampled_logprobs.sum() for g in candidates]
        )
        advantages = soft.reshape(-1, n) - soft.reshape(-1, n).mean(1, keepdims=True)
        groups = [candidates[i * n : (i + 1) * n] for i in range(len(transitions))]
        losses = self.learn(self._sequences(sample, targets, groups, advantages), count=len(transitions))
        self.prioritise(sample, priorities(losses[CRITIC], np.full(len(targets), np.nan)))
        log_replay(self.metrics, self.local_replay_buffer, sample, self.weight_version)
        self.metrics.log_value("q_mean", float(soft.mean()), window=1)
        self.sync_weights()

    def _prompted(self, sample: ReplaySample) -> tuple[ReplaySample, list[Prompt], list[Prompt | None]]:
        """What of a sample fits the context, with the prompts of its states and of what follows, None after an end."""
        ends = [(t, *t.following)[-1] for t in sample.transitions]
        room = self.config.action_sampling.max_tokens
        states = self.chat.prompts([Wanted(t.state, room, Seen(t.generation.prompt_ids)) for t in sample.transitions])
        following = iter(self.chat.prompts([Wanted(t.next_state, room, t.next_seen) for t in ends if not t.ended]))
        next_states = [None if t.ended else next(following) for t in ends]
        pairs = enumerate(zip(states, next_states, strict=True))
        kept = [i for i, pair in pairs if not any(isinstance(prompt, PromptTooLong) for prompt in pair)]
        self.metrics.log_value("num_turns_too_long", len(states) - len(kept), window=1)
        part = ReplaySample([sample.transitions[i] for i in kept], sample.weights[kept], [sample.nodes[i] for i in kept])
        return part, [states[i] for i in kept], [next_states[i] for i in kept]

    def _sequences(
        self, sample: ReplaySample, targets: Sequence[float], candidates: Sequence[Sequence[Generation]], advantages: np.ndarray
    ) -> list[TrainingSequence]:
        """The stored action of every transition for the critic, its candidates for the policy, in every epoch.

        Args:
            sample: N transitions and their importance weights.
            targets: y of each, shape (N,).
            candidates: The policy's actions in each one's state, shape (N, n).
            advantages: Theirs, shape (N, n).
        """
        sequences: list[TrainingSequence] = []
        size, count = self.config.minibatch_size, len(sample.transitions)
        orders = [range(count), *(self.rng.permutation(count).tolist() for _ in range(self.config.num_epochs - 1))]
        for epoch, order in enumerate(orders):
            for place, i in enumerate(order):
                members = min(size, count - place // size * size)  # the last step of an epoch may have fewer
                step, weight = epoch * -(-count // size) + place // size, float(sample.weights[i]) / members
                g, origin = sample.transitions[i].generation, f"transition {sample.transitions[i].id}"
                of_critic, of_candidate = weight * self.config.vf_loss_coeff, weight / len(candidates[i])
                sequences.append(
                    TrainingSequence(g.prompt_ids, g.token_ids, CRITIC, i, step, of_critic, targets[i], origin=origin)
                )
                sequences += [
                    TrainingSequence(
                        a.prompt_ids, a.token_ids, POLICY, i, step, of_candidate, float(advantage), a.sampled_logprobs, origin
                    )
                    for a, advantage in zip(candidates[i], advantages[i], strict=True)
                ]
        return sequences

    def _targets(self, transitions: Sequence[Transition], next_actions: Sequence[Generation | None]) -> list[float]:
        """y of each transition: its rewards, and what follows in the policy's hands, nothing across an end."""
        gamma = self.config.gamma
        alive = [g for g in next_actions if g is not None]
        values = self._q(alive, target=True) - self.config.entropy_alpha * np.array([g.sampled_logprobs.sum() for g in alive])
        bootstraps = iter(values)
        targets = []
        for t, next_action in zip(transitions, next_actions, strict=True):
            steps = (t, *t.following)
            y = sum(gamma**i * step.reward for i, step in enumerate(steps))
            if next_action is not None:
                y += gamma ** len(steps) * float(next(bootstraps))
            targets.append(y)
        return targets

    def _generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """One turn of the policy behind each prompt."""
        sampling = self.config.action_sampling
        requests = []
        for prompt in prompts:
            seed = int(self.rng.integers(1 << 31))
            limits = (sampling.max_tokens, sampling.temperature, sampling.top_p)
            requests.append(Request(prompt.ids, *limits, seed, role="candidate"))
        return self.engine.generate(requests)

    def _q(self, generations: Sequence[Generation], target: bool) -> np.ndarray:
        """Q of each action in its state, by the first learner."""
        if not generations:
            return np.zeros(0)
        sequences = [(*g.prompt_ids, *g.token_ids) for g in generations]
        return self._with_learners(
            lambda: on_first_learner(self.learner_group, lambda learner: learner.q_values(sequences, target))
        )
