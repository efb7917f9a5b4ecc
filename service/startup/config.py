"""Reads a Serve config, and the environment variables for Ray that belong to it; finds a port for it."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import yaml
from dotenv import load_dotenv
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ray.serve.schema import ServeDeploySchema

REPOSITORY = Path(__file__).resolve().parent.parent.parent
BUNDLED = REPOSITORY / "service" / "bundled"
"""Files that the package brings. In a checkout they are links to where they are kept."""
LOOPBACK = "127.0.0.1"
APP_BUILDER = "service.app:build"
ENVIRONMENT_FILE = "serve.env"
_PORTS = range(20_000, 32_768)
"""Above the ports of Ray's workers, below those that Linux gives to connections and to programs that ask for any."""
_TRIES = 100


class ServiceNotStarted(Exception):
    """The service did not start; the message is for the user and says what to change."""


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
        # Serve itself would ignore keys that it does not know.
        config = ServeDeploySchema.model_validate(content, extra="forbid")
    except ValidationError as error:
        problems = map(problem_line, error.errors())
        raise ServiceNotStarted("\n".join([f"{path} is not a Serve config:", *problems])) from error
    _set_environment(path)
    _resolve_paths(config, path.resolve().parent)
    return config


def given_access(keys_file: Path | None, guarded_by: str | None) -> dict[str, str]:
    """The fields of a config's section `access` that were given."""
    keys = None if keys_file is None else str(keys_file.expanduser().absolute())
    return {name: value for name, value in (("keys_file", keys), ("guarded_by", guarded_by)) if value is not None}


def set_access(config: ServeDeploySchema, given: Mapping[str, str]) -> None:
    """Puts what was given in the place of the config's own."""
    for application in config.applications:
        if application.import_path == APP_BUILDER:
            application.args["access"] = {**(application.args.get("access") or {}), **given}


def _resolve_paths(config: ServeDeploySchema, folder: Path) -> None:
    """Makes a model's path absolute that is relative to the config or to the working directory.

    Those of data, keys, certificates and Harbor's tasks are relative to the config alone. The app builder does the same
    for paths that are relative to the repository.
    """
    for application in config.applications:
        engine: Any = application.args.get("engine")
        for field in ("model", "tokenizer"):
            name = engine.get(field) if isinstance(engine, dict) else None
            folders = (base / name for base in (folder, Path.cwd())) if isinstance(name, str) else ()
            if found := next((path for path in folders if path.is_dir()), None):
                engine[field] = str(found)
        _resolve(application.args.get("access"), folder, "keys_file")
        for environment in (application.args.get("environments") or {}).values():
            if isinstance(environment, dict):
                _resolve(environment, folder, "certificate")
                _resolve(environment.get("data"), folder, "files")
                agent = environment.get("agent")
                _resolve(agent.get("harbor") if isinstance(agent, dict) else None, folder, "tasks")


def _resolve(section: Any, folder: Path, *fields: str) -> None:
    if isinstance(section, dict):
        section.update({field: _resolved_files(section[field], folder) for field in fields if field in section})


def _resolved_files(names: Any, folder: Path) -> Any:
    """Paths and patterns of files, relative to `folder`; what has another type is left for validation to refuse."""
    if isinstance(names, dict):
        return {split: _resolved_files(of_split, folder) for split, of_split in names.items()}
    if isinstance(names, list):
        return [_resolved_files(name, folder) for name in names]
    return str(folder / Path(names).expanduser()) if isinstance(names, str) else names


def _set_environment(config_path: Path) -> None:
    """Sets the variables of `serve.env` that are not set already: Ray reads them when it starts.

    The file is looked for beside the config, then among those that the package brings.
    """
    beside = config_path.resolve().parent / ENVIRONMENT_FILE
    load_dotenv(beside if beside.is_file() else BUNDLED / ENVIRONMENT_FILE)


def problem_line(problem: ErrorDetails, *above: str) -> str:
    """The field below `above`, the problem with it, and the value that was given."""
    given, message = problem["input"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden" and not above:
        message = "unknown to Ray Serve"
    # Of what holds other fields, the field and the message say enough.
    shown = "" if isinstance(given, dict | list) else f" (given: {given!r})"
    return f"  {'.'.join(map(str, [*above, *problem['loc']]))}: {message}{shown}"


def free_port() -> int:
    """A port of loopback that is free at this moment.

    It is none that the system gives to others: a service binds its port seconds later, when Ray has opened hundreds of
    connections.
    """
    for port in SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise ServiceNotStarted(f"None of {_TRIES} ports of loopback from {_PORTS[0]} to {_PORTS[-1]} is free.")
