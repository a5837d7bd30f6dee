"""Counts the tokens of an iteration by role: prompts and answers, as the engines themselves count them."""

from __future__ import annotations

from rllib_nlac.engine.protocol import Engine
from rllib_nlac.engine.token_usage import CACHED_TOKENS, PROMPT_TOKENS, TOKENS, Tokens

FIELDS = {TOKENS: "generated", PROMPT_TOKENS: "prompt", CACHED_TOKENS: "cached"}


class IterationTokens:
    """Reads the engines' counts. They include every asker, for example EnvRunners that play ahead.

    Args:
        engine: Engine of the algorithm.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read = engine.tokens_so_far()

    def since_last(self) -> dict[str, dict[str, int]]:
        """Tokens since the last call, or since this was made.

        Returns:
            By role, ``tokens`` that were generated, ``prompt_tokens``, and ``cached_tokens``, those of the prompts that a
            prefix cache held. A role that was asked before and is not now has 0. Nothing where an engine did not answer at
            once: the next call has it all.

        Metrics (tokens, prompt_tokens, cached_tokens):
            play: The policy's turns in episodes.
            next_action, next_future, next_critique: a' in s', its future, and the critique that chooses among several a'
                (`num_next_actions`).
            target: Bellman targets; with `n_step` above 1 one for each step.
            future, critique, refinement: Futures of judged actions, their critiques and refined actions (`num_futures`,
                `num_refinements`, `judged_fraction`).
            verification: Futures and critiques of the last refined actions (`rejected_weight` below 1).
            reasoning: Rewritten reasoning of thinking models (`max_reasoning_tokens`).
            evaluation, evaluation_critic: Turns of evaluations, and the critic's answers in them.
            fresh_action, candidate, branches: Texts of ablations and baselines.
            other: Requests without a role, for example from your own code.
        """
        now = self._engine.tokens_so_far()
        if not now:
            return {}
        spent: dict[str, dict[str, int]] = {name: {} for name in FIELDS}
        then = self._read or [{}] * len(now)
        for after, before in zip(now, then, strict=True):
            # It has started again and counts from there.
            if any(sum(after.get(role, Tokens())) < sum(old) for role, old in before.items()):
                before = dict.fromkeys(before, Tokens())
            for role in sorted(before.keys() | after.keys()):
                new, old = after.get(role, Tokens()), before.get(role, Tokens())
                for name, field in FIELDS.items():
                    spent[name][role] = spent[name].get(role, 0) + getattr(new, field) - getattr(old, field)
        self._read = now
        return spent
