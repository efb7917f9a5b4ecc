"""Throughput while eight simulated engines change their weights, one by one or together: `make bench-rolling`.

An engine is as fast as one of a large model: it reads a pushed version for `STAGE_S` seconds while it generates, and
replaces its weights within `SWAP_S` seconds, in which it generates nothing. Callers post one rollout after the other,
more than the engines hold. Tokens a second during a push are held against those before.

Then versions follow one another at once, `--updates` with each activation, on quick engines, while callers demand the
newest version, the next one, an exact one, or at most so much staleness. Each answer is checked: no rollout is lost,
each token has one span, and no version is one that the request refuses or that was overtaken before it was sent. The
last line is JSON; the exit code is 1 if an answer is wrong, or rolling keeps less than `LEAST_SHARE`.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import aiohttp
import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from benchmarks.process_group import no_process_left
from benchmarks.reporting import finish
from benchmarks.scale_service import measured, with_timing
from service.startup.config import read_config
from service.startup.local_service import sentences_for_the_user

Activation = Literal["rolling", "together"]
REPLICAS, SEQUENCES = 8, 32
STAGE_S, SWAP_S = 10.0, 5.0
LARGE: dict[str, float] = {
    "time_to_first_token_s": 0.2,
    "time_per_token_s": 0.1,
    "max_num_seqs": SEQUENCES,
    "length_spread": 0.5,
    "stage_s": STAGE_S,
    "swap_s": SWAP_S,
}
QUICK = LARGE | {"time_to_first_token_s": 0.02, "time_per_token_s": 0.01, "stage_s": 0.0, "swap_s": 0.02}
CALLERS = REPLICAS * SEQUENCES * 3 // 2
"""So many that the engines of the others stay full while one stands still with what waits for it."""
QUICK_CALLERS = 48
NEW_TOKENS = 64
SETTLE_S, BEFORE_S = 15.0, 30.0
LEAST_SHARE = 0.8
ROLLED_BACK_TO = 0
"""Each push is one of version 0 again, under a new number: what is measured does not depend on the bytes."""
HTTP_OK, HTTP_CONFLICT = 200, 409
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and the version that was current when it was sent."""

    policy: Mapping[str, int]
    current: int


@dataclass(slots=True)
class Answers:
    """What has come back so far."""

    current: int = 0
    pushed: int = 0
    """The newest version that was begun to be pushed."""
    tokens_at: list[tuple[float, int]] = field(default_factory=list)
    """When a rollout came back, and its generated tokens."""
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def tokens_per_s(self, began: float, ended: float) -> float:
        return sum(tokens for at, tokens in self.tokens_at if began <= at < ended) / (ended - began)

    def check(self, asked: Asked, status: int, answer: Mapping[str, Any]) -> None:
        """Records an answer, and what is wrong with it."""
        if status != HTTP_OK:
            # Another version than the exact one became current before the request began.
            is_right = status == HTTP_CONFLICT and "version" in asked.policy
            self.outcomes["conflict"] += 1
            if not is_right:
                self.problems.append(f"{asked}: {status} {str(answer)[:300]}")
            return
        [sample] = answer["samples"]
        self.outcomes[sample["status"]] += 1
        generated = [message for message in sample["message_log"] if message["role"] == "assistant"]
        self.tokens_at.append((perf_counter(), sum(len(message["token_ids"]) for message in generated)))
        self.problems += [
            f"{asked}: {problem}: {str(sample)[:600]}" for problem in problems_of(asked, sample, self.pushed)
        ]


def problems_of(asked: Asked, sample: Mapping[str, Any], pushed: int) -> list[str]:
    """What is wrong with a rollout, of which one turn was to be played."""
    problems = []
    allowed = {"max_turns", "truncated", "completed"}
    if "version" in asked.policy and (sample.get("error") or {}).get("kind") == "policy":
        allowed.add("error")
    if "max_staleness" in asked.policy:
        allowed.add("stale")
    if sample["status"] not in allowed:
        problems.append(f"it ended as {sample['status']}")
    for message in sample["message_log"]:
        spans = message.get("weight_versions") or []
        if message["role"] != "assistant":
            continue
        edges = [0, *(span["end"] for span in spans)]
        if [span["start"] for span in spans] != edges[:-1] or edges[-1] != len(message["token_ids"]):
            problems.append("its spans are not its tokens")
        versions = [int(span["version"]) for span in spans]
        if versions != sorted(set(versions)):
            problems.append("its versions go back")
        least = max(asked.current, asked.policy.get("min_version", 0), asked.policy.get("version", 0))
        most = asked.policy.get("version", pushed)
        if any(not least <= version <= most for version in versions):
            problems.append(f"it has versions outside of {least} to {most}")
    return problems


def policy_for(drawn: random.Random, current: int) -> dict[str, int]:
    return drawn.choice(
        [{}, {"min_version": current}, {"min_version": current + 1}, {"version": current}, {"max_staleness": 1}]
    )


async def call(session: aiohttp.ClientSession, answers: Answers, drawn: random.Random, is_choosy: bool) -> None:
    """Posts one rollout after the other, until it is cancelled."""
    while True:
        current = answers.current
        asked = Asked(policy_for(drawn, current) if is_choosy else {}, current)
        body = {
            "samples": [
                {
                    "task_name": "three_tokens",
                    "messages": [{"role": "user", "content": f"Say something about {drawn.random()}."}],
                }
            ],
            "sampling": {"max_new_tokens": NEW_TOKENS},
            "max_rollout_turns": 1,
            "observation_format": "raw",
            "policy": asked.policy,
        }
        async with session.post("/rollout", json=body) as response:
            answers.check(asked, response.status, await response.json())


async def push(session: aiohttp.ClientSession, answers: Answers) -> None:
    """Makes another version current. Raises `RuntimeError` if it is refused."""
    answers.pushed = answers.current + 1
    async with session.post("/policy/rollback", json={"to": ROLLED_BACK_TO, "version": answers.pushed}) as response:
        update = await response.json()
        if response.status != HTTP_OK or any(each["status"] != "swapped" for each in update["replicas"]):
            raise RuntimeError(f"The push failed: {response.status} {str(update)[:600]}")
    answers.current = answers.pushed


async def under_load(
    session: aiohttp.ClientSession,
    callers: int,
    is_choosy: bool,
    measure: Callable[[aiohttp.ClientSession, Answers], Any],
) -> tuple[Any, Answers]:
    answers = Answers()
    calling = [asyncio.create_task(call(session, answers, random.Random(seed), is_choosy)) for seed in range(callers)]
    measuring = asyncio.create_task(measure(session, answers))
    try:
        # A caller ends only when it fails.
        done, _ = await asyncio.wait([measuring, *calling], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {measuring}:
            task.result()
        return await measuring, answers
    finally:
        for task in (measuring, *calling):
            task.cancel()
        await asyncio.gather(measuring, *calling, return_exceptions=True)


async def share_of_throughput(session: aiohttp.ClientSession, answers: Answers) -> dict[str, float]:
    """Tokens a second in a push over those before: in all of it, and once the replicas have read the weights."""
    await asyncio.sleep(SETTLE_S + BEFORE_S)
    began = perf_counter()
    await push(session, answers)
    ended = perf_counter()
    before = answers.tokens_per_s(began - BEFORE_S, began)
    return {
        "tokens_per_s_before": round(before, 1),
        "push_s": round(ended - began, 1),
        "share_in_push": round(answers.tokens_per_s(began, ended) / before, 3),
        "share_in_activation": round(answers.tokens_per_s(began + STAGE_S, ended) / before, 3),
    }


async def push_repeatedly(session: aiohttp.ClientSession, answers: Answers, updates: int) -> float:
    """The median of the seconds of a push."""
    seconds = []
    for _ in range(updates):
        began = perf_counter()
        await push(session, answers)
        seconds.append(perf_counter() - began)
    return median(seconds)


def with_activation(
    settings: ServeDeploySchema, activation: Activation, timing: Mapping[str, float]
) -> ServeDeploySchema:
    changed = with_timing(settings, timing, REPLICAS)
    changed.applications[0].args["policy"] = {"activation": activation}
    return changed


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.scale.yaml"),
    updates: Annotated[int, typer.Option(min=0, help="Versions with each activation, under load.")] = 200,
) -> None:
    settings = read_config(config)
    figures: dict[str, Any] = {"replicas": REPLICAS, "updates": updates}
    problems: list[str] = []
    with sentences_for_the_user(console), no_process_left():
        for activation in ("rolling", "together"):
            large = with_activation(settings, activation, LARGE)
            measure = partial(under_load, callers=CALLERS, is_choosy=False, measure=share_of_throughput)
            with console.status(f"A push of a large model, {activation}"):
                share, answers = measured(large, measure, console)
            figures[activation] = share
            problems += answers.problems
            if updates:
                quick = with_activation(settings, activation, QUICK)
                follow = partial(push_repeatedly, updates=updates)
                with console.status(f"{updates} versions, {activation}"):
                    push_s, answers = measured(
                        quick, partial(under_load, callers=QUICK_CALLERS, is_choosy=True, measure=follow), console
                    )
                figures[activation] |= {"median_push_s": round(push_s, 3), "answers": dict(answers.outcomes)}
                problems += answers.problems
    kept = figures["rolling"]["share_in_activation"]
    if kept < LEAST_SHARE:
        problems.append(f"Rolling keeps {kept} of the throughput, and at least {LEAST_SHARE} is asked for.")
    finish(console, problems, figures)


if __name__ == "__main__":
    typer.run(main)
