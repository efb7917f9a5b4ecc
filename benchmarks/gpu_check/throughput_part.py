"""The bare engine, vLLM's server and the service over one model, in alternating rounds."""

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
    play_rounds,
    service_contender,
)
from benchmarks.gpu_check.configs import GIB, Machine
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import SHAPE, SMALL_SHAPE, write_model
from benchmarks.openai_loop import OpenAILoop, openai_server
from benchmarks.workload import Workload, reply_ids
from deployments.generation.settings import EngineSettings
from service.startup.config import REPOSITORY

WORKLOADS = (
    Workload(256, 8, 32),
    Workload(1024, 1, 256),
    Workload(64, 8, 32),
    Workload(1024, 8, 32),
    Workload(64, 1, 256),
    Workload(256, 1, 256),
)
SMALL_WORKLOADS = (Workload(16, 1, 16), Workload(16, 2, 16))
ROUNDS = 2


def check(machine: Machine, findings: Findings) -> None:
    folder = machine.folder / "model"
    on_card = machine.device == "gpu"
    write_model(folder, SHAPE if on_card else SMALL_SHAPE)
    # vLLM's server takes no settings of a rollout service: the same engine, by the same flags.
    fields = machine.engine(folder, max_model_len=4096, kv_cache_memory_bytes=12 * GIB, max_num_seqs=1024)
    engine = EngineSettings.model_validate(fields)
    served = machine.served(fields)
    workloads = WORKLOADS if on_card else SMALL_WORKLOADS
    with all_started(engine, served) as ways:
        findings.add("all three start", True)
        for workload in workloads:
            with findings.attempt(workload.name):
                measured = play_rounds(ways, [workload], ROUNDS)[workload]
                speeds = {
                    WAYS[way]: round(workload.all_tokens / median(one.seconds for one in rounds))
                    for way, rounds in measured.items()
                }
                bare, server, service = speeds.values()
                processor_ms = {
                    WAYS[way]: round(1000 * median(one.processor_seconds for one in rounds) / workload.all_turns, 3)
                    for way, rounds in measured.items()
                }
                findings.add(
                    f"{workload.name} tokens/s",
                    None,
                    **speeds,
                    over_bare=round(service / bare, 3),
                    over_server=round(service / server, 3),
                    processor_ms_a_turn=processor_ms,
                )
        with findings.attempt("one sample, idle"):
            findings.add("one sample, idle: ms more than vLLM's server", None, ms=added_latency_ms(ways)["C"])


@contextmanager
def all_started(engine: EngineSettings, served: dict[str, Any]) -> Iterator[dict[str, Contender]]:
    """The three ways, whose engines start at once."""
    with ThreadPoolExecutor(2) as threads, ExitStack() as ends:
        server = threads.submit(ends.enter_context, openai_server(engine))
        service = threads.submit(ends.enter_context, service_contender(served, REPOSITORY))
        bare = ends.enter_context(BareEngine.started(engine))
        server_url, server_processes = server.result()
        loop = ends.enter_context(closing(OpenAILoop(server_url, engine.model)))
        reply = reply_ids(AutoTokenizer.from_pretrained(engine.tokenizer or engine.model))
        yield {
            "A": Contender(bare_play(bare, reply), None),
            "B": Contender(openai_play(loop, reply), server_processes),
            "C": service.result(),
        }
