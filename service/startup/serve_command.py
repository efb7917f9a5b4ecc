"""`rollout serve MODEL`: runs a service on this machine, of any model with any tasks, without a config of one's own.

`pyproject.toml` makes it a plug-in of the client's command line. It is light to import: Ray comes with the call.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from service.startup.commands import (
    ROOM_TIMEOUT_S,
    Gpus,
    GuardedBy,
    Host,
    KeysFile,
    ModelToServe,
    Port,
    RoomTimeout,
    Tasks,
)


def serve(
    model: ModelToServe = None,
    env: Tasks = None,
    gpus: Gpus = None,
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

    from service.startup.config import BUNDLED, config_of, given_access
    from service.startup.generated_config import (
        ServedModel,
        engine_fields,
        generated_config,
        gpus_or_all,
        model_and_tasks,
    )
    from service.startup.local_service import sentences_for_the_user, serve_until_stopped

    console = Console(stderr=True)
    http_options = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    lengths = (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs))
    with sentences_for_the_user(console):
        name, tasks = model_and_tasks(model, env)
        fields = engine_fields([f"{name}={value}" for name, value in lengths if value is not None])
        fields |= engine_fields(engine or ())
        served = ServedModel(name, gpus_or_all(gpus), tensor_parallel_size, fields, images)
        config = generated_config(served, tasks, http_options, given_access(keys_file, guarded_by))
        if print_config:
            typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
            return
        make_importable(Path.cwd())
        serve_until_stopped(config_of(config, BUNDLED / "serve_config.yaml"), console, room_timeout_s)


def make_importable(folder: Path) -> None:
    """For this process and those that it starts: environments of the user's own lie where the command is given."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else str(folder)
