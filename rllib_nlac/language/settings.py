"""How the language stages sample and decide; ``NLACConfig`` fills this in."""

from __future__ import annotations

from dataclasses import dataclass

from rllib_nlac.types import Weights


@dataclass(frozen=True)
class Sampling:
    """Sampling of one role: the most tokens, the temperature (0 is greedy) and the nucleus mass."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class StageSettings:
    """Everything the stages need beside prompts, engine and transitions.

    Attributes:
        action: Sampling of a' (and of the EnvRunner's actions).
        future: Sampling of d and d'.
        backup: Sampling of y.
        critique: Sampling of the critique.
        refine: Sampling of a_r.
        reasoning: Sampling of a rewritten reasoning; None trains on reasoning as it was sampled.
        num_futures: k, futures per critique.
        num_next_actions: a' that the backup draws in s'; it follows the first whose d' finds the evaluator's yes.
        num_refinements: m, rounds of critique and refinement; 0 asks for a critique and never for a refinement.
        action_format: "plain" or "react".
        judge: Which weights criticise and refine. The target's drift more slowly than the policy's, and let all three
            waves run with two swaps of weights.
        backup_weights: Which weights write y.
        future_weights: Which weights predict d and d': the policy's and the target's (POLICY), or the initial ones (INITIAL).
        critic_input: Which futures the evaluator sees: "predicted"; "backed_up", y of the stored action, and predicted ones of
            every other; or, as ablations, "permuted" ones of other transitions, or "constant", the same failure for all, which
            leaves nothing but distillation of the fixes.
        fresh_actions: Whether the policy's own action of today is improved instead of the stored one.
        verify_refinements: Whether a refined action must find the evaluator's yes, too.
        rejected_weight: How much one that does not find it counts in the policy's loss.
        judged_fraction: Share of a batch whose actions are judged and refined; the rest teaches the critic alone.
        train_on_yes: When a kept action of verdict yes is trained on: "success" (its predicted outcome), "always", "never".
        self_imitation: Whether the action of an episode that succeeded is imitated where the futures predict failure.
    """

    action: Sampling
    future: Sampling
    backup: Sampling
    critique: Sampling
    refine: Sampling
    reasoning: Sampling | None = None
    num_futures: int = 1
    num_next_actions: int = 1
    num_refinements: int = 1
    action_format: str = "plain"
    judge: Weights = Weights.TARGET
    backup_weights: Weights = Weights.TARGET
    future_weights: Weights = Weights.POLICY
    critic_input: str = "predicted"
    fresh_actions: bool = False
    verify_refinements: bool = False
    rejected_weight: float = 0.0
    judged_fraction: float = 1.0
    train_on_yes: str = "success"
    self_imitation: bool = False

    @property
    def uses_initial_weights(self) -> bool:
        """Whether any role is answered by the weights that the run began with."""
        return Weights.INITIAL in (self.judge, self.backup_weights, self.future_weights)
