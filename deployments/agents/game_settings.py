"""Settings of games whose seats the policy and others play, and who sits where. Imports neither Ray nor vLLM."""

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from deployments.models.settings import ChatModelSettings
from deployments.strict_settings import StrictSettings

POLICY = "policy"
"""The seat of the policy that the request asks for. Its log comes back."""
LARGEST_SEED = 2**31


class Rival(BaseModel):
    """A policy of this service, with other weights than those that the request asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    policy: str | None = None
    """Its name; by default the one without a name."""
    version: int | None = Field(default=None, ge=0)
    """The version that must answer, which must be current; by default the current one."""


Seat = Rival | str
"""The player: a rival, `policy`, or the name of a model of the config."""
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GameSettings(StrictSettings):
    """A game for several players. Each seat is played by the policy or by another one."""

    import_path: str
    """`package.module:function` of what makes a game: takes `seed` and `arguments`, returns a `MultiplayerGame`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    seats: int = Field(default=2, ge=1, le=16)
    """How many players the game has. Seats have numbers from 0."""
    opponents: dict[str, Weight] = Field(default_factory=lambda: {POLICY: 1.0}, min_length=1)
    """The players of seats that a sample does not name, beside the one of the policy: names under `models`, or `policy`
    for the policy itself, with the weights by which they are drawn."""
    models: dict[str, ChatModelSettings] = Field(default_factory=dict)
    """Models that play: behind OpenAI-compatible servers, or policies of this service."""
    rivals: ChatModelSettings = ChatModelSettings()
    """Parameters and limits of the policies of this service that a sample names by `policy` and `version`."""
    max_moves: int = Field(default=1000, ge=1)
    """Moves of all players after which a game that has not ended fails its rollout."""

    @model_validator(mode="after")
    def knows_its_players(self) -> Self:
        if POLICY in self.models:
            raise ValueError(f"models: {POLICY!r} is the policy that the request asks for; choose another name")
        if unknown := [name for name in self.opponents if name != POLICY and name not in self.models]:
            raise ValueError(f"opponents: there is no {', '.join(unknown)} under models")
        return self

    def extra_env_info(self) -> type[BaseModel]:
        """The fields of a sample."""
        players: Any = Rival | Literal[(POLICY, *self.models)]
        numbers: Any = Literal[tuple(map(str, range(self.seats)))]
        return create_model(
            "GameInfo",
            __config__=ConfigDict(extra="ignore"),
            seed=(int, Field(ge=0, lt=LARGEST_SEED, description="The seed of the game and of its players.")),
            seats=(
                dict[numbers, players],
                Field(
                    default={},
                    description="Who plays, by the number of the seat: `policy`, the name of a model of the config, or "
                    "`policy` and `version` of another policy of this service. Others are drawn.",
                ),
            ),
        )

    def seated(self, seed: int, named: Mapping[int, Seat]) -> list[Seat]:
        """Who plays each seat: those that the sample names, the policy in one that it does not, and drawn ones.

        Equal for an equal seed, so that all rollouts of a group have the same players in the same seats. Without
        names the policy's seat is the next one for the next seed.

        Raises:
            ValueError: no seat is the policy's. The message is a sentence.
        """
        seats: dict[int, Seat] = dict(named)
        free = [seat for seat in range(self.seats) if seat not in seats]
        if POLICY not in seats.values():
            if not free:
                raise ValueError("No seat is the policy's: leave one out of extra_env_info.seats, or name it 'policy'.")
            own = free[seed % len(free)]
            seats[own] = POLICY
            free.remove(own)
        draw = random.Random(f"opponents {seed}")
        for seat in free:
            [seats[seat]] = draw.choices([*self.opponents], [*self.opponents.values()])
        return [seats[seat] for seat in range(self.seats)]
