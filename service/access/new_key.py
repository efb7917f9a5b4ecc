"""`python -m service.access.new_key NAME`: makes a key and prints it once. Only its hash is kept."""

import math
import os
from pathlib import Path
from typing import Annotated, get_args

import typer
import yaml

from service.access.keys import KeysInvalid, Scope, hash_of, new_key, parsed_keys

_OWNER_ALONE = 0o600


def _main(
    name: Annotated[str, typer.Argument(help="Whose key it is. Keys of one name share weight and quota.")],
    scope: Annotated[list[str], typer.Option(help=f"What it allows, once for each of {', '.join(get_args(Scope))}.")],
    file: Annotated[Path, typer.Option(help="The keys file (YAML) that gets the entry.")] = Path("keys.yaml"),
) -> None:
    """Make a key, print it, and write the entry with its hash to a keys file."""
    key = new_key()
    try:
        _add(_entry_of(name, key, scope), file)
    except KeysInvalid as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}") from error
    typer.echo("The key, which is shown only now:", err=True)
    typer.echo(key)


def _entry_of(name: str, key: str, scopes: list[str]) -> str:
    """One line of a keys file, to which `weight` and `max_rollouts` can be added."""
    fields = {"name": name, "sha256": hash_of(key), "scopes": scopes}
    return f"- {yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=math.inf)}"


def _add(entry: str, file: Path) -> None:
    """Appends in one write, so that a service which reads the file meanwhile sees all of the entry or nothing.

    Raises:
        KeysInvalid: the file would not be a keys file any longer.
    """
    content = file.read_text() if file.exists() else ""
    added = entry if content else f"keys:\n{entry}"
    if content and not content.endswith("\n"):
        added = f"\n{added}"
    parsed_keys((content + added).encode())
    with open(file, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, _OWNER_ALONE)) as keys_file:
        keys_file.write(added.encode())


if __name__ == "__main__":
    typer.run(_main)
