"""A trainer's process that pushes one file and may be killed meanwhile; `kills.py` starts it.

It prints the number of the version before it sends anything, and a second line when the push was acknowledged.
"""

from pathlib import Path
from typing import Annotated

import typer

from rollout_client import RolloutClient
from rollout_client.calls.policy import next_version

CHUNK_BYTES = 100_000
"""So that a kill hits each step of a push about as often."""


def main(
    url: str,
    weights: Path,
    base: Annotated[int | None, typer.Option(help="The version that the file, a delta, changes.")] = None,
    checksum: Annotated[str | None, typer.Option(help="Of the full weights.")] = None,
) -> None:
    with RolloutClient(url) as client:
        version = next_version(client.policy.state())
        typer.echo(version)
        update = client.push_weights(
            weights,
            version,
            kind="full" if base is None else "delta",
            base=base,
            checksum=checksum,
            chunk_bytes=CHUNK_BYTES,
        )
        typer.echo(update.version)


if __name__ == "__main__":
    typer.run(main)
