"""`rollout serve MODEL`: runs a service on this machine, of any model with any tasks, without a config of one's own.

`pyproject.toml` makes it a plug-in of the client's command line. It is light to import: Ray comes with the call.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.startup.commands import MODEL_HELP, ROOM_TIMEOUT_S, GuardedBy, Host, KeysFile, Port, RoomTimeout

if TYPE_CHECKING:
    from service.startup.generated_config import ServedModel


def serve(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="A task: NAME of a built-in one, MODULE:CLASS, or NAME=MODULE:CLASS. Can be repeated."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs that the engines use; by default all of this machine.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tensor-parallel", min=1, help="GPUs of one replica.")
    ] = 1,
    max_model_len: Annotated[
        str | None, typer.Option(help="Tokens of prompt and generation; auto: as many as the memory holds.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Generations that an engine runs at once.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A field of `engine` in the config: the service's or vLLM's. Repeatable."
        ),
    ] = None,
    images: Annotated[
        bool | None,
        typer.Option(
            "--images/--no-images", help="Take images; by default if the config of the model has a vision_config."
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    keys_file: KeysFile = None,
    guarded_by: GuardedBy = None,
    room_timeout_s: RoomTimeout = ROOM_TIMEOUT_S,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the Serve config and start nothing.")
    ] = False,
) -> None:
    """Run a service on this machine until Ctrl-C."""
    import yaml
    from rich.console import Console

    from service.startup.config import BUNDLED, config_of
    from service.startup.generated_config import engine_fields, generated_config
    from service.startup.local_service import sentences_for_the_user, serve_until_stopped

    console = Console(stderr=True)
    http_options = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    keys = None if keys_file is None else str(keys_file.expanduser().absolute())
    access = {name: value for name, value in (("keys_file", keys), ("guarded_by", guarded_by)) if value is not None}
    with sentences_for_the_user(console):
        tasks = env or tasks_for(model)
        given = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
        fields = given | engine_fields(engine or ())
        served = served_model(model or embedded_model(tasks), gpus, tensor_parallel_size, max_model_len, fields, images)
        config = generated_config(served, tasks, http_options, access)
        if print_config:
            typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
            return
        make_importable(Path.cwd())
        serve_until_stopped(config_of(config, BUNDLED / "serve_config.yaml"), console, room_timeout_s)


def served_model(
    model: str,
    gpus: int | None,
    tensor_parallel_size: int = 1,
    max_model_len: str | None = None,
    engine: Mapping[str, Any] | None = None,
    images: bool | None = None,
) -> "ServedModel":
    """The model that is asked for, by default on all GPUs of this machine.

    Raises:
        ServiceNotStarted: `max_model_len` is neither `auto` nor a number.
    """
    from deployments.upstream.ray_serve.ray_internals import resources_of_this_machine
    from service.startup.generated_config import ServedModel, context_length

    if gpus is None:
        gpus = int(resources_of_this_machine().get("GPU", 0))
    return ServedModel(
        model_named(model), gpus, tensor_parallel_size, context_length(max_model_len), engine or {}, images
    )


def model_named(model: str) -> str:
    """A folder's absolute path, since replicas run elsewhere; any other name as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def embedded_model(tasks: Sequence[str]) -> str:
    """The model of a service that is asked for none: the one that plays these tasks."""
    from service.startup.generated_config import EMBEDDED_MODEL, EMBEDDED_MODEL_THAT_SEES, needs_images

    return str(EMBEDDED_MODEL_THAT_SEES if needs_images(tasks) else EMBEDDED_MODEL)


def tasks_for(model: str | None) -> Sequence[str]:
    """The tasks of a service that is asked for none: those that the model can play."""
    from service.startup.generated_config import DEFAULT_TASKS, TASKS_WITH_IMAGES, sees

    if model is None:
        return DEFAULT_TASKS
    return TASKS_WITH_IMAGES if sees(model_named(model)) else DEFAULT_TASKS


def make_importable(folder: Path) -> None:
    """For this process and those that it starts: environments of the user's own lie where the command is given."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else str(folder)
