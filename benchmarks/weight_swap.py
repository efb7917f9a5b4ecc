"""How long a push stops generation, against the bare swap: `python -m benchmarks swap`.

Rounds alternate: the bare engine, idle and with 256 generations under way, is paused, reloads its weights and goes
on, as vLLM offers it; the service gets a push while it is idle, while 256 games run, and the same uploaded slowly in
small chunks. The bare swap is the reload alone, without the calls around it; each pause is held against the bare swap
with the same load. The canary, for which generations of the only replica wait as well, is shown apart. The last line is
JSON.
"""

import asyncio
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

from benchmarks.bare_engine import BareEngine, engine_in
from benchmarks.process_group import no_process_left
from rollout_client import RolloutClient, Sampling
from rollout_client.contract.policy import ReplicaUpdate
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

GAMES = 256
BARE_PROMPT = [5] * 200
BARE_TURNS = 4
UNDER_WAY_AFTER_S = 2.0
SWAPS = 3
"""In each round, one after the other; but one of the slow upload."""
BETWEEN_SWAPS_S = 0.3
TOO_SHORT = "The conversations were over before the weights were swapped: play more or longer ones."
SLOW_CHUNK_BYTES = 200_000
SLOW_CHUNK_S = 0.1
SAMPLING = Sampling(temperature=1.5, max_new_tokens=96, ignore_eos=True)
console = Console(stderr=True)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: Annotated[Path, typer.Option(help="The weights that are pushed.")] = Path("models/tiny"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    settings = read_config(config, port=free_port())
    with (
        sentences_for_the_user(console),
        no_process_left(),
        BareEngine.started(engine_in(settings.model_dump(exclude_unset=True))) as bare,
        local_service(settings, console) as url,
        RolloutClient(url) as client,
    ):
        bare_ways = {"idle": partial(reloaded, bare, model, 0), "under load": partial(reloaded, bare, model, GAMES)}
        ways: dict[str, Callable[[], list[ReplicaUpdate]]] = {
            "idle": partial(pushed, client, model),
            "under load": partial(under_load, client, partial(pushed, client, model)),
            "under load, slow upload": partial(under_load, client, partial(pushed_slowly, url, client, model)),
        }
        bare_swaps: dict[str, list[float]] = {way: [] for way in bare_ways}
        measured: dict[str, list[ReplicaUpdate]] = {way: [] for way in ways}
        for _ in track(range(rounds), "Pushing", console=console):
            for way, reload in bare_ways.items():
                bare_swaps[way] += reload()
            for way, push in ways.items():
                measured[way] += checked(push())
    report(measured, bare_swaps)


def reloaded(bare: BareEngine, model: Path, conversations: int) -> list[float]:
    """Seconds of vLLM's own reloads, between a pause and going on, while so many conversations are under way."""
    weights = {"weights_path": str(model.resolve())}

    async def swap() -> float:
        await bare.llm.pause_generation(mode="keep")
        began = time.perf_counter()
        await bare.llm.collective_rpc("reload_weights", kwargs=weights)
        swap_s = time.perf_counter() - began
        await bare.llm.resume_generation()
        return swap_s

    async def swap_repeatedly() -> list[float]:
        sampling = {"temperature": SAMPLING.temperature, "max_tokens": SAMPLING.max_new_tokens, "ignore_eos": True}
        prompts = [BARE_PROMPT] * conversations
        playing = asyncio.create_task(bare.play(prompts, BARE_TURNS, (), sampling, f"load-{time.monotonic()}"))
        await asyncio.sleep(UNDER_WAY_AFTER_S if conversations else 0)
        swaps_s = []
        for _ in range(SWAPS):
            swaps_s.append(await swap())
            await asyncio.sleep(BETWEEN_SWAPS_S)
        if conversations and playing.done():
            raise RuntimeError(TOO_SHORT)
        await playing
        return swaps_s

    return bare.run(swap_repeatedly())


def pushed(client: RolloutClient, model: Path) -> list[ReplicaUpdate]:
    updates = []
    for _ in range(SWAPS):
        updates += client.push_weights(model).replicas
        time.sleep(BETWEEN_SWAPS_S)
    return updates


def pushed_slowly(url: str, client: RolloutClient, model: Path) -> list[ReplicaUpdate]:
    [file] = model.glob("*.safetensors")
    data = file.read_bytes()
    version = client.policy.state().current + 1
    for begin in range(0, len(data), SLOW_CHUNK_BYTES):
        chunk = data[begin : begin + SLOW_CHUNK_BYTES]
        time.sleep(SLOW_CHUNK_S)
        answer = httpx.put(
            f"{url}/policy/versions/{version}",
            content=chunk,
            headers={"content-range": f"bytes {begin}-{begin + len(chunk) - 1}/{len(data)}"},
            timeout=60,
        ).raise_for_status()
    return [ReplicaUpdate.model_validate(answer.json()["replicas"][0])]


def under_load(client: RolloutClient, push: Callable[[], list[ReplicaUpdate]]) -> list[ReplicaUpdate]:
    games = client.example_samples("sliding_puzzle", GAMES)
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(client.rollout, games, sampling=SAMPLING, max_rollout_turns=4)
        # Past the first, long step of the batch, into the mixture of turns that a service has most of the time.
        time.sleep(UNDER_WAY_AFTER_S)
        updates = push()
        if playing.done():
            raise RuntimeError(TOO_SHORT)
        playing.result()
    return updates


def checked(updates: list[ReplicaUpdate]) -> list[ReplicaUpdate]:
    """Raises `RuntimeError` for one that says nothing about the pause."""
    for update in updates:
        if update.status != "swapped":
            raise RuntimeError(f"A replica was {update.status}: {update.error}")
    return updates


def report(measured: dict[str, list[ReplicaUpdate]], bare_swaps: dict[str, list[float]]) -> None:
    names = ("push", "load", "bare swap", "swap", "pause", "pause / bare swap", "canary")
    table = Table(*names, title="Medians, in milliseconds")
    ratios, canaries_s = {}, {}
    for way, updates in measured.items():
        bare_s = median(bare_swaps[way.partition(",")[0]])
        load_s, swap_s, pause_s = (
            median(getattr(update, name) for update in updates) for name in ("load_s", "swap_s", "pause_s")
        )
        ratios[way] = round(pause_s / bare_s, 3)
        canaries_s[way] = round(median(update.canary_s for update in updates), 4)
        seconds = [f"{1000 * median_s:.1f}" for median_s in (load_s, bare_s, swap_s, pause_s)]
        table.add_row(way, *seconds, f"{ratios[way]:.2f}", f"{1000 * canaries_s[way]:.1f}")
    console.print(table)
    typer.echo(json.dumps({"pause_over_bare_swap": ratios, "canary_s": canaries_s}))


if __name__ == "__main__":
    typer.run(main)
