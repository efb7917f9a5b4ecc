"""Options that the commands for running a service share, and the error of a service that did not start."""

from pathlib import Path
from typing import Annotated

import typer


class ServiceNotStarted(Exception):
    """The service did not start; the message is for the user and says what to change."""


ROOM_TIMEOUT_S = 120.0
"""How long a deployment may wait for cores or GPUs before the start is given up."""
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
RoomTimeout = Annotated[
    float, typer.Option(min=0, help="Give up if a deployment waits longer than this for free cores or GPUs.")
]
ModelToServe = Annotated[
    str | None, typer.Argument(help="A local path or a Hugging Face repository; by default the embedded model.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help="A task: NAME of a built-in one, MODULE:CLASS, or NAME=MODULE:CLASS. Can be repeated."),
]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs that the engines use; by default all of this machine.")]
