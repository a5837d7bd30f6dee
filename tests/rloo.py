"""A baseline from outside the package: RLOO, REINFORCE leave-one-out (arXiv 2402.14740), on GRPO's groups."""

from __future__ import annotations

import numpy as np

from rllib_nlac.baselines.grpo import GRPO


class RLOO(GRPO):
    """An episode's advantage is its return minus the mean return of the others of its task."""

    def advantages(self, returns: np.ndarray) -> np.ndarray:
        count = len(returns)  # 1 where the others of its task were lost
        return (returns - returns.mean()) * count / max(count - 1, 1)
