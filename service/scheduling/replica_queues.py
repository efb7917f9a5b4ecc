"""The generations that wait for each replica, and which of them is next there. A state machine: no I/O, no clock.

Next is a generation of the flow with the lowest virtual time (`fair_queue.py`) among those whose policy may start there
(`adapter_turns.py`). A flow whose policy may not start falls behind those that go on; when it is behind by more than a
turn, the turn of the policy that would go on ends.
"""

from collections.abc import Iterator

from service.admission.adapter_turns import AdapterTurns
from service.admission.scheduled_generation import ScheduledGeneration
from service.scheduling.fair_queue import FairQueue, Flow

Lane = tuple[str, str | None]
"""A replica and the policy that its generations name."""


class ReplicaQueues(FairQueue[ScheduledGeneration, Lane]):
    """One lane for each replica and policy."""

    def __init__(self) -> None:
        super().__init__()
        self._policies: dict[str, dict[str | None, int]] = {}
        """By replica, how many sequences of each policy wait there."""

    def wait(self, generation: ScheduledGeneration, replica: str, rank: int) -> None:
        policy = generation.request.policy
        of_request = generation.of_request
        self.add(generation, (replica, policy), of_request.flow, rank, of_request.part)
        policies = self._policies.setdefault(replica, {})
        policies[policy] = policies.get(policy, 0) + generation.sequences

    def remove(self, item: ScheduledGeneration) -> None:
        """Takes out a generation that does not start where it waits. Raises `KeyError` if it does not wait."""
        replica, policy = self.lane_of(item)
        super().remove(item)
        policies = self._policies[replica]
        policies[policy] -= item.sequences
        if not policies[policy]:
            del policies[policy]
        if not policies:
            del self._policies[replica]

    def size_at(self, replica: str) -> int:
        """How many sequences wait for the replica: the choices of a call each count."""
        return sum(self._policies[replica].values()) if replica in self._policies else 0

    def items_at(self, replica: str) -> list[ScheduledGeneration]:
        """All that wait for the replica, the oldest first within each policy."""
        return [item for policy in self._policies.get(replica, ()) for item in self.items_of((replica, policy))]

    def next_at(self, replica: str, turns: AdapterTurns, turn: float) -> ScheduledGeneration | None:
        """The generation that is next on the replica; `None` if none waits there that may start.

        Args:
            turn: how far others may get ahead of a flow whose policy may not start, in virtual time at weight 1.
        """
        policies = self._policies.get(replica)
        if policies is None:
            return None
        if policies.keys() == {None} and not turns.needs_turn(None):
            return self.first_of((replica, None))
        may_start = [policy for policy in policies if turns.may_start(policy)]
        for policy in sorted(may_start, key=lambda policy: self.first_flow_of((replica, policy)).virtual_time):
            flow = self.first_flow_of((replica, policy))
            if not self._turn_is_over(replica, policy, flow.virtual_time, turns, turn):
                return self.first_of((replica, policy))
            turns.end_turn(policy)
        return None

    def may_overtake(self, generation: ScheduledGeneration, replica: str, turns: AdapterTurns, turn: float) -> bool:
        """Whether a generation may start although others wait for the replica: none of those may. Args: as `next_at`.

        It may end the turn of the generation's policy.
        """
        policy, flow = generation.request.policy, generation.of_request.flow
        policies = self._policies.get(replica)
        if not turns.may_start(policy):
            return False
        if policies is None and not turns.needs_turn(policy):
            return True
        if any(turns.may_start(waiting) for waiting in policies or ()):
            return False
        if self._turn_is_over(replica, policy, max(flow.virtual_time, self.virtual_time), turns, turn):
            turns.end_turn(policy)
            return False
        return True

    def _turn_is_over(
        self, replica: str, policy: str | None, virtual_time: float, turns: AdapterTurns, turn: float
    ) -> bool:
        """Whether another policy, which may not start, has waited for more than a turn, here or in another ingress."""
        if not turns.needs_turn(policy):
            return False
        if turns.passes_over_others(policy, turn):
            return True
        if turns.may_start_without_end_of(policy):
            return False
        behind = [
            flow for flow in self._blocked(replica, turns) if virtual_time - flow.virtual_time > turn / flow.weight
        ]
        return len(behind) > turns.ending

    def _blocked(self, replica: str, turns: AdapterTurns) -> Iterator[Flow[ScheduledGeneration, Lane]]:
        """The first flow of each policy that may not start."""
        for policy in self._policies.get(replica, ()):
            if not turns.may_start(policy):
                yield self.first_flow_of((replica, policy))
