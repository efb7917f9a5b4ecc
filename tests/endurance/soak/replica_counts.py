"""What runs inside of the replicas, which nobody sees from outside: tasks of asyncio, generations, rollouts, steps."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError

from tests.endurance.replica_actors import done_in, event_loop_of, instance_of, replica_actors

ANSWER_TIMEOUT_S = 30.0
TASKS = "asyncio tasks"
WORK = ("engine requests", "rollouts in flight", "steps")
"""What there is none of when nobody asks for anything."""


def replica_counts() -> dict[str, float]:
    """Sums over all replicas; tasks by deployment, and of the replica that has most of them."""
    counts: Counter[str] = Counter()
    for deployment, actors in replica_actors().items():
        tasks = f"{TASKS} of {deployment}"
        for actor in actors:
            # It may have just died.
            with suppress(RayActorError):
                found = done_in(actor, counted_in_its_loop)
                counts[tasks] = max(counts[tasks], found.pop(TASKS))
                counts.update(found)
    return {name: float(count) for name, count in counts.items()}


def counted_in_its_loop(replica: Any) -> dict[str, int]:
    """Runs in the replica's process, and not in the event loop that it asks."""
    asked = asyncio.run_coroutine_threadsafe(counted(instance_of(replica)), event_loop_of(replica))
    return asked.result(ANSWER_TIMEOUT_S)


async def counted(instance: Any) -> dict[str, int]:
    """Of one of our deployments."""
    counts = {TASKS: len(asyncio.all_tasks()) - 1}
    if (engine := getattr(instance, "_engine", None)) is not None:
        counts["engine requests"] = engine.load().ongoing_generations
    if (services := getattr(instance, "_services", None)) is not None:
        counts["rollouts in flight"] = services.rollouts.admission.in_flight.rollouts
    if (steps := getattr(instance, "_steps", None)) is not None:
        counts["steps"] = steps.in_progress
    return counts


def most_of(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, the most that any look has found."""
    return {name: max(look.get(name, 0.0) for look in looks) for look in looks for name in look}


def left_over(idle: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What still runs although nothing is asked for: all work, and more tasks than the `idle` service had before."""
    work = {name: now[name] for name in WORK if now.get(name)}
    tasks = {name: count - idle[name] for name, count in now.items() if name.startswith(TASKS) and name in idle}
    return work | {name: count for name, count in tasks.items() if count > 0}
