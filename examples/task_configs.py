"""Configs that serve some of the tasks in `examples/tasks.yaml`, with a config's model or an embedded one."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema

from deployments.agents.settings import agent_deployment
from service.settings import SERVICE_DEPLOYMENTS
from service.startup.config import ServiceNotStarted, free_port, read_config
from service.startup.generated_config import EMBEDDED_MODEL_THAT_SEES, needs_images, sees

CONFIG = Path("serve_config.cpu.yaml")
CORES_OF_A_TASK = 0.01
"""A reservation, so that all tasks fit on two cores; a replica may use more."""
TASKS_FILE = Path(__file__).parent / "tasks.yaml"
MODELS_FILE = Path(__file__).parent / "models.yaml"
BRIDGED = Path(__file__).parent / "bridged"
"""Servers and tasksets of other collections."""
ENVIRONMENTS = Path(__file__).resolve().parent.parent / ".bridges"
"""Python environments of packages that do not fit beside the service's own."""
TASKS_OF_OTHER_MODELS = ("math", "sliding_puzzle")


def known_tasks() -> dict[str, dict[str, Any]]:
    """The entries of the file, by task."""
    text = Template(TASKS_FILE.read_text()).substitute(
        service_python=sys.executable, bridged=BRIDGED.resolve(), environments=ENVIRONMENTS
    )
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return entries


def python_of(environment: str) -> Path:
    """The interpreter of one of `ENVIRONMENTS`."""
    return ENVIRONMENTS / environment / "bin" / "python"


def needed_by(model: Path) -> dict[str, Any]:
    """The entry of an embedded model in `models.yaml`; empty for any other model."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(MODELS_FILE.read_text())
    return entries.get(model.resolve().name, {})


def tasks_of(model: Path | None) -> Sequence[str]:
    """Those that a model was trained for."""
    return needed_by(model).get("tasks", TASKS_OF_OTHER_MODELS) if model else TASKS_OF_OTHER_MODELS


def temperature_of(model: Path | None) -> float:
    """The temperature of a conversation that is to be read; models are trained at 1, where small ones ramble."""
    return float(needed_by(model).get("temperature", 1.0)) if model else 1.0


def missing_package(task: str) -> str | None:
    """The package that the task needs and that is installed neither here nor in an environment of its own."""
    needed: str | None = known_tasks()[task].get("needs")
    is_here = needed is None or find_spec(needed) is not None or python_of(needed).exists()
    return None if is_here else needed


def config_for(path: Path, model: Path | None, tasks: Sequence[str], port: int | None = None) -> ServeDeploySchema:
    """The config on the port, by default a free one, with the model, and with these tasks alone.

    Tasks that the config has not are those of `tasks.yaml`. Those that show images are played by the embedded model
    that sees, if the config's own sees none.

    Raises:
        ServiceNotStarted: there is no such task, or it needs a package that is not installed.
    """
    config = read_config(path, port=port or free_port())
    [application] = config.applications
    if model is None and needs_images(tasks) and not sees(application.args["engine"]["model"]):
        model = EMBEDDED_MODEL_THAT_SEES
    if model is not None:
        needed = needed_by(model)
        application.args["engine"] |= needed.get("engine", {}) | {"model": str(model.resolve())}
        application.args["responses"] = application.args.get("responses", {}) | needed.get("responses", {})
        if sees(str(model.resolve())):
            application.args.setdefault("images", {})
    own: dict[str, Any] = application.args["environments"]
    application.args["environments"] = {task: own.get(task) or entry_of(task, own) for task in tasks}
    agents = [agent_deployment(task) for task, entry in application.args["environments"].items() if "agent" in entry]
    if agents:
        application.args.setdefault("sessions", {})
    entries = {entry.name: entry for entry in application.deployments}
    cores = RayActorOptionsSchema(num_cpus=CORES_OF_A_TASK)
    application.deployments = [
        *(entries[name] for name in SERVICE_DEPLOYMENTS if name in entries),
        *(
            entries.get(name) or DeploymentSchema(name=name, num_replicas=1, ray_actor_options=cores)
            for name in (*tasks, *agents)
        ),
    ]
    return config


def entry_of(task: str, own: dict[str, Any]) -> dict[str, Any]:
    if task not in known_tasks():
        raise ServiceNotStarted(f"There is no task {task!r}; there are {', '.join({**own, **known_tasks()})}.")
    if (package := missing_package(task)) is not None:
        raise ServiceNotStarted(f"The task {task} needs {package}, which is not installed: see docs/tasks.md.")
    return {name: value for name, value in known_tasks()[task].items() if name != "needs"}
