"""The losses as pure functions of tensors: NLAC's two, and the clipped policy gradient of the baselines.

NLAC's are both the negative log-likelihood of sampled text, because the gradient of KL(target || model) for a sampled target
y is that of -log model(y). They differ in what the text is: a Bellman target for the successor model, a refined action for
the policy. Prompt tokens carry no loss.
"""

from __future__ import annotations

import numpy as np
import torch


def answer_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probability of each token under the logits of the position before it.

    Args:
        logits: Shape (..., T, V), for the last T positions before the end of ``ids``: position i predicts ``ids[..., i]``.
        ids: Shape (..., T), the tokens that were predicted.
        temperature: Divides the logits. A policy gradient needs the one that the tokens were sampled at.
        places: Where logits of shape (U, V) predict several tokens each, the place of those that predict each token, shape
            (T,).

    Returns:
        As ``ids``, float32.
    """
    logits = logits.float()
    if temperature != 1.0:  # of a large vocabulary each copy counts
        logits = logits / temperature
    normalizers = logits.logsumexp(-1)
    if places is not None:
        return logits[places, ids] - normalizers[places]
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalizers


def token_kl(logits: torch.Tensor, base_logits: torch.Tensor) -> torch.Tensor:
    """KL(π_θ || π_base) over the vocabulary at each place, in nats: its mean is how far the policy has moved where it speaks.

    Args:
        logits: Logits of π_θ, shape (..., V).
        base_logits: Logits of π_base, shape (..., V).

    Source: that forgetting follows this number on the new task, arXiv 2509.04259.
    """
    own, base = logits.float().log_softmax(-1), base_logits.float().log_softmax(-1)
    return (own.exp() * (own - base)).sum(-1)


def token_entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy over the vocabulary at each place, in nats.

    Args:
        logits: Shape (..., V).
        temperature: Divides the logits.
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def answer_mean(values: torch.Tensor, answer_mask: torch.Tensor) -> torch.Tensor:
    """Mean over each answer's tokens, shape (B,), of values and a mask of shape (B, T)."""
    mask = answer_mask.to(values.dtype)
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)


def successor_loss(logprobs: torch.Tensor, answer_mask: torch.Tensor) -> torch.Tensor:
    """Critic loss, per sequence: L1 = KL(B_L M_θ̄(.|s,a) || M_θ(.|s,a)), up to the target's entropy.

    Args:
        logprobs: log M_θ(y_i | s, a, y_<i), shape (B, T).
        answer_mask: 1 on the tokens of y, 0 on prompt and padding, shape (B, T).

    Returns:
        -1/|y| Σ_i log M_θ(y_i | ...), shape (B,).

    Source: arXiv 2512.04601; the order of the KL's arguments is what keeps both branches of a 50/50 future.
    """
    return _mean_nll(logprobs, answer_mask)


def refinement_loss(logprobs: torch.Tensor, answer_mask: torch.Tensor) -> torch.Tensor:
    """Policy loss, per sequence: L2 = -log π_θ(a_r | s), distillation of the refined action.

    Args:
        logprobs: log π_θ(a_r,i | s, a_r,<i), shape (B, T).
        answer_mask: 1 on the tokens of a_r, 0 on prompt and padding, shape (B, T).

    Returns:
        -1/|a_r| Σ_i log π_θ(a_r,i | ...), shape (B,).

    Source: arXiv 2512.04601. No policy gradient, no importance ratio.
    """
    return _mean_nll(logprobs, answer_mask)


def clipped_policy_loss(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, advantage: torch.Tensor, answer_mask: torch.Tensor, clip: float
) -> torch.Tensor:
    """Clipped policy-gradient loss, per sequence: -1/|a| Σ_i min(ρ_i A, clip(ρ_i, 1-ε, 1+ε) A), ρ_i = π_θ / π_behaviour.

    Args:
        logprobs: log π_θ(a_i | s, a_<i), shape (B, T).
        behaviour_logprobs: The same when the answer was sampled, shape (B, T).
        advantage: A of the whole answer, shape (B,).
        answer_mask: 1 on the tokens of the answer, shape (B, T).
        clip: ε.

    Returns:
        Shape (B,).

    Source: Schulman et al., arXiv 1707.06347, by token as in GRPO (arXiv 2402.03300).
    """
    mask = answer_mask.to(logprobs.dtype)
    ratio = ((logprobs - behaviour_logprobs) * mask).exp()
    advantage = advantage.unsqueeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)


def _mean_nll(logprobs: torch.Tensor, answer_mask: torch.Tensor) -> torch.Tensor:
    return -answer_mean(logprobs, answer_mask)


def priorities(critic_loss: np.ndarray, policy_loss: np.ndarray) -> np.ndarray:
    """Replay priorities before the exponent: (L1 + L2 per token, clipped at the batch's 95th percentile) + 1e-3.

    Args:
        critic_loss: Per transition, NaN where its L1 is not known, infinite where its update was stopped; shape (N,).
        policy_loss: Per transition, NaN where its L2 is not known, infinite where its update was stopped; shape (N,).

    Returns:
        Shape (N,). A loss that is not known counts as the mean of those that are: as 0 it would make a transition rarer only
        because a text about it did not parse. NaN where an update was stopped: what it says counts for nothing. All are NaN
        where no loss at all is known.
    """
    stopped = np.isinf(critic_loss) | np.isinf(policy_loss)
    if stopped.all() or not (np.isfinite(critic_loss) | np.isfinite(policy_loss)).any():
        return np.full(len(stopped), np.nan)
    both = _filled(critic_loss) + _filled(policy_loss)
    return np.where(stopped, np.nan, np.minimum(both, np.quantile(both[~stopped], 0.95)) + 1e-3)


def _filled(losses: np.ndarray) -> np.ndarray:
    known = losses[np.isfinite(losses)]
    return np.where(np.isfinite(losses), losses, known.mean() if len(known) else 0.0)
