"""Rollouts that demand versions of the weights while others become current, and whether their answers keep to it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and the version that was current when it was sent."""

    policy: Mapping[str, int]
    current: int


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
