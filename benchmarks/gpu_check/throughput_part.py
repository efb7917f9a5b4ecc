"""The bare engine, vLLM's server and the service over one model, in alternating rounds; several engines on the card."""

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.bare_engine import BareEngine
from benchmarks.engine_comparison import (
    WAYS,
    Contender,
    added_latency_ms,
    bare_play,
    openai_play,
    play_round,
    play_rounds,
    service_contender,
)
from benchmarks.gpu_check.configs import GIB, Machine
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import SHAPE, SMALL_SHAPE, write_model
from benchmarks.openai_loop import OpenAILoop, openai_server
from benchmarks.resident_memory import replica
from benchmarks.workload import Workload, reply_ids
from deployments.generation.card_share import engines_on_a_card
from deployments.generation.settings import EngineSettings
from service.startup.config import REPOSITORY

WORKLOADS = (
    Workload(1024, 1, 128),
    Workload(1024, 8, 16),
    Workload(256, 8, 32),
    Workload(64, 8, 32),
)
SMALL_WORKLOADS = (Workload(16, 1, 16), Workload(16, 2, 16))
ROUNDS = 2
SAMPLE_MS = 250


def check(machine: Machine, findings: Findings) -> None:
    folder = machine.folder / "model"
    on_card = machine.device == "gpu"
    write_model(folder, SHAPE if on_card else SMALL_SHAPE)
    # vLLM's server takes no settings of a rollout service: the same engine, by the same flags.
    fields = machine.engine(folder, max_model_len=4096, kv_cache_memory_bytes=12 * GIB, max_num_seqs=1024)
    workloads = WORKLOADS if on_card else SMALL_WORKLOADS
    with all_started(EngineSettings.model_validate(fields), machine.served(fields)) as ways:
        findings.add("all of them start", True)
        for workload in workloads:
            with findings.attempt(workload.name):
                _compare(ways, workload, findings)
        with findings.attempt("one sample, idle"):
            findings.add("one sample, idle: ms more than vLLM's server", None, ms=added_latency_ms(ways))
    shared = machine.engine(folder, max_model_len=4096, max_num_seqs=1024, gpu_memory_utilization=0.9)
    shared.pop("kv_cache_memory_bytes", None)
    engines = engines_on_a_card(EngineSettings.model_validate(shared | {"engines_per_gpu": "auto"}))
    with (
        findings.attempt("several engines on the card"),
        service_contender(machine.served(shared, replicas=engines), REPOSITORY) as several,
    ):
        for workload in workloads:
            _play(f"{workload.name}, {engines} engines on the card", several, workload, findings)


def _compare(ways: dict[str, Contender], workload: Workload, findings: Findings) -> None:
    measured = play_rounds(ways, [workload], ROUNDS)[workload]
    speeds = {
        way: round(workload.all_tokens / median(one.seconds for one in rounds)) for way, rounds in measured.items()
    }
    processor_ms = {
        WAYS[way]: round(1000 * median(one.processor_seconds for one in rounds) / workload.all_turns, 3)
        for way, rounds in measured.items()
    }
    findings.add(
        f"{workload.name} tokens/s",
        None,
        **{WAYS[way]: speed for way, speed in speeds.items()},
        over_bare=round(speeds["C"] / speeds["A"], 3),
        over_server=round(speeds["C"] / speeds["B"], 3),
        held_over_bare=round(speeds["H"] / speeds["A"], 3),
        processor_ms_a_turn=processor_ms,
    )
    for way in "AC":
        _play(f"{workload.name}, {WAYS[way]}", ways[way], workload, findings)


def _play(subject: str, contender: Contender, workload: Workload, findings: Findings) -> None:
    """Plays once to warm up and once more: how busy the card is, how long a step takes, and the ingress's cores."""
    play_round(contender, workload, workload.prompts(ROUNDS + 1))
    ingress = None if contender.processes is None else replica("Ingress")
    before = 0.0 if ingress is None else sum(ingress.cpu_times()[:2])
    with card_sampled() as busy_percent:
        played = play_round(contender, workload, workload.prompts(ROUNDS + 2))
    findings.add(
        subject,
        None,
        tokens_per_s=round(workload.all_tokens / played.seconds),
        ms_a_step=round(1000 * played.seconds / (workload.turns * workload.new_tokens), 2),
        card_busy_percent=median(busy_percent) if busy_percent else None,
        ingress_cores=None if ingress is None else round((sum(ingress.cpu_times()[:2]) - before) / played.seconds, 2),
    )


@contextmanager
def card_sampled() -> Iterator[list[int]]:
    """The percentages of the time in which the card computed during the block; empty where `nvidia-smi` is missing."""
    percent: list[int] = []
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLE_MS}"]
    if shutil.which(query[0]) is None:
        yield percent
        return
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as sampler:
        try:
            yield percent
        finally:
            sampler.terminate()
            percent += map(int, sampler.communicate()[0].split())


@contextmanager
def all_started(engine: EngineSettings, served: dict[str, Any]) -> Iterator[dict[str, Contender]]:
    """The four ways, whose engines start at once."""
    with ThreadPoolExecutor(2) as threads, ExitStack() as ends:
        server = threads.submit(ends.enter_context, openai_server(engine))
        service = threads.submit(ends.enter_context, service_contender(served, REPOSITORY))
        bare = ends.enter_context(BareEngine.started(engine))
        holding = ends.enter_context(BareEngine.started(engine, holds_outputs=True))
        server_url, server_processes = server.result()
        loop = ends.enter_context(closing(OpenAILoop(server_url, engine.model)))
        reply = reply_ids(AutoTokenizer.from_pretrained(engine.tokenizer or engine.model))
        yield {
            "A": Contender(bare_play(bare, reply), None),
            "H": Contender(bare_play(holding, reply), None),
            "B": Contender(openai_play(loop, reply), server_processes),
            "C": service.result(),
        }
