"""Settings of an agent, the program that plays the rollouts of a task. Imports neither Ray nor vLLM."""

from typing import Literal, Self

from pydantic import Field, model_validator

from deployments.agents.game_settings import GameSettings
from deployments.harbor.settings import HarborSettings
from deployments.strict_settings import StrictSettings, UrlWithoutKey
from rollout_client.contract.sessions import SessionLimits

PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
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
    folders: list[str] = Field(default_factory=list)
    """With `sandbox`: absolute paths of further folders that it may read."""
    memory_limit_mib: int | None = Field(default=None, ge=32)
    """Address space of each of its processes; null for no limit. Some runtimes, such as Node's, reserve far more than
    they use."""
    processor_time_limit_s: int | None = Field(default=None, ge=1)
    """Processor time of each of its processes, in seconds; null for no limit."""

    @model_validator(mode="after")
    def has_folders_for_a_sandbox(self) -> Self:
        if self.folders and not self.sandbox:
            raise ValueError("folders has a meaning with sandbox alone: without it the command reads all that it may")
        if wrong := [folder for folder in self.folders if not folder.startswith("/")]:
            raise ValueError(f"folders: {wrong[0]!r} is not an absolute path")
        return self


class HarnessSettings(StrictSettings):
    """A program behind an HTTP server, which is asked once for each rollout."""

    url: UrlWithoutKey
    """Takes a `POST` with `base_url`, `api_key` and `sample`, and answers when the run has ended."""
    api_key_variable: str | None = None
    """The environment variable of the service's processes whose value is sent as `Authorization: Bearer`."""


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
    """Concurrent runs of one replica; further ones wait. By default 16 for a command, unbounded otherwise."""

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
        if self.harbor is None:
            return self
        if self.game is not None or self.harness is not None:
            raise ValueError("harbor: name a command, or a function that takes the sandbox; no other agent gets one")
        if self.command is not None and not self.command.sandbox:
            raise ValueError("harbor: its command runs in the sandbox of the task: write sandbox: true")
        if self.command is not None and "passed_variables" in self.command.model_fields_set:
            raise ValueError(
                "harbor: passed_variables of command does not reach a sandbox: name them in environment_variables"
            )
        return self


def agent_deployment(task_name: str) -> str:
    """The name of the deployment that runs the agent of a task."""
    return f"{task_name}_agent"
