"""The request router of the generators: a call goes to the replica that its caller names.

Serve makes one router for each handle, in the process of the caller, who is told by `live_replicas` which there are.
"""

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.rpc.live_replicas import note_replicas


class NamedReplicaRouter(RequestRouter):
    """Takes a call's `session_id` for the unique id of a replica; where that one does not answer, any will do.

    Calls that wait here at the same time must not be made in the context of one request: `RequestRouter` tells them
    apart by the id that they inherit from it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            named = pending_request.metadata.session_id
            home = [replica for replica in candidate_replicas if replica.replica_id.unique_id == named]
            if home:
                return [home, candidate_replicas]
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        note_replicas(self._deployment_id, (replica_id.unique_id for replica_id in self.curr_replicas))


NAMED_REPLICA_ROUTING = RequestRouterConfig(request_router_class=NamedReplicaRouter)  # type: ignore[arg-type]  # mypy reads an overload of the config's
