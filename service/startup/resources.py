"""Resources that the deployments of a config ask of Ray, and those of this machine."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.schema import DeploymentSchema

TOLERANCE = 1e-6
"""Amounts are sums of fractions of a core."""
HINT = (
    "Give a deployment less in its entry under `deployments`, such as `ray_actor_options: {num_cpus: 0.1}`, and the "
    "generator by `engine.num_cpus` and `engine.device`: a reservation is not a limit: a replica may use more."
)


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that one deployment asks for when it starts."""

    deployment: str
    replicas: int
    resources: Mapping[str, float]
    """Amounts for one replica, by Ray's names: CPU, GPU, memory in bytes, ..."""


def demand_of(name: str, entry: DeploymentSchema | None, default_options: Mapping[str, float]) -> Demand:
    """Demand of a deployment with this `entry` in the config, or with `default_options` where that does not say."""
    given = {} if entry is None else entry.model_dump(exclude_unset=True)
    options: Mapping[str, Any] = given.get("ray_actor_options") or default_options
    if bundles := given.get("placement_group_bundles"):
        return Demand(name, replicas_at_start(given), sum_of(bundles))
    # A whole core is Serve's own default.
    resources = {"CPU": options.get("num_cpus", 1.0), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    resources |= options.get("resources") or {}
    return Demand(
        name, replicas_at_start(given), {resource: amount for resource, amount in resources.items() if amount}
    )


def replicas_at_start(entry: Mapping[str, Any]) -> int:
    autoscaling = entry.get("autoscaling_config")
    if autoscaling:
        initial: int | None = autoscaling.get("initial_replicas")
        minimum: int = autoscaling.get("min_replicas", 1)
        return minimum if initial is None else initial
    replicas = entry.get("num_replicas")
    return replicas if isinstance(replicas, int) else 1


def missing_resources(demands: Iterable[Demand], machine: Mapping[str, float]) -> str | None:
    """A text that says what is asked for in vain, by which deployments, and what to change; None if all of it fits."""
    demands = list(demands)
    asked = sum_of({name: amount * demand.replicas for name, amount in demand.resources.items()} for demand in demands)
    missing = [name for name, amount in asked.items() if amount > machine.get(name, 0) + TOLERANCE]
    if not missing:
        return None
    totals = " and ".join(f"{asked[name]:g} {name} of {machine.get(name, 0):g}" for name in missing)
    lines = [f"The deployments ask for more than this machine has: {totals}."]
    for demand in demands:
        amounts = [f"{demand.resources[name]:g} {name}" for name in missing if demand.resources.get(name)]
        if amounts and demand.replicas:
            plural = "replica" if demand.replicas == 1 else "replicas"
            lines.append(f"  {demand.deployment}: {demand.replicas} {plural} with {' and '.join(amounts)} each")
    return "\n".join([*lines, HINT])


def sum_of(amounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for some in amounts:
        for name, amount in some.items():
            total[name] += amount
    return dict(total)
