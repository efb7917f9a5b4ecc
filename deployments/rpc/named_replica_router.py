"""The request router of generators and environments: routes a call to the replica that its caller names.

Serve makes one router for each handle, in the process of the caller. `live_replicas` tells the caller which replicas it
can name.
"""

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.rpc.handle_calls import record_live_replicas


class NamedReplicaRouter(RequestRouter):
    """Routes to the replica whose unique id is the call's `session_id`; to any, if that one takes no calls.

    Calls that wait here concurrently must not be made in the context of the same HTTP request: `RequestRouter` tells
    waiting calls apart by the internal request id that they inherit from it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the preferred group first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            session_id = pending_request.metadata.session_id
            named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == session_id]
            if named:
                return [named, candidate_replicas]
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._record_live_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._record_live_replicas()

    def _record_live_replicas(self) -> None:
        record_live_replicas(self._deployment_id, (name.unique_id for name in self.curr_replicas))


NAMED_REPLICA_ROUTING = RequestRouterConfig(request_router_class=NamedReplicaRouter)  # type: ignore[arg-type]  # mypy reads an overload of the config's
