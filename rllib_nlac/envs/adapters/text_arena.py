"""TextArena's games (PyPI: textarena), imported when the first one is made."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, EpisodeLost, Reply, TaskId, TextEnv
from rllib_nlac.envs.partners import Partners
from rllib_nlac.inputs.endpoint import endpoint_from
from rllib_nlac.names import attribute_of

INSTALL = "pip install 'rllib_nlac[textarena]'"
GAME = -1  # who speaks where no player does
MAX_OPPONENT_MOVES = 1000  # between two turns of the agent
_GLOBAL_STATES = threading.RLock()  # one game at a time has its random states in place


class TextArena(TextEnv[int]):
    """One game of TextArena, played by the agent as one player.

    A game draws from Python's and NumPy's global random states in the middle of an episode. Here each game has states of its
    own, which are put in place only while it moves: a seed fixes the whole game, and games do not disturb each other.

    Args:
        game: TextArena's id, as in "GuessTheNumber-v0".
        num_players: How many play.
        player: Which of them the agent is.
        opponents: Who the others are: None where there are none, ``{kind: endpoint, base_url: ..., model: ...}``, or
            ``{kind: function, function: "my_module:answer"}`` with a function from all that the opponent has been shown to its
            action. Of a list each episode draws one.
        max_turns: The agent's actions per episode.
        split: Recorded in ``info``; a seed makes the task, and both splits draw seeds.
        game_config: Arguments of the game, as ``{max_number: 50}``.

    Raises:
        ValueError: TextArena is not installed, knows no such game, the game is not played by so many, or there are players
            without an opponent to play them.
    """

    # No game_config: the arguments of a game are whatever its class takes.
    row_schema: ClassVar[dict[str, Any] | None] = {
        "game": {"type": "string", "pattern": r"^[A-Za-z0-9-]{1,80}$"},
        "num_players": {"type": "integer", "minimum": 1, "maximum": 20},
        "player": {"type": "integer", "minimum": 0, "maximum": 19},
        "max_turns": MAX_TURNS,
        "split": SPLIT,
    }

    partners: Partners[Callable[[str], str]]

    def __init__(
        self,
        game: str = "GuessTheNumber-v0",
        num_players: int = 1,
        player: int = 0,
        opponents: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        max_turns: int = 50,
        split: str = "train",
        game_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        try:
            import textarena
        except ImportError as error:
            raise ValueError(f"the environment TextArena needs the package textarena: {INSTALL}") from error
        if not 0 <= player < num_players:
            raise ValueError(f"player is {player}, and the players are 0 to {num_players - 1}")
        if num_players > 1 and opponents is None:
            raise ValueError(f"{game} is played by {num_players}: set env_config.opponents")
        self.game_id, self.num_players, self.player = game, num_players, player
        self.partners = Partners(opponents, make_opponent, "opponents")
        self._states = (random.Random(0).getstate(), np.random.RandomState(0).get_state())
        # Without the wrappers that repeat old messages, and with those that put a move into its form.
        raw = game.removesuffix("-train").removesuffix("-raw") + "-raw"
        try:
            with self._own_random_states():
                self._game = textarena.make(raw, **dict(game_config or {}))
                wrappers = textarena.envs.registration.ENV_REGISTRY[game].default_wrappers or ()
        except (ValueError, TypeError, ImportError, LookupError) as error:
            raise ValueError(f"env_config.game {game!r}: {error}") from error
        self._action_wrappers = [wrapper for wrapper in wrappers if issubclass(wrapper, textarena.ActionWrapper)]
        self._shown: dict[int, list[str]] = {}  # to each opponent
        try:
            with self._own_random_states():
                self._game.reset(num_players=num_players, seed=0)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"env_config.num_players is {num_players}, and {game} refuses it: {error}. Set env_config.num_players, and "
                "opponents for the players that are not the agent"
            ) from error

    @property
    def system_prompt(self) -> str:
        return "You play a game. Read its rules and answer with one move, in the form that they ask for."

    def sample_task(self, spec: str | None) -> TaskId[int]:
        if spec is not None and not str(spec).isdigit():
            raise ValueError(f"the task of a game is a seed, and it is {spec!r}")
        seed = int(self.np_random.integers(2**31)) if spec is None else int(spec)
        return TaskId(str(seed), seed)

    def begin(self, task: int) -> str:
        self._states = (random.Random(task).getstate(), np.random.RandomState(task % 2**32).get_state())
        self._shown = {}
        with self._own_random_states():
            self._game.reset(num_players=self.num_players, seed=task)
        if self._let_opponents_move():
            raise EpisodeLost("over_at_reset", f"{self.game_id} was over before the agent's first move")
        return "\n".join(self._new_messages())

    def reply(self, task: int, action: str) -> Reply:
        if not (self._move(action) or self._let_opponents_move()):
            return Reply("\n".join(self._new_messages()))
        with self._own_random_states():
            rewards, infos = self._game.close()
        reward = float((rewards or {}).get(self.player, 0.0))
        reason = str((infos or {}).get(self.player, {}).get("reason") or "The game is over.")
        return Reply(reason, reward, success=reward >= 1.0)

    def _move(self, action: str) -> bool:
        """Whoever's turn it is moves; whether the game is over then."""
        with self._own_random_states():
            for wrapper in self._action_wrappers:
                action = wrapper(self._game).action(action)
            done, _ = self._game.step(action)
        return bool(done)

    def _let_opponents_move(self) -> bool:
        """The others move until it is the agent's turn; whether the game is over then."""
        for _ in range(MAX_OPPONENT_MOVES):
            player = self._game.state.current_player_id
            if player == self.player:
                return False
            shown = self._shown.setdefault(player, [])
            shown += self._new_messages()
            if self._move(self._answer_to("\n".join(shown))):
                return True
        raise RuntimeError(f"{self.game_id}: the agent did not get its turn within {MAX_OPPONENT_MOVES} moves of the others")

    def _answer_to(self, observation: str) -> str:
        """What an opponent says. Nobody waits for one behind an endpoint but this game; others may draw random numbers."""
        opponent = self.partners.current
        if isinstance(opponent, _EndpointOpponent):
            return opponent(observation)
        with self._own_random_states():
            return opponent(observation)

    def _new_messages(self) -> list[str]:
        """What the player whose turn it is has not been shown yet, with the name of each speaker where several play.

        The agent's own words are in its dialogue already.
        """
        with self._own_random_states():
            player, messages = self._game.get_observation()
        names = {**self._game.state.role_mapping, GAME: "GAME"}
        return [
            f"[{names.get(sender, f'Player {sender}')}] {text}" if self.num_players > 1 else text
            for sender, text in ((sender, str(text).strip()) for sender, text, *_ in messages)
            if text and not sender == player == self.player
        ]

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        with _GLOBAL_STATES:
            others = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


def make_opponent(config: Mapping[str, Any] | None) -> Callable[[str], str]:
    """What plays the other players.

    Raises:
        ValueError: The kind or a key is unknown, or the function cannot be imported.
    """
    given = dict(config or {"kind": "none"})
    kind = given.pop("kind", None)
    if kind == "none":
        return _nobody
    if kind == "endpoint":
        return _EndpointOpponent(endpoint_from(given, "env_config.opponents"))
    if kind == "function" and set(given) == {"function"}:
        return attribute_of(str(given["function"]), "env_config.opponents.function", "my_module:my_function")
    raise ValueError(f"env_config.opponents is {config!r}; it must have kind: endpoint, or kind: function")


def _nobody(observation: str) -> str:
    raise RuntimeError("the game asks for a player that nobody plays: set env_config.num_players and opponents")


class _EndpointOpponent:
    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint

    def __call__(self, observation: str) -> str:
        return self._endpoint.ask([{"role": "user", "content": observation}]).text
