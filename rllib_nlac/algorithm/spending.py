"""Of an iteration, how many tokens each role was given and has generated, as the engines themselves count them."""

from __future__ import annotations

from typing import Any

from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.engine.tally import PROMPT_TOKENS, TOKENS, Tokens


class Spending:
    """Reads the engines' tallies. Whoever asks is counted, EnvRunners that play ahead for example.

    Args:
        engine: The algorithm's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # Actors begin with it, and may not answer yet.
        self._read: list[dict[str, Tokens]] = [] if isinstance(engine, RemoteEngines) else [engine.tally.so_far()]

    def since_last(self) -> dict[str, dict[str, int]]:
        """Tokens since the last call, or since this was made.

        Returns:
            By role, ``tokens`` that were generated and ``prompt_tokens``, prompts held by a prefix cache included. A role that
            was asked before and is not now has 0. Nothing where an engine did not answer at once: the next call has it all.
        """
        now = self._engine.tokens_so_far() if isinstance(self._engine, RemoteEngines) else [self._engine.tally.so_far()]
        if now is None:
            return {}
        spent: dict[str, dict[str, int]] = {TOKENS: {}, PROMPT_TOKENS: {}}
        then = self._read or [{}] * len(now)
        for after, before in zip(now, then, strict=True):
            if _total(after) < _total(before):  # it has started again and counts from there
                before = dict.fromkeys(before, Tokens())
            for role in sorted(before.keys() | after.keys()):
                new, old = after.get(role, Tokens()), before.get(role, Tokens())
                spent[TOKENS][role] = spent[TOKENS].get(role, 0) + new.generated - old.generated
                spent[PROMPT_TOKENS][role] = spent[PROMPT_TOKENS].get(role, 0) + new.prompt - old.prompt
        self._read = now
        return spent


def _total(tally: dict[str, Tokens]) -> int:
    return sum(map(sum, tally.values()))
