"""Whether the programs of agents keep their prefixes in the KV cache: `python -m benchmarks agents --cache PART`.

All programs begin at the same time, each by a `POST /rollout` of its own, on an engine whose cache holds a part of what
they need together at their ends. The ways play the same programs in turns; while one service plays, the processes of
the others are suspended.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.agents.program_figures import (
    BLOCK_TOKENS,
    Figures,
    Program,
    figures_of,
    looked_up_and_found,
    medians,
    missed,
    ratios_of,
)
from benchmarks.agents.slow_tools import NEW_TOKENS, SlowTools
from benchmarks.engine_comparison import rollout_service
from benchmarks.openai_loop import JSON, open_session
from benchmarks.process_group import ProcessGroup
from benchmarks.rollout_load import WrongAnswer
from benchmarks.service_process import BEHIND_HAPROXY

WAYS: Mapping[str, Mapping[str, Any]] = {"today": {"scheduling": {"idle_program_s": None}}, "places": {}}
"""Fields of the service's settings, by section. The first way is what the others are compared with."""
ENVIRONMENT = "benchmarks.agents.slow_tools:SlowTools"
EXPORT_S = 6.0
"""Longer than the time between two exports of the engine's counts."""
REST_WITHIN_S = 120.0
NO_TIMEOUT = aiohttp.ClientTimeout(None)
console = Console(stderr=True)


def compare(config: Path, cache: float, agents: int, turns: int, tool_times: float, rounds: int) -> list[str]:
    """Plays and shows all rounds. Returns the bounds that were missed, in words."""
    os.environ.update(dict.fromkeys(BEHIND_HAPROXY, "0"))  # Its ports are fixed: there can be one.
    samples_of = SlowTools().example_samples
    plays = [samples_of(8, 0, 2, 0.0), *(samples_of(agents, 1 + number, turns, tool_times) for number in range(rounds))]
    longest = max(sample["final_tokens"] for samples in plays for sample in samples)
    needed = sum(ceil(sample["final_tokens"] / BLOCK_TOKENS) for sample in plays[1])
    blocks = 1 + round(cache * needed)  # The engine keeps one for itself.
    engine = {"model": "models/tiny", "dtype": "float32", "block_size": BLOCK_TOKENS, "num_gpu_blocks_override": blocks}
    engine |= {"max_model_len": longest, "max_num_batched_tokens": longest}
    common = {"engine": engine, "limits": {"step_timeout_s": None}}
    today, *others = WAYS
    played: dict[str, list[Figures]] = {way: [] for way in WAYS}
    with ExitStack() as to_end:
        services: dict[str, tuple[str, ProcessGroup]] = {}
        for way, changes in WAYS.items():
            served = yaml.safe_load(config.read_text())
            args = served["applications"][0]["args"]
            for section, fields in (*common.items(), *changes.items()):
                args[section] = args.get(section, {}) | fields
            with console.status(f"Starting the service of {way}"):
                services[way] = to_end.enter_context(rollout_service(served, config.parent, ENVIRONMENT))
            services[way][1].suspend()
        in_turn = [(number, way) for number in range(rounds + 1) for way in list(WAYS)[:: (-1) ** number]]
        for number, way in track(in_turn, "Playing", console=console):
            url, processes = services[way]
            with processes.awake(0.0):
                figures = asyncio.run(play(url, plays[number]))
            # The first round warms up.
            played[way] += [figures] if number else []
    ratios = {way: [ratios_of(*pair) for pair in zip(played[way], played[today], strict=True)] for way in others}
    rows = {**played, **{f"{way} / {today}": of_way for way, of_way in ratios.items()}}
    table = Table("", *(name.replace("_", " ") for name in figures), title="Medians")
    for name, row in rows.items():
        table.add_row(name, *(f"{figure:,g}" for figure in medians(row).values()))
    console.print(table)
    setting = {"cache": cache, "agents": agents, "turns": turns, "tool_times": tool_times}
    typer.echo(json.dumps({**setting, "rounds": rows, "medians": {name: medians(row) for name, row in rows.items()}}))
    return [f"{way}: {each}" for way in others for each in missed(medians(ratios[way]), cache, tool_times)]


async def play(url: str, samples: Sequence[Mapping[str, Any]]) -> Figures:
    """Plays all programs at once."""
    async with await open_session(url) as http:
        looked_up, found = await counts_at_rest(http)
        programs = await asyncio.gather(*(play_one(http, sample) for sample in samples))
        expected = looked_up + sum(sum(program.prompts) for program in programs)
        looked_up_then, found_then = await counts_at_rest(http, expected)
    return figures_of(programs, looked_up_then - looked_up - (found_then - found))


async def play_one(http: aiohttp.ClientSession, sample: Mapping[str, Any]) -> Program:
    """Raises `WrongAnswer` if the program did not play all its turns."""
    turns = 1 + len(sample["extra_env_info"]["answers"])
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "greedy": True}
    body = {"samples": [{"task_name": "slow_tools", **sample}], "sampling": sampling, "max_rollout_turns": turns}
    began = time.perf_counter()
    async with http.post("/rollout", data=orjson.dumps(body), headers=JSON, timeout=NO_TIMEOUT) as answer:
        content = await answer.read()
    seconds = time.perf_counter() - began
    [rollout] = orjson.loads(content)["samples"]
    if rollout["metrics"]["turn_gen_tokens"] != [NEW_TOKENS] * turns:
        raise WrongAnswer(f"{turns} turns of {NEW_TOKENS} tokens were to be played: {rollout | {'message_log': []}}")
    return Program(seconds, rollout["metrics"]["turn_input_tokens"])


async def counts_at_rest(http: aiohttp.ClientSession, expected: int = 0) -> tuple[int, int]:
    """Tokens `looked_up_and_found`, once two exports in a row agree and have the expected tokens looked up."""
    before, counts = None, (-1, -1)
    async with asyncio.timeout(REST_WITHIN_S):
        while counts != before or counts[0] < expected:
            before = counts
            await asyncio.sleep(EXPORT_S)
            async with http.get("/metrics") as page:
                counts = looked_up_and_found(await page.text())
    return counts
