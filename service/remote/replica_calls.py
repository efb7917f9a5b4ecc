"""The calls of one generator replica. Server half: `deployments/rpc/generator_replica_base.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost
from deployments.protocols import Generation, GenerationRequest, GenerationResults
from deployments.rpc.batching import BatchResults
from deployments.rpc.message_size import bytes_of_generation_request
from service.remote.batching import ControlCalls, RequestBatcher

GENERATOR_REPLICA = "The generator replica"
LOST_AFTER_HEARTBEATS = 10
"""A replica's event loop can stall for seconds, while it reads weights or compiles; a hung one stalls for ever."""


@dataclass(frozen=True, slots=True)
class ReplicaCalls:
    """The calls of one replica, batched."""

    generate: RequestBatcher[GenerationRequest, Generation]
    interrupt: ControlCalls[GenerationRequest]


def calls_of(
    handle: DeploymentHandle[Any],
    replica: str,
    caller: str,
    results_of: Callable[[GenerationResults], BatchResults[Generation]],
    waiting: Callable[[], int],
) -> ReplicaCalls:
    """Args:
    replica: its unique id; empty for whichever replica Serve chooses.
    caller: names this ingress replica.
    results_of: is given each item of each answer and returns its results.
    waiting: how many generations wait here for the replica.
    """
    named = handle.options(session_id=replica)
    log_fields = {"replica_id": replica or None}
    start_call = named.options(stream=True).generate.remote

    def control(call: Callable[[list[str]], Any], done: str) -> ControlCalls[GenerationRequest]:
        return ControlCalls(
            lambda requests: call([request.generation_id for request in requests]),
            done,
            GenerationLost,
            GENERATOR_REPLICA,
            log_fields,
        )

    return ReplicaCalls(
        RequestBatcher(
            lambda requests: start_call(requests, caller, waiting()),
            GenerationLost,
            GENERATOR_REPLICA,
            abort=control(named.abort.remote, "aborted"),
            log_fields=log_fields,
            results_of=results_of,
            lost_after_heartbeats=LOST_AFTER_HEARTBEATS,
            bytes_of=bytes_of_generation_request,
        ),
        control(named.interrupt.remote, "interrupted"),
    )
