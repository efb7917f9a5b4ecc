"""Tasks in Harbor's format: their settings, their folders, and the task type that describes them.

A folder has `task.toml`, `instruction.md`, `environment/` and `tests/`, which are read as Harbor 0.26 reads them
(`harbor/models/task/config.py`). A field that would change how a task is played, and that is not carried out here,
refuses the task with the field's name; all others are kept out.
"""

import math
import os
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deployments.sandbox.providers.dockerfile import text_in
from deployments.sandbox.providers.interface import ProviderName
from deployments.strict_settings import StrictSettings
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment

TIMES = {"create": "sandbox_create_s", "run": "agent_run_s", "judge": "verifier_s", "destroy": "sandbox_destroy_s"}
"""The metrics of a rollout with the seconds that each of its steps in a sandbox has taken."""


class SandboxProviderSettings(StrictSettings):
    """Where the sandboxes of rollouts come from."""

    provider: ProviderName = "local"
    """`local`: bubblewrap on the machine of the replica."""
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Arguments of the provider, which its page lists. Keys come from environment variables, never from here."""


class HarborSettings(StrictSettings):
    """Tasks in Harbor's format, and the sandboxes in which they are played."""

    tasks: str
    """A folder whose folders are tasks, or the folder of one task."""
    passed_variables: list[str] = Field(default_factory=list)
    """Names of variables of the service's own processes that tasks may take by `${NAME}`, for the sandbox in which the
    agent works and for their verifiers. All others stay with the service: there are keys among them."""
    sandbox: SandboxProviderSettings = SandboxProviderSettings()


CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
"""Marks of a benchmark at the beginning of an instruction, which no agent sees."""
TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
ROOT = (None, "root", 0, "0")
SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}
LARGEST_REWARD_BYTES, MOST_REWARDS = 2**16, 1000
"""Bounds of what a verifier writes. Every number of it is in the result of its rollout."""


class HarborTaskRefused(ValueError):
    """A task cannot be played here. The message names the file, the field and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Environment(_Section):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None
    allow_internet: bool | None = None
    network_mode: Literal["no-network", "public", "allowlist"] = "public"

    @model_validator(mode="before")
    @classmethod
    def take_older_names(cls, given: Any) -> Any:
        """`memory = "2G"` was the name of `memory_mb`."""
        if not isinstance(given, dict):
            return given
        renamed = dict(given)
        for name in ("memory", "storage"):
            if isinstance(size := renamed.pop(name, None), str):
                number, unit = size.strip().upper()[:-1], size.strip().upper()[-1:]
                size_mb = float(number) * SIZES.get(unit, math.nan)
                if not math.isfinite(size_mb):
                    raise ValueError(f"{name} must be a number and one of {', '.join(SIZES)}, got {size!r}")
                renamed.setdefault(f"{name}_mb", int(size_mb))
        return renamed

    @field_validator("os")
    @classmethod
    def in_lower_case(cls, name: str) -> str:
        return name.lower()

    @property
    def wants_network(self) -> bool:
        if "network_mode" not in self.model_fields_set and self.allow_internet is not None:
            return self.allow_internet
        return self.network_mode == "public"


class _Agent(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None
    network_mode: str | None = None


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: str | None = None
    environment: Any = None
    collect: list[Any] = Field(default_factory=list)
    network_mode: str | None = None


class _Package(_Section):
    name: str


class _TaskFile(_Section):
    task: _Package | None = None
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    steps: list[Any] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task."""

    name: str
    folder: Path
    instruction: str
    config: _TaskFile
    """Its variables have their values."""

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def build_folder(self) -> Path | None:
        """The folder with the `Dockerfile`; None if the task names an image."""
        return None if self.config.environment.docker_image else self.folder / "environment"


def load_tasks(settings: HarborSettings) -> dict[str, HarborTask]:
    """The tasks of the settings by name, in the order of their folders. Raises `HarborTaskRefused`."""
    tasks: dict[str, HarborTask] = {}
    for folder in _task_folders(settings.tasks):
        task = load_task(folder, settings.passed_variables)
        if (other := tasks.get(task.name)) is not None:
            raise HarborTaskRefused(f"{folder} and {other.folder} are both named {task.name}: give one another name.")
        tasks[task.name] = task
    if not tasks:
        raise HarborTaskRefused(f"{settings.tasks} has no tasks: no folder in it has a task.toml.")
    return tasks


def tasks_within(settings: HarborSettings, timeout_s: float) -> dict[str, HarborTask]:
    """The tasks, whose own limits leave a whole rollout below `timeout_s`.

    Raises `HarborTaskRefused` as `load_tasks`, or with the first task whose agent or verifier would be cut off.
    """
    tasks = load_tasks(settings)
    for task in tasks.values():
        own_s = (task.config.agent.timeout_sec or 0.0) + task.config.verifier.timeout_sec
        if own_s >= timeout_s:
            raise HarborTaskRefused(
                f"{task.folder / 'task.toml'}: agent.timeout_sec and verifier.timeout_sec are {own_s:g} s together, "
                f"and the agent's timeout_s, which bounds the whole rollout, is {timeout_s:g}: set it above."
            )
    return tasks


def _task_folders(tasks: str) -> Iterator[Path]:
    """Raises `HarborTaskRefused`."""
    path = Path(tasks).expanduser()
    if not path.is_dir():
        raise HarborTaskRefused(f"{path} is no folder of tasks.")
    return (folder for folder in (path, *sorted(path.iterdir())) if (folder / "task.toml").is_file())


def load_task(folder: Path, passed_variables: Collection[str] = ()) -> HarborTask:
    """Reads one task. Raises `HarborTaskRefused`."""
    config = _config_in(folder / "task.toml")
    instruction = _without_canary(text_in(folder / "instruction.md", HarborTaskRefused))
    if not (folder / "tests" / "test.sh").is_file():
        raise HarborTaskRefused(f"{folder} has no tests/test.sh, which judges it.")
    for field, reason in _unplayable(config):
        raise HarborTaskRefused(f"{folder / 'task.toml'}: {field} {reason}")
    name = config.task.name if config.task is not None else folder.name
    for section in ("environment", "verifier"):
        variables = getattr(config, section).env
        for variable, text in variables.items():
            where = f"{folder / 'task.toml'}: {section}.env.{variable} of the task {name}"
            variables[variable] = TEMPLATE.sub(partial(_value_of, passed_variables=passed_variables, where=where), text)
    return HarborTask(name, folder, instruction, config)


def _value_of(found: re.Match[str], passed_variables: Collection[str], where: str) -> str:
    """The value of `${NAME}` or `${NAME:-default}`, taken from this process.

    A variable that is not passed has its default only if nobody has set it: so no task gets a default in silence where
    it would have had a value. Raises `HarborTaskRefused`.
    """
    variable, default = found.groups()
    value = os.environ.get(variable)
    if variable not in passed_variables and (default is None or value is not None):
        raise HarborTaskRefused(
            f"{where} asks for the variable {variable} of the service's process, which harbor.passed_variables does "
            "not name: add it there if the task may have it, or write its value into the file."
        )
    if value is None and default is None:
        raise HarborTaskRefused(f"{where} needs the variable {variable}: set it where the service starts.")
    return str(default if value is None else value)


def _config_in(path: Path) -> _TaskFile:
    try:
        return _TaskFile.model_validate(tomllib.loads(text_in(path, HarborTaskRefused)))
    except ValidationError as error:
        raise HarborTaskRefused(f"{path}: {_problem_of(error)}.") from error
    except HarborTaskRefused:
        raise
    # Of a number with too many digits Python says so by a plain `ValueError`.
    except (ValueError, RecursionError) as error:
        raise HarborTaskRefused(f"{path} is not TOML: {error}.") from error


def _unplayable(config: _TaskFile) -> Iterator[tuple[str, str]]:
    """The fields that ask for what is not carried out here, each with a reason."""
    environment, verifier = config.environment, config.verifier
    wrong = {
        "steps": (config.steps, "makes it a task of several steps: only tasks of one step are played."),
        "environment.os": (environment.os != "linux", f"is {environment.os}: only linux is played."),
        "environment.gpus": (environment.gpus, "asks for GPUs, which no sandbox has here."),
        "environment.tpu": (environment.tpu, "asks for a TPU, which no sandbox has here."),
        "environment.mcp_servers": (environment.mcp_servers, "names MCP servers, which no agent is told of here."),
        "environment.skills_dir": (environment.skills_dir, "names skills, which no agent is told of here."),
        "environment.healthcheck": (environment.healthcheck, "is not run here."),
        "environment.network_mode": (
            environment.network_mode == "allowlist",
            "is allowlist: no sandbox filters hosts.",
        ),
        "agent.network_mode": (config.agent.network_mode, "differs from that of the environment: it is one for all."),
        "verifier.network_mode": (verifier.network_mode, "differs from that of the environment: it is one for all."),
        "agent.user": (config.agent.user not in ROOT, "names a user: commands run as root of the sandbox."),
        "verifier.user": (verifier.user not in ROOT, "names a user: commands run as root of the sandbox."),
        "verifier.environment": (verifier.environment, "asks for a container of the verifier's own."),
        "verifier.environment_mode": (
            verifier.environment_mode == "separate",
            "is separate: it judges in the same one.",
        ),
        "verifier.collect": (verifier.collect, "names commands of Compose's services, of which there are none."),
    }
    return ((field, reason) for field, (asked, reason) in wrong.items() if asked)


def _without_canary(text: str) -> str:
    """The instruction without the marks of a benchmark before it, and the empty lines after them."""
    lines = text.split("\n")
    while lines and CANARY.match(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _problem_of(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def rewards_in(content: bytes, name: str) -> dict[str, float]:
    """The rewards that a verifier wrote to `reward.json` or `reward.txt`. Raises `ValueError` with a sentence."""
    if len(content) > LARGEST_REWARD_BYTES:
        raise ValueError(f"{name} has more than {LARGEST_REWARD_BYTES} bytes")
    if not content.strip():
        raise ValueError(f"{name} is empty")
    is_number = name.endswith(".txt")
    try:
        given: Any = float(content) if is_number else orjson.loads(content)
    except ValueError as error:
        raise ValueError(
            f"{name} must hold {'a number' if is_number else 'JSON with finite numbers'}, got {content[:200]!r}"
        ) from error
    rewards = given if isinstance(given, dict) else {"reward": given}
    if not rewards:
        raise ValueError(f"{name} names no number, got {content[:200]!r}")
    if len(rewards) > MOST_REWARDS:
        raise ValueError(f"{name} names {len(rewards)} numbers, and may name {MOST_REWARDS}")
    numbers = {key: float(value) for key, value in rewards.items() if isinstance(value, int | float)}
    if numbers.keys() != rewards.keys() or not all(abs(value) < float("inf") for value in numbers.values()):
        raise ValueError(f"{name} must hold finite numbers, got {content[:200]!r}")
    return numbers


class HarborInfo(BaseModel):
    """Fields of a sample."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    task: str
    """Name of the task, as its `task.toml` has it, else that of its folder."""


class HarborTasks(TaskEnvironment):
    """Describes the tasks, which `HarborProgram` plays (`deployments/agents/harbor_program.py`)."""

    description = "Tasks in Harbor's format: an agent works in a sandbox, and the verifier of the task scores it."
    ExtraEnvInfo = HarborInfo

    def __init__(self, settings: dict[str, Any]) -> None:
        """Raises `HarborTaskRefused`."""
        self._tasks = list(load_tasks(HarborSettings.model_validate(settings)).values())
        self.sample_count = len(self._tasks)

    def step(self, message_log: list[ChatMessage], extra_env_info: HarborInfo) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges no conversation: its verifier judges the sandbox at the end of the run.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The tasks in order, beginning with number `seed`, and again from the first one after the last."""
        tasks = [self._tasks[number % len(self._tasks)] for number in range(seed, seed + count)]
        return [
            {
                "id": task.name,
                "messages": [{"role": "user", "content": task.instruction}],
                "extra_env_info": {"task": task.name},
            }
            for task in tasks
        ]
