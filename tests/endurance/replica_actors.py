"""The replicas of the running service as actors of Ray, in whose processes a benchmark may look at things."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import serve

APPLICATION = "rollout"
ANSWER_TIMEOUT_S = 60.0
Result = TypeVar("Result")


def replica_actors() -> dict[str, list[Any]]:
    """Those that run, by the name of their deployment."""
    client: Any = serve.context._get_global_client()  # noqa: SLF001 - Serve has no public one
    deployments = client.get_serve_details()["applications"][APPLICATION]["deployments"]
    return {
        name: list(living(replica["actor_name"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"))
        for name, deployment in deployments.items()
    }


def living(names: Iterable[str]) -> Iterator[Any]:
    """The actors of these names that have not died, whatever Serve knows of that yet."""
    for name in names:
        with suppress(ValueError):
            yield ray.get_actor(name, namespace="serve")


def done_in(actor: Any, work: Callable[[Any], Result]) -> Result:
    """What `work` returns, which is called in the actor's process with Serve's replica, beside the user's event loop.

    Raises:
        RayActorError: the actor has died.
    """
    return ray.get(actor.__ray_call__.remote(work), timeout=ANSWER_TIMEOUT_S)


def event_loop_of(replica: Any) -> Any:
    """The event loop of our code in the process of Serve's replica."""
    return replica._replica_impl._user_callable_wrapper.event_loop  # noqa: SLF001 - Serve has no public one


def instance_of(replica: Any) -> Any:
    """The object of ours that the replica serves."""
    return replica._replica_impl._user_callable_wrapper._callable  # noqa: SLF001 - Serve has no public one
