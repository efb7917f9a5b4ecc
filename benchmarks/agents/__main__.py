"""A model server's API of the service compared with vLLM's own server: `python -m benchmarks agents`.

Both run the same engine with the same parsers, and answer chat completions of conversations that grow with each call,
first of one agent at a time, then of 64. The service answers them without a session, and in sessions, which record
them; each with and without streaming. The ways take turns; while one server answers, the processes of the other one
are suspended. The processor time is that of everything but vLLM's `EngineCore` and `Worker` processes, the client
included.

Each step of an engine on the processor takes at least `--step-ms`, and leaves the processor free for the rest of it, as
one on a GPU does. With `--step-ms 0` the engines compute as fast as they can, on the processors that the servers need.

The last line of stdout is JSON. The exit code is 1 if a call takes more than 10 ms longer than by vLLM's server at the
median, or if 64 agents that do not stream get less than 0.95 of its throughput.

With `--cache` it measures something else, with models/tiny: the prefixes of agents' programs (`programs.py`).
"""

import asyncio
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.agents.conversations import Way, Workload, played
from benchmarks.agents.figures import Round, Rounds, figures_of, missed
from benchmarks.agents.programs import compare
from benchmarks.agents.waiting_steps import step_ms_of, with_waiting_steps
from benchmarks.bare_engine import engine_in
from benchmarks.openai_loop import openai_server
from benchmarks.process_group import CpuTime, ProcessGroup, no_process_left
from benchmarks.service_process import service_process
from examples.task_configs import config_for
from service.settings import ServiceSettings
from service.startup.local_service import sentences_for_the_user

WAYS = {
    "vllm": Way(is_vllm=True),
    "plain": Way(),
    "session": Way(has_session=True),
    "vllm_stream": Way(is_vllm=True, streams=True),
    "plain_stream": Way(streams=True),
    "session_stream": Way(has_session=True, streams=True),
    "vllm_tokens": Way(is_vllm=True, shows_tokens=True),
}
ALONE = Workload(agents=1, calls=4, new_tokens=8)
"""Few tokens: each further one is the engine's own time, which differs by more than what is to be seen."""
ALONE_PLAYS = 8
"""In a row, because the processes of a server run a while after they were suspended as nothing else would."""
WARM_UP_PLAYS = 2
TOGETHER = Workload(agents=64, calls=4, new_tokens=64)
SETTLE_S = 0.3
IDLE_AFTER_S = 4.0
"""Suspended processes have missed timers to run after they resume."""
console = Console(stderr=True)


class Server:
    """One of the two servers, which runs while it is needed."""

    def __init__(self, url: str, processes: ProcessGroup) -> None:
        self._url = url
        self.processes = processes
        processes.suspend()

    def play(self, way: Way, workload: Workload, seed: int) -> Round:
        cpu_time = CpuTime(self.processes)
        seconds, calls = asyncio.run(played(self._url, way, workload, seed))
        return Round(seconds, cpu_time.seconds(), calls)


@contextmanager
def servers(config: ServeDeploySchema, folder: Path) -> Iterator[dict[bool, Server]]:
    """vLLM's server, `True`, and the service with sessions, `False`, both suspended."""
    served = config.model_dump(mode="json", exclude_unset=True)
    args: dict[str, Any] = served["applications"][0]["args"]
    args["sessions"] = {}
    parsers = ServiceSettings.model_validate(args).responses
    flags: list[str] = []
    if parsers.tool_call_parser is not None:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tool_call_parser]
    if parsers.reasoning_parser is not None:
        flags += ["--reasoning-parser", parsers.reasoning_parser]
    with console.status("Starting vLLM's own server") as status, openai_server(engine_in(served), flags) as vllm:
        theirs = Server(*vllm)
        status.update("Starting the service")
        with service_process(served, folder) as (url, processes):
            status.stop()
            yield {True: theirs, False: Server(url, processes)}


def play_alone(of: dict[bool, Server], rounds: int, progress: Progress) -> Rounds:
    """One agent at a time. The ways to call one server take turns for each play, the servers for each round."""
    rows: dict[str, list[Round]] = {name: [] for name in WAYS}
    bar = progress.add_task("One agent", total=2 * rounds)
    for number in range(rounds):
        for is_vllm in (True, False) if number % 2 else (False, True):
            server = of[is_vllm]
            ways = {name: way for name, way in WAYS.items() if way.is_vllm == is_vllm}
            with server.processes.awake(IDLE_AFTER_S):
                for play in range(WARM_UP_PLAYS + ALONE_PLAYS):
                    for name in shuffled(ways, number, play):
                        # Both servers get the same conversations.
                        seed = number * (WARM_UP_PLAYS + ALONE_PLAYS) + play
                        round_ = server.play(ways[name], ALONE, seed)
                        if play >= WARM_UP_PLAYS:
                            rows[name].append(round_)
            progress.advance(bar)
    return rows


def play_together(of: dict[bool, Server], rounds: int, progress: Progress) -> Rounds:
    """All agents. The ways take turns. The first round is a warm-up and is not counted."""
    rows: dict[str, list[Round]] = {name: [] for name in WAYS}
    bar = progress.add_task(f"{TOGETHER.agents} agents", total=len(WAYS) * (rounds + 1))
    for number in range(rounds + 1):
        for name in shuffled(WAYS, number):
            way = WAYS[name]
            with of[way.is_vllm].processes.awake(SETTLE_S):
                round_ = of[way.is_vllm].play(way, TOGETHER, -1 - number)
            if number:
                rows[name].append(round_)
            progress.advance(bar)
    return rows


def shuffled(names: dict[str, Way], *seed: int) -> list[str]:
    return random.Random(str(seed)).sample(list(names), len(names))


def show(figures: dict[str, Any]) -> None:
    table = Table(
        "", "ms more", "to the first event", "tokens/s", "of vLLM's", "processor ms a call",
        title=f"One agent, {ALONE.new_tokens} tokens a call; {TOGETHER.agents} agents, {TOGETHER.new_tokens} a call",
    )  # fmt: skip
    for way in WAYS:
        cells = [
            figures["added_ms"].get(way),
            figures["added_to_first_ms"].get(way),
            figures["tokens_per_s"][way],
            figures["throughput_ratios"].get(way),
            figures["processor_ms_per_call"][way],
        ]
        table.add_row(way, *("" if cell is None else f"{cell:,}" for cell in cells))
    console.print(table)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: Annotated[Path | None, typer.Option(help="An embedded model, with its parsers.")] = Path("models/small"),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    step_ms: Annotated[
        float | None, typer.Option(min=0, help="Least milliseconds of a step of an engine on the processor (50).")
    ] = None,
    cache: Annotated[float | None, typer.Option(min=0, help="Part of the programs' peak need (`programs.py`).")] = None,
    agents: Annotated[int, typer.Option(min=1, help="With --cache.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="With --cache.")] = 10,
    tool_times: Annotated[float, typer.Option(min=0, help="With --cache: a factor of the tools' times.")] = 1.0,
) -> None:
    if cache is not None:
        with sentences_for_the_user(console), no_process_left():
            end(compare(config, cache, agents, turns, tool_times, rounds))
    settings = config_for(config, model, ("math",))
    if step_ms := step_ms_of(settings, step_ms):
        settings = with_waiting_steps(settings, step_ms)
    with sentences_for_the_user(console), no_process_left(), servers(settings, config.parent) as of:
        with Progress(console=console) as progress:
            alone = play_alone(of, rounds, progress)
            together = play_together(of, rounds, progress)
        figures = figures_of(alone, together, TOGETHER)
        console.print("Stopping")
    show(figures)
    typer.echo(json.dumps({**figures, "step_ms": step_ms, "load_average": round(os.getloadavg()[1], 1)}))
    end(missed(figures))


def end(problems: Sequence[str]) -> NoReturn:
    """Shows the bounds that do not hold, and ends with 1 if there are any."""
    for problem in problems:
        console.print(problem, style="red")
    raise typer.Exit(bool(problems))


if __name__ == "__main__":
    typer.run(main)
