"""Weighted fair queueing: which of the waiting items is next. A state machine: no I/O, no clock, no Ray.

Start-time fair queueing. A flow is the items of one client, here a request; a lane is the items that wait for one
server, here a replica. Each flow has a virtual time, which advances by `cost / weight` with each of its items that
starts. The next item of a lane is one of the flow with the lowest virtual time.

A flow may be divided into parts, such as the requests of one key. It shares with other flows as a whole, and its parts
share what it gets in the same way: more parts get a flow no more service.

Guarantees: each item that was added is returned once or removed; flows that wait in one lane get service in proportion
to their weights, up to one item each; a flow that had nothing to start earns nothing for that time; within a flow the
item of the highest rank is next, and among equal ranks the oldest. Each operation takes O(log n) steps for n flows.

The share of a request is that of its `priority` and its caller's key.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Generic, TypeVar
from uuid import uuid4

from deployments.protocols.generation import RequestShare, ScoringRequest
from rollout_client.contract.base import Priority
from service.access.keys import Caller

WEIGHTS = {"interactive": 16.0, "train": 1.0, "batch": 1 / 16}
"""Weights in proportion to a training request."""
CHECKS = "checks of replicas"
"""Stands for a key in the shares of checks: no key has a name with spaces."""
OTHER = "other"
"""The name for requests whose priority is a number."""


def _weight_of(priority: Priority) -> float:
    return WEIGHTS[priority] if isinstance(priority, str) else float(priority)


def priority_name(weight: float) -> str:
    """The priority that has this weight; `other` if none has."""
    return next((name for name, of_name in WEIGHTS.items() if of_name == weight), OTHER)


def counts_by_priority(by_weight: Mapping[float, int]) -> dict[str, int]:
    """Counts by the name of the priority, with a 0 for a class without any; `other` are numbers."""
    counts = dict.fromkeys([*WEIGHTS, OTHER], 0)
    for weight, waiting in by_weight.items():
        counts[priority_name(weight)] += waiting
    return counts


def as_check(request: ScoringRequest) -> ScoringRequest:
    """The request as a check that the service makes of its own engines; all checks are one party, as `batch`."""
    name = f"{request.rollout_id}-{uuid4().hex[:16]}"
    share = RequestShare(name, WEIGHTS["batch"], CHECKS, WEIGHTS["batch"])
    return replace(request, rollout_id=name, group=name, share=share)


def share_of(unique_id: str, priority: Priority, caller: Caller) -> RequestShare:
    """The share of a request; `unique_id` is unique among all requests."""
    return RequestShare(unique_id, _weight_of(priority), caller.name, caller.weight)


Item = TypeVar("Item", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)
"""The name of a lane."""


@dataclass(slots=True, eq=False)
class Flow(Generic[Item, Name]):
    """Items that share service with other flows as one party."""

    name: str
    weight: float
    virtual_time: float
    """The virtual time of its next item."""
    waiting: "dict[Name, _ItemsInLane[Item]]" = field(default_factory=dict)
    """By lane; only lanes in which items of the flow wait. Those of a divided flow are in its parts."""
    parts: "FairQueue[Item, Name] | None" = None
    """Which of its parts is next, if it is divided. Its parts are the flows of that queue."""


@dataclass(slots=True, eq=False)
class _ItemsInLane(Generic[Item]):
    """The items of one flow in one lane."""

    by_rank: dict[int, "OrderedDict[Item, None]"] = field(default_factory=dict)

    def add(self, item: Item, rank: int) -> None:
        if rank not in self.by_rank:
            self.by_rank[rank] = OrderedDict()
        self.by_rank[rank][item] = None

    def remove(self, item: Item, rank: int) -> None:
        items = self.by_rank[rank]
        del items[item]
        if not items:
            del self.by_rank[rank]

    def first(self) -> Item:
        return next(iter(self.by_rank[max(self.by_rank)]))

    def last(self) -> Item:
        return next(reversed(self.by_rank[min(self.by_rank)]))


@dataclass(slots=True, eq=False)
class _Place(Generic[Item, Name]):
    """The place where an item waits."""

    lane: Name
    flow: Flow[Item, Name]
    part: Flow[Item, Name] | None
    rank: int


@dataclass(slots=True, eq=False)
class _Lane(Generic[Item, Name]):
    """The items that one server can start."""

    flows: list[tuple[float, int, Flow[Item, Name], _ItemsInLane[Item]]] = field(default_factory=list)
    """A heap by virtual time. An entry that is out of date is mended when it reaches the top."""
    size: int = 0
    """Items that wait."""
    outdated: int = 0
    """Entries of `flows` whose flow has left the lane."""

    def drop_outdated(self, name: Name) -> None:
        """Removes outdated entries; `name` is the lane's own."""
        self.flows = [entry for entry in self.flows if entry[2].waiting.get(name) is entry[3]]
        heapq.heapify(self.flows)
        self.outdated = 0


class FairQueue(Generic[Item, Name]):
    """Items that wait in the lanes of servers and in the flows of clients."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        """The virtual time at which a flow begins."""
        self._flows: dict[str, Flow[Item, Name]] = {}
        self._lanes: dict[Name, _Lane[Item, Name]] = {}
        """Only those with waiting items."""
        self._places: dict[Item, _Place[Item, Name]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        """All items that wait, the oldest first."""
        return iter(self._places)

    def flow(self, name: str, weight: float) -> Flow[Item, Name]:
        """The flow of this name. The `weight` (> 0) of one that is known changes to the given one."""
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = Flow(name, weight, self.virtual_time)
        flow.weight = weight
        return flow

    def part(self, flow: Flow[Item, Name], name: str, weight: float) -> Flow[Item, Name]:
        """The part of this name. A flow that has parts has no items beside theirs."""
        flow.parts = flow.parts or FairQueue()
        return flow.parts.flow(name, weight)

    def forget(self, flow: Flow[Item, Name], part: Flow[Item, Name] | None = None) -> None:
        """Drops a flow that has no items, or its `part`.

        A divided flow stays, with its virtual time: it would else begin anew each time that its last part has ended.
        """
        if part is None:
            self._flows.pop(flow.name, None)
        elif flow.parts is not None:
            flow.parts.forget(part)

    def advance(self, virtual_time: float) -> None:
        """Raises the virtual time at which flows begin that have nothing to start until now."""
        self.virtual_time = max(self.virtual_time, virtual_time)

    def charge(self, flow: Flow[Item, Name], cost: float, part: Flow[Item, Name] | None = None) -> float:
        """Advances the flow and its `part` for an item that starts; returns the flow's virtual time of that item."""
        if part is not None and flow.parts is not None:
            flow.parts.advance(flow.parts.charge(part, cost))
        if not flow.waiting and flow.virtual_time < self.virtual_time:
            flow.virtual_time = self.virtual_time
        virtual_time = flow.virtual_time
        flow.virtual_time += cost / flow.weight
        return virtual_time

    def add(
        self, item: Item, lane: Name, flow: Flow[Item, Name], rank: int, part: Flow[Item, Name] | None = None
    ) -> None:
        """Lets an item wait that does not wait yet; `part` is its part of the flow, if that is divided."""
        if not flow.waiting and flow.virtual_time < self.virtual_time:
            flow.virtual_time = self.virtual_time
        in_lane = self._lanes.get(lane)
        if in_lane is None:
            in_lane = self._lanes[lane] = _Lane()
        items = flow.waiting.get(lane)
        if items is None:
            items = flow.waiting[lane] = _ItemsInLane()
            heapq.heappush(in_lane.flows, (flow.virtual_time, next(self._numbers), flow, items))
        if flow.parts is None:
            items.add(item, rank)
        else:
            assert part is not None
            flow.parts.add(item, lane, part, rank)
        in_lane.size += 1
        self._places[item] = _Place(lane, flow, part, rank)

    def start(self, item: Item, cost: float) -> float:
        """Takes out an item that starts and charges its flow; returns the virtual time of the item."""
        place = self._places[item]
        virtual_time = self.charge(place.flow, cost, place.part)
        self.remove(item)
        return virtual_time

    def remove(self, item: Item) -> None:
        """Takes out an item that does not start in its lane. Raises `KeyError` if it does not wait."""
        place = self._places.pop(item)
        name, flow = place.lane, place.flow
        items, lane = flow.waiting[name], self._lanes[name]
        if flow.parts is None:
            items.remove(item, place.rank)
        else:
            flow.parts.remove(item)
        lane.size -= 1
        if not (items.by_rank if flow.parts is None else flow.parts.size_of(name)):
            del flow.waiting[name]
            lane.outdated += 1
        if not lane.size:
            del self._lanes[name]
        elif lane.outdated > len(lane.flows) // 2:
            lane.drop_outdated(name)

    def size_of(self, lane: Name) -> int:
        """The number of items that wait in the lane."""
        in_lane = self._lanes.get(lane)
        return 0 if in_lane is None else in_lane.size

    def longest_lanes(self) -> list[Name]:
        """All lanes in which items wait, that with the most first."""
        return sorted(self._lanes, key=lambda lane: -self._lanes[lane].size)

    def first_of(self, lane: Name, flow: Flow[Item, Name] | None = None) -> Item | None:
        """The item that is next in the lane; `None` if none waits there. Args: `flow` is the one that is next."""
        flow = flow or self._first_flow(lane)
        if flow is None:
            return None
        return flow.waiting[lane].first() if flow.parts is None else flow.parts.first_of(lane)

    def last_of(self, lane: Name) -> Item | None:
        """The last item of the flow that is next in the lane: of the lowest rank the youngest."""
        flow = self._first_flow(lane)
        if flow is None:
            return None
        return flow.waiting[lane].last() if flow.parts is None else flow.parts.last_of(lane)

    def items_of(self, lane: Name) -> list[Item]:
        """All items that wait in the lane, the oldest first."""
        return [item for item, place in self._places.items() if place.lane == lane]

    def first_flow_of(self, name: Name) -> Flow[Item, Name]:
        """The flow that is next in the lane, in which items wait."""
        flow = self._first_flow(name)
        assert flow is not None
        return flow

    def _first_flow(self, name: Name) -> Flow[Item, Name] | None:
        """The flow that is next in the lane; `None` if none waits there."""
        lane = self._lanes.get(name)
        if lane is None:
            return None
        while True:
            virtual_time, number, flow, items = lane.flows[0]
            if flow.waiting.get(name) is not items:
                heapq.heappop(lane.flows)
                lane.outdated -= 1
            elif virtual_time != flow.virtual_time:
                heapq.heapreplace(lane.flows, (flow.virtual_time, number, flow, items))
            else:
                return flow
