"""Tasks in Harbor's format: their settings, their folders, and the task type that describes them.

A folder has `task.toml`, `instruction.md`, `environment/` and `tests/`, which are read as Harbor 0.26 reads them
(`harbor/models/task/config.py`). A field that would change how a task is played, and that is not carried out here,
refuses the task with the field's name; all others are kept out.
"""

import math
import os
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deployments.sandbox.providers.dockerfile import text_in
from deployments.sandbox.providers.interface import ProviderName
from deployments.strict_settings import StrictSettings
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment

TIMES = {"create": "sandbox_create_s", "run": "agent_run_s", "judge": "verifier_s", "destroy": "sandbox_destroy_s"}
"""The metrics of a rollout with the seconds that each of its steps in a sandbox has taken."""


class _SandboxProviderSettings(StrictSettings):
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
    sandbox: _SandboxProviderSettings = _SandboxProviderSettings()


CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->[ \t]*|#.*canary.*)(?:\n|\Z))*(?:[ \t]*\n)*", re.IGNORECASE)
"""Marks of a benchmark at the beginning of an instruction, which no agent sees, and empty lines."""
TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_Root = Literal["root", 0, "0"] | None
_Nothing = Annotated[tuple[Any, ...], Field(max_length=0)]
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}
LARGEST_REWARD_BYTES, MOST_REWARDS = 2**16, 1000
"""Bounds of what a verifier writes. Every number of it is in the result of its rollout."""


class HarborTaskRefused(ValueError):
    """A task cannot be played here. The message names the file, the field and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Environment(_Section):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Annotated[Literal["linux"], BeforeValidator(lambda name: str(name).lower())] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: Literal[0] | None = None
    tpu: None = None
    mcp_servers: _Nothing = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: None = None
    healthcheck: None = None
    workdir: str | None = None
    allow_internet: bool | None = None
    network_mode: Literal["no-network", "public"] = "public"

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
                size_mb = float(number) * _SIZES.get(unit, math.nan)
                if not math.isfinite(size_mb):
                    raise ValueError(f"{name} must be a number and one of {', '.join(_SIZES)}, got {size!r}")
                renamed.setdefault(f"{name}_mb", int(size_mb))
        return renamed

    @property
    def wants_network(self) -> bool:
        if "network_mode" not in self.model_fields_set and self.allow_internet is not None:
            return self.allow_internet
        return self.network_mode == "public"


class _Agent(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: _Root = None
    network_mode: None = None


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: _Root = None
    environment_mode: Literal["shared"] | None = None
    environment: None = None
    collect: _Nothing = ()
    network_mode: None = None


class _Package(_Section):
    name: str


class _TaskFile(_Section):
    task: _Package | None = None
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    steps: _Nothing = ()


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


def _load_tasks(settings: HarborSettings) -> dict[str, HarborTask]:
    """The tasks of the settings by name, in the order of their folders. Raises `HarborTaskRefused`."""
    path, tasks = Path(settings.tasks).expanduser(), dict[str, HarborTask]()
    if not path.is_dir():
        raise HarborTaskRefused(f"{path} is no folder of tasks.")
    for folder in (path, *sorted(path.iterdir())):
        if not (folder / "task.toml").is_file():
            continue
        task = _load_task(folder, settings.passed_variables)
        if (other := tasks.get(task.name)) is not None:
            raise HarborTaskRefused(f"{folder} and {other.folder} are both named {task.name}: give one another name.")
        tasks[task.name] = task
    if not tasks:
        raise HarborTaskRefused(f"{settings.tasks} has no tasks: no folder in it has a task.toml.")
    return tasks


def tasks_within(settings: HarborSettings, timeout_s: float) -> dict[str, HarborTask]:
    """The tasks, whose own limits leave a whole rollout below `timeout_s`.

    Raises `HarborTaskRefused` as `_load_tasks`, or with the first task whose agent or verifier would be cut off.
    """
    tasks = _load_tasks(settings)
    for task in tasks.values():
        own_s = (task.config.agent.timeout_sec or 0.0) + task.config.verifier.timeout_sec
        if own_s >= timeout_s:
            raise HarborTaskRefused(
                f"{task.folder / 'task.toml'}: agent.timeout_sec and verifier.timeout_sec are {own_s:g} s together, "
                f"and the agent's timeout_s, which bounds the whole rollout, is {timeout_s:g}: set it above."
            )
    return tasks


def _load_task(folder: Path, passed_variables: Collection[str] = ()) -> HarborTask:
    """Reads one task. Raises `HarborTaskRefused`."""
    config = _config_in(folder / "task.toml")
    instruction = CANARY.sub("", text_in(folder / "instruction.md", HarborTaskRefused))
    if not (folder / "tests" / "test.sh").is_file():
        raise HarborTaskRefused(f"{folder} has no tests/test.sh, which judges it.")
    name = config.task.name if config.task is not None else folder.name
    for section in ("environment", "verifier"):
        variables = getattr(config, section).env
        for variable, text in variables.items():
            where = f"{folder / 'task.toml'}: {section}.env.{variable} of the task {name}"
            variables[variable] = TEMPLATE.sub(partial(_value_of, passed_variables=passed_variables, where=where), text)
    return HarborTask(name, folder, instruction, config)


def _value_of(found: re.Match[str], passed_variables: Collection[str], where: str) -> str:
    """The value of `${NAME}` or `${NAME:-default}`, taken from this process.

    A variable that is set and not passed has no default: no task gets one in silence where it would have had a value.
    Raises `HarborTaskRefused`.
    """
    variable, default = found.groups()
    given = os.environ.get(variable)
    if (given is None and default is None) or (given is not None and variable not in passed_variables):
        raise HarborTaskRefused(
            f"{where} asks for the variable {variable} of the service's process: set it where the service starts and "
            "name it in harbor.passed_variables, or write its value into the file."
        )
    return str(default if given is None else given)


def _config_in(path: Path) -> _TaskFile:
    try:
        return _TaskFile.model_validate(tomllib.loads(text_in(path, HarborTaskRefused)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise HarborTaskRefused(f"{path}: {field}: {first['msg']}. docs/sandboxes.md says what is played.") from error
    except HarborTaskRefused:
        raise
    # Of a number with too many digits Python says so by a plain `ValueError`.
    except (ValueError, RecursionError) as error:
        raise HarborTaskRefused(f"{path} is not TOML: {error}.") from error


def rewards_in(content: bytes, name: str) -> dict[str, float]:
    """The rewards that a verifier wrote to `reward.json` or `reward.txt`. Raises `ValueError` with a sentence."""
    try:
        if len(content) > LARGEST_REWARD_BYTES:
            raise ValueError("too long")
        given: Any = float(content) if name.endswith(".txt") else orjson.loads(content)
        rewards = given if isinstance(given, dict) else {"reward": given}
        if not 0 < len(rewards) <= MOST_REWARDS:
            raise ValueError("too many")
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in rewards.values()):
            raise ValueError("not numbers")
    except ValueError as error:
        raise ValueError(
            f"{name} must hold a finite number, or as JSON an object of 1 to {MOST_REWARDS} of them, in at most "
            f"{LARGEST_REWARD_BYTES} bytes, got {content[:200]!r}"
        ) from error
    return {key: float(value) for key, value in rewards.items()}


class HarborInfo(BaseModel):
    """Fields of a sample."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    task: str
    """Name of the task, as its `task.toml` has it, else that of its folder."""


class HarborTasks(TaskEnvironment):
    """Describes the tasks, which `HarborProgram` plays (`deployments/agents/harbor_program.py`)."""

    description = "Tasks in Harbor's format: an agent works in a sandbox, and the verifier of the task scores it."
    ExtraEnvInfo = HarborInfo
    certified_as = "deployments.agents.harbor_program:ScriptedHarbor"

    def __init__(self, settings: dict[str, Any]) -> None:
        """Raises `HarborTaskRefused`."""
        self.harbor = HarborSettings.model_validate(settings)
        self.is_made_of, self.made_with = self.harbor.tasks, self.harbor.model_dump(mode="json", exclude={"tasks"})
        self.tasks = _load_tasks(self.harbor)
        self.sample_count = len(self.tasks)

    def step(self, message_log: list[ChatMessage], extra_env_info: HarborInfo) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges no conversation: its verifier judges the sandbox at the end of the run.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The tasks in order, beginning with number `seed`, and again from the first one after the last."""
        known = list(self.tasks.values())
        tasks = [known[number % len(known)] for number in range(seed, seed + count)]
        return [
            {
                "id": task.name,
                "messages": [{"role": "user", "content": task.instruction}],
                "extra_env_info": {"task": task.name},
            }
            for task in tasks
        ]
