"""How many cores Ray has reserved for this replica."""

import math


def assigned_cores() -> int:
    """The `num_cpus` of the replica, rounded up to whole cores and at least 1; 1 outside of a replica."""
    # Worker processes are forked from a process that has imported the environment's module: they need no Ray.
    import ray

    if not ray.is_initialized():
        return 1
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return 1
    resources: dict[str, float] = context.get_assigned_resources()  # type: ignore[no-untyped-call]
    return max(1, math.ceil(resources.get("CPU", 0.0)))
