"""How long a push stops generation, against the bare swap: `make bench-swap`.

Rounds alternate on one service: a push while it is idle, a push while 256 games run, the same uploaded slowly in small
pieces. The bare swap is vLLM's reload of the weights in its worker, timed there; each pause is held against the swap
within it, because a swap too takes longer where everything else wants the cores. The last line is JSON.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rollout_client import RolloutClient, Sampling
from rollout_client.policy import ReplicaUpdate
from service.local import free_port, local_service, read_config, sentences_for_the_user

GAMES = 256
UNDER_WAY_AFTER_S = 2.0
SLOW_PIECE_BYTES = 200_000
SLOW_PIECE_S = 0.1
SAMPLING = Sampling(temperature=1.5, max_new_tokens=96)
console = Console(stderr=True)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: Annotated[Path, typer.Option(help="The weights that are pushed.")] = Path("models/tiny"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    settings = read_config(config, port=free_port())
    with sentences_for_the_user(console), local_service(settings, console) as url, RolloutClient(url) as client:
        ways: dict[str, Callable[[], ReplicaUpdate]] = {
            "idle": partial(pushed, client, model),
            "under load": partial(under_load, client, partial(pushed, client, model)),
            "under load, slow upload": partial(under_load, client, partial(pushed_slowly, url, client, model)),
        }
        measured: dict[str, list[ReplicaUpdate]] = {way: [] for way in ways}
        for _ in track(range(rounds), "Pushing", console=console):
            for way, push in ways.items():
                measured[way].append(push())
    report(measured)


def pushed(client: RolloutClient, model: Path) -> ReplicaUpdate:
    return client.push_weights(model).replicas[0]


def pushed_slowly(url: str, client: RolloutClient, model: Path) -> ReplicaUpdate:
    [file] = model.glob("*.safetensors")
    data = file.read_bytes()
    version = client.policy().current + 1
    for begin in range(0, len(data), SLOW_PIECE_BYTES):
        piece = data[begin : begin + SLOW_PIECE_BYTES]
        time.sleep(SLOW_PIECE_S)
        answer = httpx.put(
            f"{url}/policy/versions/{version}",
            content=piece,
            headers={"content-range": f"bytes {begin}-{begin + len(piece) - 1}/{len(data)}"},
            timeout=60,
        ).raise_for_status()
    return ReplicaUpdate.model_validate(answer.json()["replicas"][0])


def under_load(client: RolloutClient, push: Callable[[], ReplicaUpdate]) -> ReplicaUpdate:
    games = client.example_samples("sliding_puzzle", GAMES)
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(client.rollout, games, sampling=SAMPLING, max_rollout_turns=4)
        # Past the first, long step of the batch, into the mixture of turns that a service has most of the time.
        time.sleep(UNDER_WAY_AFTER_S)
        update = push()
        if playing.done():
            raise RuntimeError("The games were over before the weights were swapped: play more or longer ones.")
        playing.result()
    return update


def report(measured: dict[str, list[ReplicaUpdate]]) -> None:
    table = Table("push", "load", "swap", "pause", "pause / swap", title="Medians, in milliseconds")
    ratios = {}
    for way, updates in measured.items():
        seconds = (median(getattr(update, name) for update in updates) for name in ("load_s", "swap_s", "pause_s"))
        ratios[way] = round(median(update.pause_s / update.swap_s for update in updates), 3)
        table.add_row(way, *(f"{1000 * median_s:.1f}" for median_s in seconds), f"{ratios[way]:.2f}")
    console.print(table)
    typer.echo(json.dumps({"pause_over_bare_swap": ratios}))


if __name__ == "__main__":
    typer.run(main)
