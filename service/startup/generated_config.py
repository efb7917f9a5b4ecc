"""Makes the Serve config of a model with tasks, as `rollout serve` asks for it."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from pydantic import ValidationError

from deployments.generation.card_share import engines_on_a_card
from deployments.generation.settings import EngineSettings
from deployments.upstream.ray_serve.serve_internals import resources_of_this_machine
from service.startup.config import BUNDLED, ServiceNotStarted

EMBEDDED_MODEL = BUNDLED / "tiny"
EMBEDDED_MODEL_THAT_SEES = BUNDLED / "shapes"
BUILT_IN = {
    name: f"deployments.tasks.{name}:{name.title().replace('_', '')}Environment"
    for name in ("code", "instruction_following", "math", "retrieval", "shapes", "sliding_puzzle", "tool_calls")
}
"""The built-in tasks that need no settings."""
DEFAULT_TASKS = ("math", "sliding_puzzle")
TASKS_WITH_IMAGES = ("shapes",)
"""Built-in tasks that only a model that sees can play."""
_MOST_INGRESS_REPLICAS = 4
_CORES_BESIDE_AN_INGRESS = 8


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Which model `rollout serve` is asked for, and on which hardware."""

    model: str
    """A local path or a Hugging Face repository."""
    gpus: int
    """GPUs of this machine that the engines use; 0 runs one engine on the processors."""
    tensor_parallel_size: int = 1
    """GPUs that hold one replica's model together."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the config's `engine`, which take precedence. By default `max_model_len` is the model's own
    limit, on processors at most that of the shipped config."""


def generated_config(
    served: ServedModel, tasks: Sequence[str], http_options: Mapping[str, Any], access: Mapping[str, str]
) -> dict[str, Any]:
    """The content of a Serve config.

    Args:
        tasks: `NAME` of a built-in task, `MODULE:CLASS` of an environment, or `NAME=MODULE:CLASS`.
        http_options: `host` and `port`; by default 8000 on loopback.
        access: the config's section of that name.

    Raises:
        ServiceNotStarted: the GPUs are not a multiple of `tensor_parallel_size`, or a task is not understood.
    """
    environments = environments_of(tasks)
    config = _shipped_config("serve_config.cpu.yaml")
    [application] = config["applications"]
    entries = {entry["name"]: entry for entry in application["deployments"]}
    ingress, generator, of_a_task = entries["Ingress"], entries["Generator"], entries["math"]
    engine = _engine_of(served)
    if served.gpus:
        generator["num_replicas"] = served.gpus // served.tensor_parallel_size
        with suppress(ValidationError):  # The check of the whole config says what is wrong with it.
            engines = engines_on_a_card(EngineSettings.model_validate({"engines_per_gpu": "auto"} | engine))
            engine["engines_per_gpu"] = engines
            generator["num_replicas"] *= engines
    ingress["num_replicas"] = _ingress_replicas(resources_of_this_machine()["CPU"])
    optional: dict[str, Any] = {"access": dict(access)} if access else {}
    if sees(served.model):
        optional["images"] = {}
    application["args"] = {**optional, "engine": engine, "environments": environments}
    application["deployments"] = [ingress, generator, *(deepcopy(of_a_task) | {"name": name} for name in environments)]
    config["http_options"] |= http_options
    return config


def _ingress_replicas(cores: float) -> int:
    """Replicas that share the service's port, from 1 to 4: one replica uses one core, and engines need the others."""
    return max(1, min(_MOST_INGRESS_REPLICAS, int(cores / _CORES_BESIDE_AN_INGRESS)))


def model_and_tasks(model: str | None, tasks: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """The model and the tasks of a service; by default an embedded model, and tasks that the model can play."""
    if model is None:
        tasks = tasks or DEFAULT_TASKS
        return str(EMBEDDED_MODEL_THAT_SEES if needs_images(tasks) else EMBEDDED_MODEL), tasks
    model = model_named(model)
    return model, tasks or (TASKS_WITH_IMAGES if sees(model) else DEFAULT_TASKS)


def model_named(model: str) -> str:
    """A folder's absolute path, since replicas run elsewhere; any other name as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def gpus_or_all(gpus: int | None) -> int:
    """The GPUs that are asked for, by default all of this machine."""
    return int(resources_of_this_machine().get("GPU", 0)) if gpus is None else gpus


def _engine_of(served: ServedModel) -> dict[str, Any]:
    """The `engine` of the shipped config for this hardware, with what was asked for."""
    [application] = _shipped_config("serve_config.yaml" if served.gpus else "serve_config.cpu.yaml")["applications"]
    engine: dict[str, Any] = application["args"]["engine"] | {"model": served.model}
    # Without a GPU one engine runs, on the processors.
    if max(served.gpus, 1) % served.tensor_parallel_size:
        raise ServiceNotStarted(
            f"--gpus: {served.gpus} is not a multiple of --tensor-parallel-size {served.tensor_parallel_size}, which "
            "each replica of the model needs."
        )
    if served.gpus:
        del engine["max_model_len"]  # By default the model's own.
        return engine | {"tensor_parallel_size": served.tensor_parallel_size} | dict(served.engine)
    length = served.engine.get("max_model_len") or min(_longest_context(served.model), engine["max_model_len"])
    # Without chunked prefill a batch must have room for the longest prompt.
    return engine | {"max_model_len": length, "max_num_batched_tokens": length} | dict(served.engine)


def _shipped_config(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load((BUNDLED / name).read_text()))


def engine_fields(given: Sequence[str]) -> dict[str, Any]:
    """Fields of the config's `engine` from `KEY=VALUE`, whose values are YAML.

    Raises:
        ServiceNotStarted: one has no name, or is not YAML.
    """
    fields: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not name.isidentifier() or not equals:
            raise ServiceNotStarted(f"--engine: {text!r} is not KEY=VALUE, such as max_num_seqs=512.")
        try:
            fields[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ServiceNotStarted(f"--engine: the value of {name} is not YAML: {error}") from error
    return fields


def _longest_context(model: str) -> int:
    """Positions that a model has, by its config; what cannot be looked up is taken for large enough."""
    config = _hugging_face_config(model)
    of_text = config.get("text_config")
    positions = (of_text if isinstance(of_text, dict) else config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else 2**31


def needs_images(tasks: Sequence[str]) -> bool:
    """Whether all of these tasks show images: the embedded model that sees plays no others."""
    return bool(tasks) and {*tasks} <= {*TASKS_WITH_IMAGES}


def sees(model: str) -> bool:
    """Whether a model takes images: its config has a `vision_config`."""
    return isinstance(_hugging_face_config(model).get("vision_config"), dict)


def _hugging_face_config(model: str) -> dict[str, Any]:
    """The `config.json` of a folder, or of a model of the Hub that is on this machine already; else empty."""
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    config = json.loads(path.read_text())
    return config if isinstance(config, dict) else {}


def environments_of(tasks: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """The entries of `environments`, by task name."""
    environments: dict[str, Mapping[str, str]] = {}
    for task in tasks:
        name, import_path = _named_import_path(task)
        if name in environments:
            raise ServiceNotStarted(f"--env: there are two tasks {name!r}; give one another name: OTHER={import_path}.")
        environments[name] = {"import_path": import_path}
    return environments


def _named_import_path(task: str) -> tuple[str, str]:
    name, _, import_path = task.rpartition("=")
    if ":" in import_path:
        return name or _task_name_of(import_path.rpartition(":")[2]), import_path
    if not name and task in BUILT_IN:
        return task, BUILT_IN[task]
    raise ServiceNotStarted(
        f"--env: {task!r} is not a task. Write MODULE:CLASS, NAME=MODULE:CLASS, or one of {', '.join(BUILT_IN)}."
    )


def _task_name_of(class_name: str) -> str:
    """`GuessTheNumberEnvironment`, or `GuessTheNumberEnv`, is the task `guess_the_number`."""
    without_ending = re.sub("(?<=.)Env(ironment)?$", "", class_name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", without_ending).lower()
