"""The cost of what `include` adds to the tokens: the second part of `make bench-payload`.

The service runs with one simulated engine of `serve_config.scale.yaml`, which gives the experts of a mixture of 48
layers with 8 experts a token. A request plays 256 rollouts of up to 1,024 tokens at 50 tokens a second each; rounds
without and with experts in an Arrow answer alternate. The bytes a token of each `include` are of smaller answers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.scale_service import with_timing
from rollout_client import RolloutClient
from rollout_client.arrow.schema import ARROW
from service.rollout_requests.result_encoding import JSON
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service

ROLLOUTS, TOKENS, SPREAD = 256, 1024, 0.5
ENGINE = {"routed_experts": [48, 8], "max_num_seqs": ROLLOUTS, "length_spread": SPREAD}
SAMPLE = {"task_name": "three_tokens", "messages": [{"role": "user", "content": "?"}]}
SAMPLING = {"top_k": 20, "max_new_tokens": TOKENS, "seed": 0}
INCLUDED: Sequence[Sequence[str]] = ((), ("entropy",), ("top_logprobs:8",), ("sampling_mask",), ("routed_experts",))
COUNTED = 4
"""Rollouts of an answer whose bytes are counted."""


def measure(rounds: int, console: Console) -> dict[str, Any]:
    """The figures: bytes a token by what is included, and tokens a second with experts as a ratio of those without."""
    settings = with_timing(read_config(Path("serve_config.scale.yaml")), ENGINE, replicas=1)
    settings.http_options.port = free_port()
    with local_service(settings, console) as url, RolloutClient(url) as client:
        sizes = {" ".join(include): bytes_a_token(url, include) for include in INCLUDED}
        speeds: dict[str, list[float]] = {"": [], "routed_experts": []}
        for _ in track(range(rounds), "Playing with and without routed experts", console=console):
            for include, measured in speeds.items():
                measured.append(tokens_a_second(client, include))
    without, with_experts = map(median, speeds.values())
    report(sizes, without, with_experts, console)
    return {
        "included_bytes_per_token": sizes,
        "tokens_per_s": round(without),
        "tokens_per_s_with_routed_experts": round(with_experts),
        "with_routed_experts": round(with_experts / without, 3),
    }


def tokens_a_second(client: RolloutClient, include: str) -> float:
    began = monotonic()
    response = client.rollout_arrow(
        [SAMPLE],
        num_generations=ROLLOUTS,
        max_rollout_turns=1,
        sampling=SAMPLING,
        include=[include] if include else None,
    )
    return float(response.metrics["total_generated_tokens"]) / (monotonic() - began)  # type: ignore[arg-type]


def bytes_a_token(url: str, include: Sequence[str]) -> dict[str, float]:
    body = {
        "samples": [SAMPLE],
        "num_generations": COUNTED,
        "max_rollout_turns": 1,
        "sampling": SAMPLING,
        "include": include,
    }
    answers = {}
    for name, accept in (("json", JSON), ("arrow", ARROW)):
        answer = httpx.post(f"{url}/rollout", json=body, headers={"accept": accept}, timeout=None)
        answers[name] = answer.raise_for_status()
    tokens = answers["json"].json()["metrics"]["total_generated_tokens"]
    return {name: round(len(answer.content) / tokens, 1) for name, answer in answers.items()}


def report(sizes: Mapping[str, Mapping[str, float]], without: float, with_experts: float, console: Console) -> None:
    table = Table("include", "JSON", "Arrow", title="Bytes a token, its id and log-probability among them")
    for include, of_answers in sizes.items():
        table.add_row(include or "nothing", f"{of_answers['json']:.1f}", f"{of_answers['arrow']:.1f}")
    console.print(table)
    console.print(f"{without:,.0f} tokens a second, {with_experts:,.0f} with routed experts")
