"""The throughput of the service compared with that of its engine: `make bench`.

The same rollouts are played in four ways, in alternating rounds:

A. a loop over vLLM's `AsyncLLM`, in this process;
H. the same loop over an engine that holds outputs, as the service's do;
B. an asyncio loop over vLLM's OpenAI-compatible server, as a trainer would write it;
C. `POST /rollout`, with an environment that only answers three tokens, as `make serve` comes.

While one way plays, the processes of the others are suspended. Besides tokens per second, the CPU time per turn outside
the engine's own processes is measured: for B of the server's front end and the client, for C of all processes of the
service, Ray's included, and the client. The table goes to stderr, all rounds to bench.json; the last line of stdout is
JSON. One sample alone is also played by D, a service without a proxy, as `make serve` starts it.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Column, Table
from transformers import AutoTokenizer

from benchmarks.bare_engine import BareEngine, engine_in
from benchmarks.openai_loop import OpenAILoop, openai_server
from benchmarks.process_group import CpuTime, ProcessGroup, no_process_left
from benchmarks.service_process import service_process
from benchmarks.workload import ONE_SAMPLE, SAMPLING, WORKLOADS, Workload, reply_ids
from deployments.generation.settings import EngineSettings
from rollout_client import RolloutClient, Sampling
from service.startup.config import free_port

WAYS = {"A": "bare engine", "H": "bare engine with held outputs", "B": "OpenAI server", "C": "POST /rollout"}
SETTLE_S = 0.3
SINGLE_SAMPLES = 20
SINGLE_ROUNDS = 3
IDLE_AFTER_S = 4.0
"""Suspended processes have missed timers to run after they resume."""
console = Console(stderr=True)
Conversations = list[list[int]]
Play = Callable[[Workload, list[list[int]]], Conversations]


@dataclass(frozen=True, slots=True)
class Round:
    """The time that one way took for one workload."""

    seconds: float
    processor_seconds: float


Rounds = dict[Workload, dict[str, list[Round]]]


@dataclass(frozen=True, slots=True)
class Contender:
    play: Play
    processes: ProcessGroup | None


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    output: Annotated[Path, typer.Option(help="Folder for bench.json.")] = Path(),
    only: Annotated[list[str] | None, typer.Option(help="Names of workloads, such as 64x4x32.")] = None,
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    served = yaml.safe_load(config.read_text())
    engine = engine_in(served)
    workloads = [workload for workload in WORKLOADS if not only or workload.name in only]
    with no_process_left(), contenders(engine, served, config.parent) as ways:
        measured = play_rounds(ways, workloads, rounds)
        added_ms = added_latency_ms(ways)
        console.print("Stopping")
    report(measured, added_ms, output)


@contextmanager
def contenders(engine: EngineSettings, served: dict[str, Any], folder: Path) -> Iterator[dict[str, Contender]]:
    reply = reply_ids(AutoTokenizer.from_pretrained(engine.tokenizer or engine.model))
    with (
        console.status("Starting the bare engines") as status,
        BareEngine.started(engine) as bare,
        BareEngine.started(engine, holds_outputs=True) as holding,
    ):
        status.update("Starting vLLM's OpenAI-compatible server")
        with openai_server(engine) as (openai_url, openai_processes):
            status.update("Starting the service")
            with (
                closing(OpenAILoop(openai_url, engine.model)) as loop,
                service_contender(served, folder) as service,
            ):
                status.stop()
                yield {
                    "A": Contender(bare_play(bare, reply), None),
                    "H": Contender(bare_play(holding, reply), None),
                    "B": Contender(openai_play(loop, reply), openai_processes),
                    "C": service,
                }


@contextmanager
def service_contender(served: dict[str, Any], folder: Path) -> Iterator[Contender]:
    with rollout_service(served, folder) as (url, processes), RolloutClient(url) as client:
        yield Contender(service_play(client), processes)


def rollout_service(
    served: dict[str, Any], folder: Path, environment: str = "benchmarks.three_tokens:ThreeTokens"
) -> AbstractContextManager[tuple[str, ProcessGroup]]:
    """Runs the service with one environment alone, a task with the name of its module, as `service_process` does."""
    served["http_options"]["port"] = free_port()
    task = environment.partition(":")[0].rpartition(".")[2]
    [application] = served["applications"]
    application["args"]["environments"] = {task: {"import_path": environment}}
    entries = [entry for entry in application["deployments"] if entry["name"] in ("Ingress", "Generator")]
    entries.append({"name": task, "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}})
    application["deployments"] = entries
    return service_process(served, folder)


def bare_play(bare: BareEngine, reply: Sequence[int]) -> Play:
    def play(workload: Workload, prompts: list[list[int]]) -> Conversations:
        sampling = {**SAMPLING, "max_tokens": workload.new_tokens}
        return bare.run(bare.play(prompts, workload.turns, reply, sampling, f"{time.monotonic_ns()}"))

    return play


def openai_play(loop: OpenAILoop, reply: Sequence[int]) -> Play:
    def play(workload: Workload, prompts: list[list[int]]) -> Conversations:
        return loop.play(prompts, workload.turns, reply, {**SAMPLING, "max_tokens": workload.new_tokens})

    return play


def service_play(client: RolloutClient) -> Play:
    def play(workload: Workload, prompts: list[list[int]]) -> Conversations:
        samples: Any = [
            {
                "task_name": "three_tokens",
                "message_log": [{"role": "user", "content": "", "token_ids": prompt}],
            }
            for prompt in prompts
        ]
        sampling = Sampling(**SAMPLING, max_new_tokens=workload.new_tokens)
        response = client.rollout(samples, sampling=sampling, max_rollout_turns=workload.turns)
        return [[id_ for message in sample.message_log for id_ in message.token_ids] for sample in response.samples]

    return play


def play_rounds(
    ways: dict[str, Contender], workloads: Sequence[Workload], rounds: int, names: Mapping[str, str] = WAYS
) -> Rounds:
    """Plays `rounds` + 1 rounds; the first one is a warm-up and is not counted.

    Args: `names` of the ways, for whoever waits.
    """
    for contender in ways.values():
        if contender.processes is not None:
            contender.processes.suspend()
    measured: Rounds = {workload: {way: [] for way in ways} for workload in workloads}
    plays = [
        (number, play, workload)
        for number in range(rounds + 1)
        for workload in workloads
        for play in range(workload.plays_a_round)
    ]
    with Progress(console=console) as progress:
        bar = progress.add_task("Playing", total=len(plays) * len(ways))
        for number, play, workload in plays:
            seed = number * workload.plays_a_round + play
            for way in rotated(list(ways), seed):
                progress.update(bar, description=f"Round {number}: {workload.name}, {names[way]}")
                round_ = play_round(ways[way], workload, workload.prompts(seed))
                if number:
                    measured[workload][way].append(round_)
                progress.advance(bar)
    return measured


def play_round(contender: Contender, workload: Workload, prompts: list[list[int]]) -> Round:
    with awake(contender):
        cpu_time, began = CpuTime(contender.processes), time.perf_counter()
        conversations = contender.play(workload, prompts)
        round_ = Round(time.perf_counter() - began, cpu_time.seconds())
    check(workload, conversations)
    return round_


def awake(contender: Contender) -> AbstractContextManager[None]:
    return contender.processes.awake(SETTLE_S) if contender.processes else nullcontext()


def check(workload: Workload, conversations: Conversations) -> None:
    """Raises `RuntimeError` unless all rollouts together have the expected number of tokens."""
    expected = workload.samples * (workload.prompt_tokens + workload.turns * (workload.new_tokens + 3))
    played = sum(map(len, conversations))
    if played != expected:
        raise RuntimeError(f"{workload.name}: {played} tokens in all conversations, not {expected}.")


def rotated(ways: list[str], number: int) -> list[str]:
    first = number % len(ways)
    return ways[first:] + ways[:first]


def added_latency_ms(ways: dict[str, Contender]) -> float:
    """Median latency of one sample of one turn by the service, less that by the server; both are idle."""
    seconds: dict[str, list[float]] = {"B": [], "C": []}
    for round_ in track(range(SINGLE_ROUNDS), "One sample, one turn, idle", console=console):
        for way in rotated(list(seconds), round_):
            with awake(ways[way]):
                time.sleep(IDLE_AFTER_S)
                for number in range(SINGLE_SAMPLES):
                    prompts = ONE_SAMPLE.prompts(round_ * SINGLE_SAMPLES + number)
                    began = time.perf_counter()
                    ways[way].play(ONE_SAMPLE, prompts)
                    seconds[way].append(time.perf_counter() - began)
    return round(1000 * (median(seconds["C"]) - median(seconds["B"])), 2)


def report(measured: Rounds, added_ms: float, output: Path) -> None:
    tokens_per_s = medians(measured, lambda workload, round_: workload.all_tokens / round_.seconds)
    ms_per_turn = medians(measured, lambda workload, round_: 1000 * round_.processor_seconds / workload.all_turns)
    ratios = {name: values["C"] / values["B"] for name, values in tokens_per_s.items()}
    of_engine = {name: values["C"] / values["A"] for name, values in tokens_per_s.items()}
    cpu_ratios = {name: values["C"] / values["B"] for name, values in ms_per_turn.items()}
    table = Table(
        Column("", no_wrap=True), *WAYS, "C/A", "C/B", "B, ms", "C, ms", "C/B",
        title="Samples x turns x new tokens: tokens per second; processor time outside the engine per turn; medians",
        caption="; ".join(f"{way}: {name}" for way, name in WAYS.items()), box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name, values in tokens_per_s.items():
        table.add_row(
            name,
            *(f"{values[way]:,.0f}" for way in WAYS),
            f"{of_engine[name]:.2f}",
            f"{ratios[name]:.2f}",
            *(f"{ms_per_turn[name][way]:.2f}" for way in "BC"),
            f"{cpu_ratios[name]:.2f}",
        )
    console.print(table)
    console.print(f"One sample, one turn, idle: {added_ms:.1f} ms more than vLLM's server (medians)")
    figures = {
        "ratios": rounded(ratios),
        "geometric_mean": round(geometric_mean(ratios.values()), 3),
        "ratios_to_engine": rounded(of_engine),
        "geometric_mean_to_engine": round(geometric_mean(of_engine.values()), 3),
        "processor_time_ratios": rounded(cpu_ratios),
        "added_latency_ms": added_ms,
    }
    rounds = {
        workload.name: {
            way: [[round_.seconds, round_.processor_seconds] for round_ in of_way] for way, of_way in ways.items()
        }
        for workload, ways in measured.items()
    }
    (output / "bench.json").write_text(json.dumps({**figures, "rounds_s": rounds}, indent=1) + "\n")
    console.print(f"All rounds: {output / 'bench.json'}")
    typer.echo(json.dumps(figures))


def medians(measured: Rounds, figure: Callable[[Workload, Round], float]) -> dict[str, dict[str, float]]:
    return {
        workload.name: {way: median(figure(workload, round_) for round_ in rounds) for way, rounds in ways.items()}
        for workload, ways in measured.items()
    }


def rounded(ratios: dict[str, float]) -> dict[str, float]:
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


if __name__ == "__main__":
    typer.run(main)
