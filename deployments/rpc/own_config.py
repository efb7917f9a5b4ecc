"""What a replica reads of the config of its own deployment.

Ray Serve 2.60 tells it nowhere in public: `ReplicaContext` has only the number of replicas (`world_size`), and
`serve.status()` has neither the bounds of autoscaling nor the time for a shutdown. So this reads a private field, which
`ReplicaContext` and Serve's `Replica` both have, and nothing else does: what a newer Ray changes is changed here.
"""

from typing import Any

from ray import serve

FIELD = "_deployment_config"


def most_replicas() -> int:
    """Of this replica's deployment: how many its config asks for; with autoscaling, how many it may ask for at most."""
    context = serve.get_replica_context()
    autoscaling = getattr(context, FIELD).autoscaling_config
    return context.world_size if autoscaling is None else int(autoscaling.max_replicas)


def graceful_shutdown_s(replica: Any) -> float:
    """How long Serve waits for the calls of the replica. Args: `replica` is Serve's own `Replica`."""
    return float(getattr(replica, FIELD).graceful_shutdown_timeout_s)
