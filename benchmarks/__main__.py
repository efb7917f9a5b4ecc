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
        "benchmarks.agents", "calls with and without sessions against vLLM's server (15 minutes)", BEHIND_HAPROXY
    ),
    "scale": Program("benchmarks.scale", "throughput with simulated engines (15 minutes)", BEHIND_HAPROXY),
    "observability": Program("benchmarks.observability_cost", "what metrics and tracing cost (10 minutes)"),
    "cancellation": Program("benchmarks.cancellation", "how long work goes on that nobody waits for"),
    "journal": Program("benchmarks.journal", "what an Idempotency-Key costs, with simulated engines"),
    "payload": Program("benchmarks.payload", "a large answer as JSON and as Arrow, from the last token to tensors"),
    "async": Program("benchmarks.async_step", "a step of an asynchronous training, against its two halves alone"),
    "swap": Program("benchmarks.weight_swap", "how long a push of weights stops generation"),
    "rolling": Program("benchmarks.rolling", "throughput while replicas change their weights one by one (20 minutes)"),
    "delta": Program("benchmarks.delta_push", "a push of a 200 MB model of which 1% has changed, against all weights"),
    "precision": Program("benchmarks.precision", "log-probabilities of SmolLM2 against float32 (20 minutes)"),
    "adapters": Program("benchmarks.adapters", "generation with an adapter against that without one, on processors"),
    "code": Program("benchmarks.code_programs", "small programs that the task code judges in a second"),
    "retrieval": Program("benchmarks.retrieval", "searches over 10,000 documents in a second"),
    "tasks": Program("benchmarks.task_steps", "steps of the built-in tasks in their environments alone"),
    "reward-model": Program("benchmarks.reward_model", "what batching gains for a reward model"),
    "gpu": Program(
        "benchmarks.gpu_check", "the check of a machine with a GPU, which `make gpu-check` runs (15 minutes)"
    ),
    "streams": Program("benchmarks.random_streams", "4,096 unseeded rollouts of one prompt: no two are equal"),
}

if __name__ == "__main__":
    sys.exit(run_program("benchmarks", PROGRAMS, sys.argv[1:]))
