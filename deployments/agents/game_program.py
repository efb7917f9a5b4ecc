"""An agent that is a game: each seat talks to its own player, in a conversation of its own.

The seats of the policy are played in the session of the rollout, which records them exactly: each is a branch, with the
reward of its seat. Other seats are played by models that the config names, or by other policies of this service.
"""

import asyncio
import importlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Protocol

import httpx
from pydantic_core import from_json, to_json

from deployments.agents.programs import AgentCall, AgentNotLoadable, AgentProgram, RunNotes, http_client, post
from deployments.agents.settings import LARGEST_SEED, POLICY, GameSettings, Rival
from deployments.failures import AgentFailed, EnvironmentLost
from deployments.models.clients import HttpChatModel
from deployments.upstream.ray_serve.direct_ingress import running_address
from rollout_client.contract.rollouts import SampleInput
from rollout_env import (
    ChatMessage,
    ModelRefused,
    SampleRejected,
    StepOutcome,
    TaskEnvironment,
    TemporaryFailure,
    escape_control_tokens,
    reply_text,
)
from rollout_env.models import MARKERS_BESIDE_MOVES
from rollout_env.users import usage_of

MOST_RIVALS = 64
"""Clients of rivals that are kept: each push of a trainer makes another version to play against."""


class MultiplayerGame(Protocol):
    """A game that players make moves in, one after the other. Its methods may block."""

    def turn(self) -> tuple[int, str] | None:
        """The number of the seat whose move is next, from 0, and what it has seen since its last one; `None` after the
        end."""
        ...

    def move(self, text: str) -> None:
        """Makes the move that the next seat wrote. A move that is not permitted is the game's to handle."""
        ...

    def rewards(self) -> Mapping[int, float]:
        """The reward of each seat, after the end."""
        ...


class GameTask(TaskEnvironment):
    """Describes a game for `GET /tasks`, and makes its samples. The game itself says the rewards."""

    description = "A game for several players, each of whom is a policy or another model."

    def __init__(self, settings: GameSettings) -> None:
        """Takes the fields of the game's samples."""
        self.ExtraEnvInfo = settings.extra_env_info()  # type: ignore[misc]

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges nothing: the game gives the reward.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Games of different seeds, in which the policy takes each seat in turn."""
        first = random.Random(seed).randrange(LARGEST_SEED // 2)
        return [{"extra_env_info": {"seed": number}} for number in range(first, first + count)]


class _ModelPlayer:
    """A model beside the policy. Nothing of it is recorded but what the others see of its moves."""

    def __init__(self, model: HttpChatModel, prompt: list[ChatMessage], usage: Counter[str]) -> None:
        self._model = model
        self._conversation = prompt
        self._usage = usage
        """Calls, tokens and seconds, which this adds to."""

    async def answer(self, seen: str) -> str:
        """The player's words on what it sees now. Raises `AgentFailed` or `TemporaryFailure`."""
        self._conversation.append({"role": "user", "content": seen})
        try:
            reply = await self._model.chat(self._conversation)
        except ModelRefused as error:
            raise AgentFailed(f"A player does not answer: {error}") from error
        self._usage.update(usage_of([reply], "opponent"))
        self._conversation.append({"role": "assistant", "content": reply.content})
        return reply.content


class _PolicyPlayer:
    """The policy, in the session of the rollout."""

    def __init__(self, http: httpx.AsyncClient, call: AgentCall, prompt: list[ChatMessage]) -> None:
        self._http = http
        self._call = call
        self._conversation: list[Any] = [*prompt]
        self._last_generation: str | None = None

    async def answer(self, seen: str) -> str:
        """See `_ModelPlayer.answer`. Raises `AgentFailed` or `EnvironmentLost`."""
        self._conversation.append({"role": "user", "content": seen})
        answer = from_json(await self._post("/v1/chat/completions", {"messages": self._conversation}))
        message = answer["choices"][0]["message"]
        self._conversation.append({name: value for name, value in message.items() if value is not None})
        self._last_generation = answer["id"]
        return message.get("content") or ""

    async def reward(self, rewards: Mapping[str, float]) -> None:
        """Rewards its conversation, if it was ever asked."""
        if self._last_generation is not None:
            await self._post("/reward", {"rewards": rewards, "generation_id": self._last_generation})

    async def _post(self, path: str, body: Any) -> bytes:
        headers = {"authorization": f"Bearer {self._call.api_key}"}
        content = to_json(body, inf_nan_mode="null")
        return await post(self._http, f"{self._call.base_url}{path}", content, "The session", headers=headers)


class GameProgram(AgentProgram):
    """Plays one game for each run."""

    def __init__(self, settings: GameSettings, own_url: Callable[[], str] = running_address) -> None:
        """Raises `AgentNotLoadable` or `KeyMissing`."""
        self._settings = settings
        self._make = load_game(settings)
        self._info = settings.extra_env_info()
        self._models = {name: HttpChatModel(model, name, own_url) for name, model in settings.models.items()}
        self._http: httpx.AsyncClient | None = None

        @lru_cache(MOST_RIVALS)
        def rival_model(rival: Rival) -> HttpChatModel:
            return HttpChatModel(settings.rivals.model_copy(update=rival.model_dump()), str(rival), own_url)

        self._rival = rival_model

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        """Rewards the seats of the policy in the session, and returns no reward of the whole."""
        try:
            return await self._play(call, said)
        except TemporaryFailure as error:
            raise EnvironmentLost(f"A player does not answer: {error}") from error

    async def _play(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        usage: Counter[str] = Counter()
        sample = SampleInput.model_validate(call.sample)
        info: Any = self._info.model_validate(sample.extra_env_info)
        players = self._players(call, sample, info, usage)
        game: MultiplayerGame = await asyncio.to_thread(self._make, seed=info.seed)
        moves = 0
        while (turn := await asyncio.to_thread(game.turn)) is not None:
            moves += 1
            seat, seen = turn
            # A move may spell control tokens, by which one player would speak in the game's place to another.
            words = await players[seat].answer(escape_control_tokens(seen, MARKERS_BESIDE_MOVES))
            await asyncio.to_thread(game.move, reply_text({"role": "assistant", "content": words}))
        rewards = game.rewards()
        said.metrics = {
            "moves": moves,
            **{f"seat_{seat}_reward": rewards[seat] for seat in range(len(players))},
            **usage,
        }
        for seat, player in enumerate(players):
            if isinstance(player, _PolicyPlayer):
                await player.reward({f"seat_{seat}": rewards[seat]})
        return {}

    def _players(
        self, call: AgentCall, sample: SampleInput, info: Any, usage: Counter[str]
    ) -> list[_PolicyPlayer | _ModelPlayer]:
        """The players by seat. The messages of the sample come before what each one sees. Raises `AgentFailed`."""
        prompt: list[Any] = [message.model_dump(exclude_unset=True) for message in sample.messages or ()]
        try:
            seats = self._settings.seated(info.seed, {int(seat): player for seat, player in info.seats.items()})
        except ValueError as error:
            raise AgentFailed(str(error)) from error
        self._http = self._http or http_client(call.base_url)
        players: list[_PolicyPlayer | _ModelPlayer] = []
        for seat in seats:
            if seat == POLICY:
                players.append(_PolicyPlayer(self._http, call, prompt))
            else:
                model = self._rival(seat) if isinstance(seat, Rival) else self._models[seat]
                players.append(_ModelPlayer(model, [*prompt], usage))
        return players


def load_game(settings: GameSettings) -> Callable[..., MultiplayerGame]:
    """The function that makes a game of a `seed`. Makes one, to see that it can. Raises `AgentNotLoadable`."""
    module_name, _, name = settings.import_path.partition(":")
    try:
        make = partial(getattr(importlib.import_module(module_name), name), **settings.arguments)
        turn = make(seed=0).turn()
    except (Exception, SystemExit) as error:
        raise AgentNotLoadable(
            f"{settings.import_path} makes no game: {type(error).__name__}: {error}. Write package.module:function of "
            "one that takes seed and the arguments."
        ) from error
    if turn is None or not 0 <= turn[0] < settings.seats:
        raise AgentNotLoadable(
            f"{settings.import_path} begins with {turn!r}, which is no turn of {settings.seats} seats."
        )
    return make
