"""Reads a Serve config, and the environment variables for Ray that belong to it; finds a port for it."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import yaml
from dotenv import load_dotenv
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from service.startup.commands import ServiceNotStarted

REPOSITORY = Path(__file__).resolve().parent.parent.parent
BUNDLED = REPOSITORY / "service" / "bundled"
"""Files that the package brings. In a checkout they are links to where they are kept."""
LOOPBACK = "127.0.0.1"
APP_BUILDER = "service.app:build"
ENVIRONMENT_FILE = "serve.env"
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_GIVEN_BY_DEFAULT = 32768
_AFTER_RAYS_WORKERS = 20_000
_TRIES = 100


def read_config(path: Path, host: str | None = None, port: int | None = None) -> ServeDeploySchema:
    """Reads a Serve config, with `host` and `port` in place of its own where given.

    Also sets the environment variables of its `serve.env`, and makes the paths of models absolute.

    Raises:
        ServiceNotStarted: the file cannot be read as a Serve config, or has keys that Serve does not know.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ServiceNotStarted(f"{path} is not a Serve config: {error}") from error
    config = config_of(content, path)
    # Serve's own default is all interfaces.
    own_host = config.http_options.host if "host" in config.http_options.model_fields_set else LOOPBACK
    config.http_options.host = host or own_host
    config.http_options.port = port or config.http_options.port
    return config


def config_of(content: Any, path: Path) -> ServeDeploySchema:
    """The config with this content, as if it were in the file `path`; see `read_config`."""
    try:
        config = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise ServiceNotStarted("\n".join([f"{path} is not a Serve config:", *_problems_in(error)])) from error
    if unknown := list(unknown_keys(content)):
        raise ServiceNotStarted("\n".join([f"{path} has keys that Ray Serve does not know:", *unknown]))
    set_environment(path)
    _resolve_models(config, path.resolve().parent)
    return config


def set_access(config: ServeDeploySchema, keys_file: Path | None, guarded_by: str | None) -> None:
    """Puts what was given in the place of the config's own."""
    given = {
        "keys_file": None if keys_file is None else str(keys_file.expanduser().absolute()),
        "guarded_by": guarded_by,
    }
    for application in config.applications:
        if application.import_path == APP_BUILDER:
            own = application.args.get("access") or {}
            application.args["access"] = {**own, **{name: value for name, value in given.items() if value is not None}}


def _resolve_models(config: ServeDeploySchema, folder: Path) -> None:
    """Makes a model's path absolute that is relative to the config or to the working directory.

    Those of data, keys and Harbor's tasks are relative to the config alone.

    The app builder does the same for paths that are relative to the repository.
    """
    for application in config.applications:
        access: Any = application.args.get("access")
        if isinstance(access, dict) and isinstance(access.get("keys_file"), str):
            access["keys_file"] = str(folder / Path(access["keys_file"]).expanduser())
        engine: Any = application.args.get("engine")
        named = {field: engine.get(field) for field in ("model", "tokenizer")} if isinstance(engine, dict) else {}
        for field, name in named.items():
            folders = (base / name for base in (folder, Path.cwd())) if isinstance(name, str) else ()
            if found := next((path for path in folders if path.is_dir()), None):
                engine[field] = str(found)
        for environment in (application.args.get("environments") or {}).values():
            data = environment.get("data") if isinstance(environment, dict) else None
            if isinstance(data, dict) and "files" in data:
                data["files"] = _resolved_files(data["files"], folder)
            agent = environment.get("agent") if isinstance(environment, dict) else None
            harbor = agent.get("harbor") if isinstance(agent, dict) else None
            if isinstance(harbor, dict) and "tasks" in harbor:
                harbor["tasks"] = _resolved_files(harbor["tasks"], folder)


def _resolved_files(names: Any, folder: Path) -> Any:
    """Paths and patterns of files, relative to `folder`; what has another type is left for validation to refuse."""
    if isinstance(names, dict):
        return {split: _resolved_files(of_split, folder) for split, of_split in names.items()}
    if isinstance(names, list):
        return [_resolved_files(name, folder) for name in names]
    return str(folder / Path(names).expanduser()) if isinstance(names, str) else names


def set_environment(config_path: Path) -> None:
    """Sets the variables of `serve.env` that are not set already: Ray reads them when it starts.

    The file is looked for beside the config, then among those that the package brings.
    """
    beside = config_path.resolve().parent / ENVIRONMENT_FILE
    load_dotenv(beside if beside.is_file() else BUNDLED / ENVIRONMENT_FILE)


def _problems_in(error: ValidationError) -> list[str]:
    """One line for each problem: the field, what is wrong, and the value that was given."""
    return [problem_line(".".join(map(str, problem["loc"])), problem) for problem in error.errors()]


def problem_line(field: str, problem: ErrorDetails) -> str:
    given, message = problem["input"], problem["msg"].removeprefix("Value error, ")
    # Of what holds other fields, the field and the message say enough.
    return f"  {field}: {message}" + ("" if isinstance(given, dict | list) else f" (given: {given!r})")


def unknown_keys(content: dict[str, Any]) -> Iterator[str]:
    """One line for each key that Serve's schemas do not have; Serve itself would ignore it."""
    yield from _unknown_keys_of(ServeDeploySchema, content, "")
    yield from _unknown_keys_of(HTTPOptionsSchema, content.get("http_options"), "http_options.")
    for position, application in enumerate(content["applications"]):
        at = f"applications.{position}."
        yield from _unknown_keys_of(ServeApplicationSchema, application, at)
        for deployment in application.get("deployments") or ():
            named = f"{at}deployments.{deployment['name']}."
            yield from _unknown_keys_of(DeploymentSchema, deployment, named)
            yield from _unknown_keys_of(
                RayActorOptionsSchema, deployment.get("ray_actor_options"), f"{named}ray_actor_options."
            )
            yield from _unknown_keys_of(
                AutoscalingConfig, deployment.get("autoscaling_config"), f"{named}autoscaling_config."
            )


def _unknown_keys_of(schema: type[BaseModel], content: dict[str, Any] | None, at: str) -> Iterator[str]:
    for key in (content or {}).keys() - schema.model_fields.keys():
        yield f"  {at}{key} (permitted: {', '.join(sorted(schema.model_fields))})"


def free_port() -> int:
    """A port of loopback that is free at this moment.

    It is none of those that the system gives to connections and to programs that ask for any port: a service binds its
    port seconds later, when Ray has opened hundreds of connections. Nor is it one of those that Ray's workers take.
    """
    draw = SystemRandom()
    for _ in range(_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(_AFTER_RAYS_WORKERS, _first_given_port())))
            port: int = probe.getsockname()[1]
            return port
    raise ServiceNotStarted(f"No port of loopback from {_AFTER_RAYS_WORKERS} to {_first_given_port() - 1} is free.")


def _first_given_port() -> int:
    """The first of the ports that the system gives out; as Linux does by default where it does not say."""
    try:
        first = int(_GIVEN_PORTS.read_text().split()[0])
    except OSError:
        return _FIRST_GIVEN_BY_DEFAULT
    return first if first > _AFTER_RAYS_WORKERS + _TRIES else _FIRST_GIVEN_BY_DEFAULT
