"""Configs that serve some of the tasks in `examples/tasks.yaml`, on the engine of another config."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema

from service.settings import SERVICE_DEPLOYMENTS
from service.startup.config import read_config
from service.startup.failures import ServiceNotStarted
from service.startup.ports import free_port

CORES_OF_A_TASK = 0.05
"""A reservation, so that all tasks fit on two cores; a replica may use more."""
TASKS_FILE = Path(__file__).parent / "tasks.yaml"


def known_tasks() -> dict[str, dict[str, Any]]:
    """The entries of the file, by task."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(TASKS_FILE.read_text())
    return entries


def missing_package(task: str) -> str | None:
    """The module that the task needs and that is not installed."""
    needed: str | None = known_tasks()[task].get("needs")
    return needed if needed is not None and find_spec(needed) is None else None


def config_for(path: Path, model: Path | None, tasks: Sequence[str]) -> ServeDeploySchema:
    """The config on a free port, with the model, and with these tasks alone.

    Tasks that the config has not are those of `tasks.yaml`.

    Raises:
        ServiceNotStarted: there is no such task, or it needs a package that is not installed.
    """
    config = read_config(path, port=free_port())
    [application] = config.applications
    if model is not None:
        application.args["engine"]["model"] = str(model.resolve())
    own: dict[str, Any] = application.args["environments"]
    application.args["environments"] = {task: own.get(task) or entry_of(task, own) for task in tasks}
    entries = {entry.name: entry for entry in application.deployments}
    cores = RayActorOptionsSchema(num_cpus=CORES_OF_A_TASK)
    application.deployments = [
        *(entries[name] for name in SERVICE_DEPLOYMENTS if name in entries),
        *(entries.get(task) or DeploymentSchema(name=task, num_replicas=1, ray_actor_options=cores) for task in tasks),
    ]
    return config


def entry_of(task: str, own: dict[str, Any]) -> dict[str, Any]:
    if task not in known_tasks():
        raise ServiceNotStarted(f"There is no task {task!r}; there are {', '.join({**own, **known_tasks()})}.")
    if (package := missing_package(task)) is not None:
        raise ServiceNotStarted(f"The task {task} needs {package}, which is not installed: see docs/bridges.md.")
    return {name: value for name, value in known_tasks()[task].items() if name != "needs"}
