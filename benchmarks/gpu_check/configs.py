"""Serve configs of a check: those of one card, with memory for others beside it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.gpu_check.findings import Findings
from benchmarks.service_process import service_process
from rollout_client import RolloutClient
from service.startup.config import REPOSITORY, free_port

GIB = 2**30
GPU_ENGINE: dict[str, Any] = {
    "device": "gpu",
    "dtype": "bfloat16",
    "num_cpus": 1,
    "gpu_memory_utilization": 0.2,
    # Taken from the card as they are: engines that start at once would count each other's memory.
    "kv_cache_memory_bytes": 4 * GIB,
}


@dataclass(frozen=True, slots=True)
class Machine:
    device: Literal["gpu", "cpu"]
    folder: Path
    """For what a part writes."""

    @property
    def torch_device(self) -> str:
        return "cuda" if self.device == "gpu" else "cpu"

    def engine(self, model: Path, **fields: Any) -> dict[str, Any]:
        """The `engine:` section for a model of this machine."""
        if self.device == "gpu":
            return GPU_ENGINE | {"model": str(model.resolve())} | fields
        for_cards = {"kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_batched_tokens"}
        given = yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text())["applications"][0]["args"]["engine"]
        kept = {name: value for name, value in fields.items() if name not in for_cards}
        return {**given, "model": str(model.resolve()), "max_num_seqs": 64, **kept}

    def served(self, engine: dict[str, Any], replicas: int = 1, **args: Any) -> dict[str, Any]:
        """A whole config on a free port of loopback, with the tasks that need nothing besides."""
        config: dict[str, Any] = yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text())
        config["http_options"]["port"] = free_port()
        [application] = config["applications"]
        application["args"] |= {"engine": engine, **args}
        [generator] = [entry for entry in application["deployments"] if entry["name"] == "Generator"]
        generator["num_replicas"] = replicas
        if self.device == "gpu" and replicas > 1:
            application["args"]["engine"] = engine | {"engines_per_gpu": replicas}
        return config


@contextmanager
def running_service(
    served: dict[str, Any], findings: Findings, subject: str = "the service starts"
) -> Iterator[tuple[str, RolloutClient]]:
    """Runs the service for the length of the block; yields its URL and a client of it. Its start is a finding."""
    began = time.monotonic()
    with service_process(served, REPOSITORY) as (url, _), RolloutClient(url, timeout_s=300) as client:
        findings.add(subject, True, seconds=round(time.monotonic() - began, 1))
        yield url, client
