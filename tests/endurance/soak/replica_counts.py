"""What runs inside of the replicas, which nobody sees from outside: tasks of asyncio, generations, rollouts, steps."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from tests.endurance.replica_actors import done_in, event_loop_of, instance_of, replica_actors

ANSWER_TIMEOUT_S = 30.0
Result = TypeVar("Result")
TASKS = "asyncio tasks"
WORK = ("engine requests", "rollouts in flight", "steps")
"""What there is none of when nobody asks for anything."""


def replica_counts() -> dict[str, float]:
    """Sums over all replicas; tasks by deployment, and of the replica that has most of them."""
    counts: Counter[str] = Counter()
    for deployment, found in asked(counted):
        tasks = f"{TASKS} of {deployment}"
        counts[tasks] = max(counts[tasks], found.pop(TASKS))
        counts.update(found)
    return {name: float(count) for name, count in counts.items()}


def tasks_by_name() -> Counter[str]:
    """Tasks of all replicas, by the deployment and the coroutine that they run."""
    return Counter(f"{deployment}: {name}" for deployment, names in asked(task_names) for name in names)


def asked(work: Callable[[Any], Coroutine[Any, Any, Result]]) -> Iterator[tuple[str, Result]]:
    """What `work` returns of each replica, in its event loop; with the deployment."""
    for deployment, actors in replica_actors().items():
        for actor in actors:
            # It may have just died.
            with suppress(RayActorError):
                yield deployment, done_in(actor, partial(in_its_loop, work=work))


def in_its_loop(replica: Any, work: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
    """Runs in the replica's process, and not in the event loop that it asks."""
    asked = asyncio.run_coroutine_threadsafe(work(instance_of(replica)), event_loop_of(replica))
    return asked.result(ANSWER_TIMEOUT_S)


async def task_names(_instance: Any) -> list[str]:
    return [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]


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
