"""The calls of one generator replica. Server half: `deployments/generation/generator_replica_base.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost
from deployments.protocols.generation import Generation, GenerationRequest, GenerationResults
from deployments.protocols.model_server import ServedParts, ServedRequest, ServedTokens
from deployments.rpc.batching import BatchResults
from deployments.rpc.message_size import bytes_of_generation_request, bytes_of_served_request
from service.remote.batching import ControlCalls, RequestBatcher
from service.remote.replica_watch import ReplicaWatch

GENERATOR_REPLICA = "The generator replica"
LOST_AFTER_HEARTBEATS = 10
"""A replica's event loop can stall for seconds, while it reads weights or compiles; a hung one stalls for ever."""


@dataclass(frozen=True, slots=True)
class ReplicaCalls:
    """The calls of one replica, batched."""

    generate: RequestBatcher[GenerationRequest, Generation]
    serve: RequestBatcher[ServedRequest, ServedTokens]
    interrupt: ControlCalls[GenerationRequest]


def calls_of(
    handle: DeploymentHandle[Any],
    replica: str,
    caller: str,
    results_of: Callable[[GenerationResults], BatchResults[Generation]],
    ends_of: Callable[[ServedParts], BatchResults[ServedTokens]],
    waiting: Callable[[], int],
    silence: ReplicaWatch | None = None,
) -> ReplicaCalls:
    """Args:
    replica: its unique id; empty for whichever replica Serve chooses.
    caller: names this ingress replica.
    results_of: is given each item of each answer to generations and returns its results.
    ends_of: the same of calls of model servers' APIs.
    waiting: how many generations wait here for the replica.
    silence: of the calls that name the replica; a new one, if none of them is open yet.
    """
    silence = silence or ReplicaWatch(LOST_AFTER_HEARTBEATS)
    named = handle.options(session_id=replica)
    log_fields = {"replica_id": replica or None}
    streaming = named.options(stream=True)

    def control(call: Callable[[list[str]], Any], done: str) -> ControlCalls[Any]:
        return ControlCalls(
            lambda requests: call([request.generation_id for request in requests]),
            done,
            GenerationLost,
            GENERATOR_REPLICA,
            log_fields,
        )

    abort = control(named.abort.remote, "aborted")

    def batched(start: Callable[..., Any], results_of: Callable[[Any], Any], bytes_of: Callable[[Any], int]) -> Any:
        return RequestBatcher(
            lambda requests: start(requests, caller, waiting(), replica),
            GenerationLost,
            GENERATOR_REPLICA,
            abort=abort,
            results_of=results_of,
            bytes_of=bytes_of,
            log_fields=log_fields,
            silence=silence,
        )

    return ReplicaCalls(
        batched(streaming.generate.remote, results_of, bytes_of_generation_request),
        batched(streaming.serve.remote, ends_of, bytes_of_served_request),
        control(named.interrupt.remote, "interrupted"),
    )
