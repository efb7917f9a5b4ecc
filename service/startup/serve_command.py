"""`rollout serve MODEL`: runs a service on this machine, of any model with any tasks, without a config of one's own.

`pyproject.toml` makes it a plug-in of the client's command line. It is light to import: Ray comes with the call.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Host = Annotated[str | None, typer.Option(help="Listen on this address instead of the config's.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Listen on this port instead of the config's.")]
KeysFile = Annotated[
    Path | None, typer.Option(envvar="ROLLOUT_KEYS_FILE", help="In place of the config's access.keys_file.")
]
GuardedBy = Annotated[
    str | None,
    typer.Option(
        envvar="ROLLOUT_GUARDED_BY", help="What stands in front of a service without keys (access.guarded_by)."
    ),
]
Model = Annotated[
    str | None, typer.Argument(help="A local path or a Hugging Face repository; by default the embedded model.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help="A task: NAME of a built-in one, MODULE:CLASS, or NAME=MODULE:CLASS. Can be repeated."),
]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs that the engines use; by default all of this machine.")]


def serve(
    model: Model = None,
    env: Tasks = None,
    gpus: Gpus = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of one replica.")] = 1,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A field of `engine` in the config: the service's or vLLM's, such as max_model_len=4096. Repeatable.",
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    keys_file: KeysFile = None,
    guarded_by: GuardedBy = None,
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
    with sentences_for_the_user(console):
        name, tasks = model_and_tasks(model, env)
        served = ServedModel(name, gpus_or_all(gpus), tensor_parallel_size, engine_fields(engine or ()))
        config = generated_config(served, tasks, http_options, given_access(keys_file, guarded_by))
        if print_config:
            typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
            return
        engines = config["applications"][0]["args"]["engine"].get("engines_per_gpu")
        if isinstance(engines, int) and engines > 1:
            console.print(f"{engines} engines share each GPU (--engine engines_per_gpu=1 for one).")
        make_importable(Path.cwd())
        serve_until_stopped(config_of(config, BUNDLED / "serve_config.yaml"), console)


def make_importable(folder: Path) -> None:
    """For this process and those that it starts: environments of the user's own lie where the command is given."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else str(folder)
