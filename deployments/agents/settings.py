"""Settings of an agent, the program that plays the rollouts of a task. Imports neither Ray nor vLLM."""

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from deployments.harbor.tasks import HarborSettings
from deployments.models.settings import ChatModelSettings
from deployments.strict_settings import StrictSettings, UrlWithoutKey
from rollout_client.contract.sessions import SessionLimits

PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
COMMANDS_AT_ONCE = 16
"""Default limit of concurrent commands or sandboxes of a replica."""
LONGEST_RUN_S = 86_400.0


class CommandSettings(StrictSettings):
    """A process for each rollout."""

    argv: list[str] = Field(min_length=1)
    """The program and its arguments. No shell reads them."""
    environment_variables: dict[str, str] = Field(default_factory=dict)
    """Variables of the process, besides those of the session."""
    passed_variables: list[str] = Field(default_factory=lambda: list(PASSED_VARIABLES))
    """Names of variables of the service's own processes that it gets too. All others stay with the service: there are
    keys among them."""
    sandbox: bool = False
    """Runs it by bubblewrap: without any network but the service, with the system's folders and `folders` to read, a
    private folder to write, and no process of others in sight."""
    folders: list[Annotated[str, Field(pattern="^/")]] = Field(default_factory=list)
    """With `sandbox`: absolute paths of further folders that it may read."""

    @model_validator(mode="after")
    def has_folders_for_a_sandbox(self) -> Self:
        if self.folders and not self.sandbox:
            raise ValueError("folders has a meaning with sandbox alone: without it the command reads all that it may")
        return self


class HarnessSettings(StrictSettings):
    """A program behind an HTTP server, which is asked once for each rollout."""

    url: UrlWithoutKey
    """Takes a `POST` with `base_url`, `api_key` and `sample`, and answers when the run has ended."""
    api_key_variable: str | None = None
    """The environment variable of the service's processes whose value is sent as `Authorization: Bearer`."""


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


class AgentSettings(StrictSettings):
    """The program that plays the rollouts of a task: one of `import_path`, `command`, `harness` and `game`."""

    import_path: str | None = None
    """`package.module:function` of an `async def agent(base_url, api_key, sample)`, as the client's `play_agent` takes
    it. It runs in the event loop of a replica, beside the other rollouts: code that blocks belongs into a `command`."""
    command: CommandSettings | None = None
    """A process for each rollout."""
    harness: HarnessSettings | None = None
    """A program behind an HTTP server."""
    harbor: HarborSettings | None = None
    """The rollouts are tasks in Harbor's format: each gets a sandbox of its own, in which the command runs or which the
    function gets as its fourth argument, and the task's verifier scores it."""
    game: GameSettings | None = None
    """A game whose seats the policy and others play."""
    scored_by: Literal["environment", "agent"] = "environment"
    """`environment`: the task's environment judges the last conversation of the rollout, in one step. `agent`: the
    agent says what its rollout is worth; always so for a game and for tasks of Harbor."""
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_RUN_S)
    """Seconds after which a run is ended, from its start; a run that waits for a place uses none of them."""
    limits: SessionLimits = SessionLimits()
    """Limits of the session of each rollout. A request's `max_rollout_turns`, if it has one, bounds `max_calls` too."""
    max_concurrent_runs: int | None = Field(default=None, ge=1)
    """Concurrent runs of one replica; further ones wait. By default 16 for a command or a sandbox, unbounded otherwise.
    Of tasks of Harbor, as many more have their sandboxes made while they wait."""

    @property
    def places(self) -> int | None:
        """How many runs of one replica go on at once; None for any number."""
        is_heavy = self.command is not None or self.harbor is not None
        return self.max_concurrent_runs or (COMMANDS_AT_ONCE if is_heavy else None)

    @model_validator(mode="after")
    def is_one_program(self) -> Self:
        given = [name for name in ("import_path", "command", "harness", "game") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"name one of import_path, command, harness and game, got {' and '.join(given) or 'none'}")
        if self.game is None and self.harbor is None:
            return self
        if "scored_by" in self.model_fields_set and self.scored_by != "agent":
            raise ValueError("scored_by: a game and the verifier of a Harbor task say the reward: leave scored_by out")
        self.scored_by = "agent"
        return self

    @model_validator(mode="after")
    def gets_the_sandbox_of_its_task(self) -> Self:
        command = self.command
        is_sandboxed = command is not None and command.sandbox and "passed_variables" not in command.model_fields_set
        if self.harbor is not None and self.import_path is None and not is_sandboxed:
            raise ValueError(
                "harbor: name a function that takes the sandbox, or a command with sandbox: true, which gets variables "
                "by environment_variables alone"
            )
        return self


def agent_deployment(task_name: str) -> str:
    """The name of the deployment that runs the agent of a task."""
    return f"{task_name}_agent"
