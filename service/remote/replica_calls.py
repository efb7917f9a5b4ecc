"""The calls of one generator replica, batched: generations, calls of model servers' APIs, interruptions, aborts."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost
from deployments.protocols.generation import Generation, GenerationRequest, GenerationResults
from deployments.protocols.model_server import ServedPart, ServedParts, ServedRequest, ServedTokens
from deployments.rpc.batching import BatchResults, CallBatcher, bytes_of_generation_request, bytes_of_served_request
from service.remote.replica_stream import ReplicaStream, ReplicaWatch, control_calls

GENERATOR_REPLICA = "The generator replica"


class ReplicaCalls:
    """The calls of one replica, batched."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        replica: str,
        caller: str,
        results_of: Callable[[GenerationResults], BatchResults[Generation]],
        ends_of: Callable[[ServedParts], BatchResults[ServedTokens]],
        waiting: Callable[[], int],
        silence: ReplicaWatch,
    ) -> None:
        """Makes no call yet.

        Args:
            replica: its unique id; empty for whichever replica Serve chooses.
            caller: names this ingress replica.
            results_of: called with each item of each answer to generations; returns its results.
            ends_of: the same for calls of model servers' APIs.
            waiting: the number of generations that wait here for the replica.
            silence: the watch of all calls that name the replica.
        """
        named = handle.options(session_id=replica)
        streaming = named.options(stream=True)
        log_fields = {"replica_id": replica or None}

        def control(call: Callable[[list[str]], Any], done: str) -> CallBatcher[Any, None]:
            def start(requests: list[GenerationRequest]) -> Any:
                return call([request.generation_id for request in requests])

            return control_calls(start, done, GenerationLost, GENERATOR_REPLICA, log_fields)

        def stream(start: Callable[..., Any], results_of: Callable[[Any], Any]) -> ReplicaStream[Any, Any]:
            def start_call(requests: list[Any]) -> Any:
                return start(requests, caller, waiting(), replica)

            return ReplicaStream(start_call, GenerationLost, GENERATOR_REPLICA, log_fields, results_of, silence)

        abort = control(named.abort.remote, "aborted")
        self.interrupt: CallBatcher[GenerationRequest, None] = control(named.interrupt.remote, "interrupted")
        self.generate: CallBatcher[GenerationRequest, Generation] = stream(
            streaming.generate.remote, results_of
        ).batched(bytes_of_generation_request, abort)
        self.serve: CallBatcher[ServedRequest, ServedTokens] = stream(streaming.serve.remote, ends_of).batched(
            bytes_of_served_request, abort
        )


def note_end(parts: "asyncio.Queue[ServedPart | None]", answering: "asyncio.Task[ServedTokens]") -> None:
    parts.put_nowait(None)
    if not answering.cancelled():
        # A caller that has left does not retrieve the failure; asyncio would log that.
        answering.exception()
