"""All measurements by name: `python -m benchmarks`."""

import sys

from benchmarks.programs import Program, run_program
from benchmarks.service_process import BEHIND_HAPROXY

PROGRAMS = {
    "engine": Program(
        "benchmarks.engine_comparison",
        "the service against the bare engine and vLLM's server",
    ),
    "agents": Program(
        "benchmarks.agents", "calls against vLLM's server; with --cache, kept prefixes (15 minutes)", BEHIND_HAPROXY
    ),
    "scale": Program("benchmarks.scale", "throughput with simulated engines (15 minutes)", BEHIND_HAPROXY),
    "drafts": Program("benchmarks.drafts", "an engine with drafted tokens and without"),
    "swap": Program("benchmarks.weight_swap", "how long a push of weights stops generation"),
    "gpu": Program(
        "benchmarks.gpu_check", "the check of a machine with a GPU, which `make gpu-check` runs (15 minutes)"
    ),
}

if __name__ == "__main__":
    sys.exit(run_program("benchmarks", PROGRAMS, sys.argv[1:]))
