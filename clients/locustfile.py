"""Load test of `POST /rollout`: single samples and groups, of every task in `TASKS`.

    locust -f clients/locustfile.py --headless -u 16 -r 4 -t 30s --host http://127.0.0.1:8000

A sample with `status: error` is a failure. The exit code is 1 if more than `--max-error-rate` of the requests failed or
none was made, else 0. `ROLLOUT_API_KEY` holds the key where the service asks for one.
"""

import logging
import random
from argparse import ArgumentParser
from typing import Any

import httpx
from locust import HttpUser, constant, events, task
from locust.env import Environment
from locust.runners import MasterRunner

from rollout_client import RolloutClient, RolloutError
from rollout_client.api_key import key_headers

logger = logging.getLogger(__name__)

DEFAULT_HOST = "http://127.0.0.1:8000"
TASKS = ("math", "sliding_puzzle")
SAMPLES_PER_TASK = 64
GROUP_SIZE = 8
MAX_NEW_TOKENS = 32
MAX_ROLLOUT_TURNS = 4
"""Puzzles that the model cannot solve must not turn the load test into a test of patience."""
SEEDS = 2**63


class Trainer(HttpUser):
    """Posts one request after the other, without pause."""

    host = DEFAULT_HOST
    wait_time = constant(0)
    samples: list[dict[str, Any]] = []  # noqa: RUF012 - one pool for all users, filled when the test starts

    def on_start(self) -> None:
        self.client.headers.update(key_headers(None, httpx.URL(self.host or DEFAULT_HOST)))

    @task(3)
    def single(self) -> None:
        self.roll_out("POST /rollout, one sample", num_generations=1)

    @task(1)
    def group(self) -> None:
        self.roll_out(f"POST /rollout, group of {GROUP_SIZE}", num_generations=GROUP_SIZE)

    def roll_out(self, name: str, num_generations: int) -> None:
        body = {
            "samples": [random.choice(self.samples)],
            "num_generations": num_generations,
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS, "seed": random.randrange(SEEDS)},
            "max_rollout_turns": MAX_ROLLOUT_TURNS,
        }
        with self.client.post("/rollout", json=body, name=name, catch_response=True) as response:
            if failure := failure_of(response, num_generations):
                response.failure(failure)


def failure_of(response: Any, expected: int) -> str | None:
    """Why `response` is not the `expected` number of rollouts without error; `None` if it is."""
    if response.status_code != 200:
        return f"status {response.status_code}: {(response.text or str(response.error))[:300]}"
    try:
        samples = response.json()["samples"]
        errors = [sample["error"] for sample in samples if sample["status"] == "error"]
    except (ValueError, LookupError, TypeError):
        return "the answer is not a RolloutResponse"
    if errors:
        return (
            f"{len(errors)} of {expected} rollouts failed, the first with {errors[0]['kind']}: {errors[0]['message']}"
        )
    return None if len(samples) == expected else f"{len(samples)} rollouts instead of {expected}"


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--max-error-rate", type=float, default=0.01, help="Share of failed requests above which the exit code is 1"
    )


@events.test_start.add_listener
def fetch_samples(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, MasterRunner):
        return
    seed = random.randrange(2**31)
    try:
        with RolloutClient(environment.host or DEFAULT_HOST, retries=3) as client:
            samples = [sample for name in TASKS for sample in client.example_samples(name, SAMPLES_PER_TASK, seed)]
    except RolloutError as error:
        # `runner.quit()` would leave locust running until its run time is over.
        raise SystemExit(f"No samples, no test: {error}") from error
    Trainer.samples = [sample.model_dump(mode="json", exclude_none=True) for sample in samples]


@events.quitting.add_listener
def decide_exit_code(environment: Environment, **_: Any) -> None:
    total = environment.stats.total
    options = environment.parsed_options
    allowed = options.max_error_rate if options is not None else 0.0
    if total.num_requests == 0:
        logger.error("No request was made.")
        environment.process_exit_code = 1
    elif total.fail_ratio > allowed:
        logger.error("%.2f%% of the requests failed; %.2f%% are allowed.", 100 * total.fail_ratio, 100 * allowed)
        environment.process_exit_code = 1
    else:
        environment.process_exit_code = 0
