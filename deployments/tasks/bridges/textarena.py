"""Games of TextArena: alone, against a scripted opponent, or with a seat for each player.

The games draw from Python's global random numbers. Here each game has random numbers of its own, so that a seed makes
the same game, whichever others are played beside it.
"""

import importlib
import random
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from deployments.tasks.replies import text_outcome
from deployments.tasks.support import GameInfo, GameSession, imported, seeds_from
from rollout_env import ChatMessage, LostSession, SampleRejected, Session, StartOutcome, StepOutcome, TaskEnvironment

_Opponent = Callable[[str, random.Random], str]
"""Chooses a move: is given what the player has seen since its last move, and random numbers of its own."""
_IN_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_MOST_OPPONENT_MOVES = 1000
"""In a row. A game in which the policy has no turn any more ends there."""
_random: ContextVar[random.Random] = ContextVar("random numbers of the game that is being played")


class _TextArenaInfo(GameInfo):
    """The `extra_env_info` of a game; further fields are ignored. The seed is that of its opponents too."""

    player: int = Field(default=0, ge=0)
    """Number of the policy's player, from 0."""


class TextArenaEnvironment(TaskEnvironment):
    """One game a rollout. The reward is that of the policy's player, at the end of the game."""

    ExtraEnvInfo: ClassVar[type[BaseModel]] = _TextArenaInfo
    lost_session: LostSession = "reopen"

    def __init__(
        self,
        game: str,
        players: Annotated[int, Field(ge=1)] = 1,
        opponent: Annotated[str, Field(pattern=r"^([\w.]+:\w+|listed)$")] = "listed",
        kwargs: dict[str, Any] | None = None,
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Makes the game once, to see that it can be played.

        Args:
            game: as in `textarena.make`, such as `TicTacToe-v0`.
            players: how many the game has.
            opponent: who the other players are. `listed` makes a random one of the moves in square brackets that the
                game has shown it last; `package.module:function` is a function like `listed_move`.
            kwargs: of `textarena.make`.
            max_sessions: how many games one replica holds at once.

        Raises:
            PackageMissing: TextArena is not installed.
            ValueError: the game cannot be made or begun with so many players.
        """
        self._textarena = imported("textarena", "textarena")
        self.game = game
        self.players = players
        self.kwargs = kwargs or {}
        self.max_sessions = max_sessions
        module, _, function = (f"{__name__}:listed_move" if opponent == "listed" else opponent).partition(":")
        self.opponent: _Opponent = getattr(importlib.import_module(module), function)
        try:
            _Game(self, 0, player=0)
        except Exception as error:
            raise ValueError(f"the game {game} cannot be begun with {players} players: {error}") from error
        self.description = f"{game} of TextArena."  # type: ignore[misc]

    def made(self) -> Any:
        """The game with its observations as they arise: the message log has those before."""
        raw = f"{self.game}-raw"
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        made = self._textarena.make(raw if raw in registry else self.game, **self.kwargs)
        _give_games_random_numbers()
        return made

    def start(self, message_log: list[ChatMessage], extra_env_info: _TextArenaInfo) -> StartOutcome:
        """Adds the rules and what has happened before the policy's first turn.

        Raises:
            SampleRejected: the game has no such player, or is over before its turn.
        """
        if extra_env_info.player >= self.players:
            raise SampleRejected(f"extra_env_info.player: {self.game} has {self.players} players, from 0.")
        game = _Game(self, extra_env_info.seed, extra_env_info.player)
        if game.is_over:
            raise SampleRejected(f"{self.game} was over before the first turn of player {extra_env_info.player}.")
        state = {**extra_env_info.model_dump(), "prompt_messages": len(message_log)}
        return StartOutcome(observation={"role": "user", "content": game.seen}, metadata=state)

    def open_session(self, message_log: list[ChatMessage], extra_env_info: _TextArenaInfo) -> Session:
        """Begins the game, and makes the moves that the log has already."""
        return _Game(self, extra_env_info.seed, extra_env_info.player).replayed(message_log, extra_env_info)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {"extra_env_info": {"seed": game_seed, "player": place % self.players}}
            for place, game_seed in enumerate(seeds_from(seed, count))
        ]


class _Game(GameSession):
    """One game, which stands at a turn of the policy or is over."""

    def __init__(self, task: TextArenaEnvironment, seed: int, player: int | None) -> None:
        """Begins the game; `player` is the policy's, `None` where all players are."""
        self._task = task
        self._player = player
        self.player = player or 0
        """Whose turn it is."""
        self.rewards: Mapping[int, float] = {}
        """Those that the game gives at its end, by player."""
        self._numbers = random.Random(seed)
        self._opponents = [random.Random(f"{seed}-{other}") for other in range(task.players)]
        self.seen = ""
        """Observations that the policy has not yet been told."""
        with self._own_numbers():
            self._env = task.made()
            self._env.reset(num_players=task.players, seed=None)
            self._go_on()

    def play(self, reply: str) -> StepOutcome:
        """Makes a move, and those of the opponents after it."""
        with self._own_numbers():
            self._move(reply)
            self._go_on()
        return text_outcome(self.seen, self.rewards.get(self.player, 0.0), self.is_over)

    @contextmanager
    def _own_numbers(self) -> Any:
        token = _random.set(self._numbers)
        try:
            yield
        finally:
            _random.reset(token)

    def _move(self, action: str) -> None:
        self.is_over, _ = self._env.step(action=action)

    def _go_on(self) -> None:
        """Lets the opponents move until it is the policy's turn."""
        for _ in range(_MOST_OPPONENT_MOVES):
            player, observation = self._env.get_observation()
            seen = _text_of(observation, player, self._env.state.role_mapping)
            if self.is_over:
                self.player = player if self._player is None else self._player
                self.seen = self._told_at_end(seen)
                self.rewards = {each: float(reward) for each, reward in (self._env.close()[0] or {}).items()}
                return
            if self._player in (None, player):
                self.player, self.seen = player, seen
                return
            self._move(self._task.opponent(seen, self._opponents[player]))
        raise SampleRejected(f"Player {self._player} had no turn in {_MOST_OPPONENT_MOVES} moves of {self._task.game}.")

    def _told_at_end(self, seen: str) -> str:
        # The game may have ended with the move of another player, to whom the observation belongs.
        state = self._env.state
        own = _text_of(state.observations.get(self.player, []), self.player, state.role_mapping)
        reason = state.game_info.get(self.player, {}).get("reason")
        return "\n".join(filter(None, (own or seen, reason or "The game is over.")))


class SeatedGame:
    """A game of TextArena as a `MultiplayerGame` of `deployments/agents/game_program.py`: each player is a seat."""

    def __init__(self, seed: int, game: str, players: int = 2, kwargs: dict[str, Any] | None = None) -> None:
        """Begins the game; the arguments are those of `TextArenaEnvironment`, which says what it raises."""
        self._game = _Game(TextArenaEnvironment(game, players, kwargs=kwargs), seed, player=None)

    def turn(self) -> tuple[int, str] | None:
        return None if self._game.is_over else (self._game.player, self._game.seen)

    def move(self, text: str) -> None:
        self._game.play(text)

    def rewards(self) -> Mapping[int, float]:
        return self._game.rewards


def _text_of(observation: Any, player: int, roles: dict[int, str]) -> str:
    """The observation of a player without its own moves, which are in the message log."""
    if isinstance(observation, str):
        return observation
    lines = [
        f"[{roles.get(sender, f'Player {sender}')}] {message}"
        for sender, message, kind in observation
        if not (sender == player and kind.name == "PLAYER_ACTION")
    ]
    return "\n".join(lines)


def listed_move(seen: str, numbers: random.Random) -> str:
    """A random one of the moves in square brackets in the last line that has any."""
    for line in reversed(seen.splitlines()):
        bracketed: list[str] = _IN_BRACKETS.findall(line)
        moves = [move for move in bracketed if move != "[GAME]" and not move.startswith("[Player")]
        if moves:
            return numbers.choice(moves)
    return ""


class _NumbersOfTheGame:
    """Stands for the module `random` in the modules of TextArena."""

    def __getattr__(self, name: str) -> Any:
        numbers = _random.get(None)
        return getattr(random if numbers is None else numbers, name)


def _give_games_random_numbers() -> None:
    """Lets every module of TextArena that was imported draw from the numbers of the game that is being played."""
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena.") and getattr(module, "random", None) is random:
            vars(module)["random"] = _NumbersOfTheGame()
