"""The requests that a scheduler has generations of: where their rollouts are, how long they get. No I/O, no Ray."""

import random
from collections.abc import Collection

from deployments.protocols.generation import GenerationRequest, RequestShare, ScoringRequest
from service.scheduling.replica_affinity import Assignment, ReplicaAffinity
from service.scheduling.replica_queues import ReplicaQueues, RequestFlow, RequestState, ScheduledGeneration
from service.scheduling.replica_set import ReplicaSet

FIRST_EXPECTED_TOKENS = 1024.0
"""Expected length until the first generations have ended. Too long on purpose: an engine that gets too many
generations runs out of KV cache."""
LEARNING_RATE = 1 / 16
"""Weight of the latest generation in the moving mean of lengths."""
HIGHEST_RANK = 31
"""Later turns have this rank too, because the queue searches the ranks of a request one by one."""


class ScheduledRequests:
    """Requests that share one queue; a request is known until its last rollout is released."""

    def __init__(self, replicas: ReplicaSet, choose: random.Random | None) -> None:
        """Begins without requests; `choose` breaks ties between replicas."""
        self.queue = ReplicaQueues()
        self.affinity = ReplicaAffinity(choose)
        self.mean_tokens = FIRST_EXPECTED_TOKENS
        self._replicas = replicas
        self._requests: dict[str, RequestState] = {}
        """By id."""
        self._request_of: dict[str, RequestState] = {}
        """By rollout."""

    def generation_of(self, request: GenerationRequest) -> ScheduledGeneration:
        """A generation that is assigned to a replica, and neither waits nor has started."""
        of_request = self._request_of.get(request.rollout_id) or self._add_rollout(request)
        return ScheduledGeneration.of(request, of_request, self.assign(request))

    def assign(self, request: GenerationRequest, among: Collection[str] = ()) -> Assignment:
        """The assignment of the generation's rollout: to one of these replicas, or of all that admit the request."""
        return self.affinity.assignment_of(
            request.rollout_id,
            request.group,
            among or self._replicas.admitting(request),
            len(request.prompt_token_ids),
            self._replicas.load_of_others,
        )

    def wait(self, generation: ScheduledGeneration, replica: str) -> None:
        generation.estimate()
        generation.replica = replica
        self.queue.wait(generation, replica, min(generation.request.turn, HIGHEST_RANK))

    def move(self, generation: ScheduledGeneration, replica: str) -> None:
        """Moves a generation that waits to the queue of another replica."""
        self.queue.remove(generation)
        self.affinity.move(generation.request.rollout_id, replica)
        self.wait(generation, replica)

    def learn(self, generation: ScheduledGeneration, new_tokens: int) -> None:
        """Records the length of a generation that has ended."""
        if isinstance(generation.request, ScoringRequest):
            # It generates nothing, and tells nothing about the length of generations.
            return
        of_request, assignment = generation.of_request, generation.assignment
        length = new_tokens / generation.sequences
        of_request.expected_tokens += LEARNING_RATE * (length - of_request.expected_tokens)
        self.mean_tokens += LEARNING_RATE * (length - self.mean_tokens)
        if assignment.replica == generation.replica:
            assignment.cached_tokens = len(generation.request.prompt_token_ids) + round(length)

    def release(self, rollout_id: str) -> None:
        """Forgets a rollout that has no further generation. Ignores unknown ids."""
        self.affinity.release(rollout_id)
        of_request = self._request_of.pop(rollout_id, None)
        if of_request is None:
            return
        of_request.rollouts -= 1
        if not of_request.rollouts:
            self.queue.forget(of_request.flow, of_request.part)
            del self._requests[of_request.id]

    def _add_rollout(self, request: GenerationRequest) -> RequestState:
        share = request.share
        of_request = self._requests.get(share.id)
        if of_request is None:
            flow, part = self._flow_of(share)
            of_request = self._requests[share.id] = RequestState(share.id, flow, part, self.mean_tokens)
        of_request.rollouts += 1
        self._request_of[request.rollout_id] = of_request
        return of_request

    def _flow_of(self, share: RequestShare) -> tuple[RequestFlow, RequestFlow | None]:
        """The flow of a request, and the part of it that the request is."""
        if share.key is None:
            return self.queue.flow(share.id, share.weight), None
        flow = self.queue.flow(f"key {share.key}", share.key_weight)
        return flow, self.queue.part(flow, share.id, share.weight)
