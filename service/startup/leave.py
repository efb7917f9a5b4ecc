"""`python -m service.startup.leave` gives a node of a Ray cluster notice, and returns when its replicas have ended.

For machines that end soon, such as spot machines: Ray starts nothing on the node any more, and Serve moves its replicas
to others. Generations and steps that do not end in time go on there, generations from their last token. It is Ray's
own way of draining a node (`ray drain-node`), which `ray start --block` goes after SIGTERM too, with the refusals and
the end that a termination handler needs.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import ray
import typer
from ray.exceptions import RayError
from rich.console import Console

from deployments.upstream.ray_serve.ray_internals import give_notice, time_of_node
from service.startup.commands import ServiceNotStarted
from service.startup.local_service import require_cluster_token, sentences_for_the_user
from service.startup.reload import ReloadableCluster, connected

POLL_S = 0.5
ANSWER_WITHIN_S = 5.0
HEAD = "node:__internal_head__"
"""The resource by which Ray marks the head."""


def node_to_leave(node_id: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    """The node, if its replicas can go elsewhere.

    Args:
        nodes: as `ray.nodes()` lists them.

    Raises:
        ServiceNotStarted: it is not one of the cluster that lives, is the head, or is the only one.
    """
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    if node_id not in alive:
        raise ServiceNotStarted(f"Node {node_id} is not in the cluster; there are {', '.join(sorted(alive))}.")
    if len(alive) == 1:
        raise ServiceNotStarted("The cluster has no other node: end the service itself, with SIGTERM.")
    if HEAD in alive[node_id]:
        raise ServiceNotStarted(f"Node {node_id} is the head, without which the cluster does not go on.")
    return node_id


def replicas_on(node_id: str, applications: Mapping[str, Any]) -> list[str]:
    """The replicas on the node, by the names of their actors; `applications` as Serve describes them.

    A replica that has not been placed yet has no `node_id`.
    """
    deployments = [each for one in applications.values() for each in one["deployments"].values()]
    replicas = [replica for each in deployments for replica in each["replicas"]]
    return sorted(replica["actor_name"] for replica in replicas if replica.get("node_id") == node_id)


def replicas_left(node_id: str, cluster: ReloadableCluster, within_s: float) -> Iterator[list[str]]:
    """Yields the replicas that are still on the node, twice a second, until there are none or the time is over."""
    until = time.monotonic() + within_s
    while (left := replicas_on(node_id, cluster.applications())) and time.monotonic() < until:
        yield left
        time.sleep(POLL_S)
    yield left


def leave(node_id: str | None, within_s: float, cluster: ReloadableCluster, console: Console) -> None:
    """Gives the node notice, by default that of this process, and returns when its replicas have ended.

    Raises:
        ServiceNotStarted: as `node_to_leave`; Ray refuses or does not answer; or replicas are left after `within_s`.
    """
    own: str = ray.get_runtime_context().get_node_id()
    leaving = node_to_leave(node_id or own, ray.nodes())  # type: ignore[no-untyped-call]
    began = time.monotonic()
    try:
        now_s = time_of_node(leaving, ANSWER_WITHIN_S)
        refusal = give_notice(leaving, now_s + within_s - (time.monotonic() - began), ANSWER_WITHIN_S)
    except RayError as error:
        raise ServiceNotStarted(f"Ray's control service did not take the notice: {error}") from error
    if refusal is not None:
        raise ServiceNotStarted(f"Ray refuses the notice: {refusal}")
    left: list[str] = []
    with console.status("") as status:
        for left in replicas_left(leaving, cluster, within_s):
            status.update(f"{len(left)} replicas leave node {leaving}")
    if left:
        raise ServiceNotStarted(f"After {within_s:g} s there are still on node {leaving}: {', '.join(left)}.")
    console.print(f"Node {leaving} has no replica any more.", soft_wrap=True)


def main(
    within_s: Annotated[float, typer.Option(min=1, help="Seconds until the machine ends.")] = 25.0,
    node: Annotated[str | None, typer.Option(help="Id of the Ray node; by default that of this machine.")] = None,
) -> None:
    """Move what runs on this node of a Ray cluster to others, before its machine ends. It cannot be taken back."""
    console = Console(stderr=True)
    with sentences_for_the_user(console):
        require_cluster_token()
        with connected("auto") as cluster:
            leave(node, within_s, cluster, console)


if __name__ == "__main__":
    typer.run(main)
