"""Weighted fair queueing: shares, order, and laws over random sequences of additions, starts and removals."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.contract.base import Priority
from service.scheduling.fair_queue import FairQueue, _ItemsInLane, _weight_of, counts_by_priority
from tests.kept_objects import kept


def queue_with(weights: dict[str, float], items: int) -> "FairQueue[str, str]":
    """Lane `l` with so many items of each flow, named by flow and number."""
    queue: FairQueue[str, str] = FairQueue()
    for name, weight in weights.items():
        flow = queue.flow(name, weight)
        for number in range(items):
            queue.add(f"{name}{number}", "l", flow, rank=0)
    return queue


def start_next(queue: "FairQueue[str, str]", cost: float = 1.0, lane: str = "l") -> str:
    item = queue.first_of(lane)
    assert item is not None
    queue.start(item, cost)
    return item


def started(queue: "FairQueue[str, str]", count: int) -> Counter[str]:
    """How many of the next `count` items are of each flow."""
    return Counter(start_next(queue)[0] for _ in range(count))


def test_a_flow_that_had_nothing_to_start_earns_nothing_for_that_time() -> None:
    queue = queue_with({"a": 1}, 50)
    late = queue.flow("b", 1)
    assert started(queue, 20) == {"a": 20}
    queue.advance(20.0)
    for number in range(20):
        queue.add(f"b{number}", "l", late, rank=0)
    assert started(queue, 20) == {"a": 10, "b": 10}


def test_a_flow_that_leaves_a_lane_many_times_leaves_nothing_behind() -> None:
    queue, before = queue_with({"a": 1}, 1), kept(_ItemsInLane)
    flow = queue.flow("b", 1)
    for number in range(1000):
        queue.add(f"b{number}", "l", flow, rank=0)
        queue.remove(f"b{number}")
    assert kept(_ItemsInLane) <= before + 2


def test_removing_an_item_that_does_not_wait_is_an_error() -> None:
    with pytest.raises(KeyError):
        queue_with({"a": 1}, 1).remove("a1")


Moves = st.lists(
    st.tuples(st.sampled_from(["add", "start", "remove"]), st.integers(0, 2), st.integers(0, 4), st.integers(0, 3)),
    max_size=120,
)


@given(moves=Moves)
def test_each_item_is_started_or_removed_once_in_its_flows_order(moves: list[tuple[str, int, int, int]]) -> None:
    """Against lists: an item is (number, rank), one list for each flow and lane."""
    queue: FairQueue[tuple[int, int], str] = FairQueue()
    flows = [queue.flow(f"{number}", weight=1 + number) for number in range(5)]
    expected: dict[tuple[str, int], list[tuple[int, int]]] = {}
    flow_of: dict[tuple[int, int], int] = {}
    for number, (move, lane_number, flow, rank) in enumerate(moves):
        lane = f"{lane_number}"
        items = expected.setdefault((lane, flow), [])
        if move == "add":
            item = (number, rank)
            queue.add(item, lane, flows[flow], rank)
            items.append(item)
            flow_of[item] = flow
        elif move == "remove" and items:
            queue.remove(items.pop(rank % len(items)))
        elif move == "start" and (first := queue.first_of(lane)) is not None:
            its_flow = flow_of[first]
            waiting = [index for (name, index), left in expected.items() if name == lane and left]
            assert flows[its_flow].virtual_time == min(flows[index].virtual_time for index in waiting)
            queue.start(first, cost=float(1 + rank))
            assert first == max(expected[lane, its_flow], key=lambda item: (item[1], -item[0]))
            expected[lane, its_flow].remove(first)
        sizes = {f"{n}": sum(len(left) for (name, _), left in expected.items() if name == f"{n}") for n in range(3)}
        assert {name: queue.size_of(name) for name in sizes} == sizes
        lanes = queue.longest_lanes()
        assert [sizes[lane] for lane in lanes] == sorted(filter(None, sizes.values()), reverse=True)
        assert len(queue) == sum(sizes.values())


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    costs=st.lists(st.floats(0.5, 10.0), min_size=300, max_size=300),
)
def test_flows_that_wait_are_no_further_apart_than_an_item_of_each(weights: list[float], costs: list[float]) -> None:
    queue = queue_with({f"{number}": weight for number, weight in enumerate(weights)}, 400)
    service = Counter[int]()
    for cost in costs:
        item = queue.first_of("l")
        assert item is not None
        queue.start(item, cost)
        service[int(item[0])] += cost  # type: ignore[assignment]
    by_weight = [service[number] / weight for number, weight in enumerate(weights)]
    assert max(by_weight) - min(by_weight) <= max(costs) / min(weights) + 1e-6


def divided_queue(requests: dict[str, dict[str, float]], items: int) -> "FairQueue[str, str]":
    """Lane `l` with flows of weight 1, the parts of each, and so many items of each part, named by part and number."""
    queue: FairQueue[str, str] = FairQueue()
    for name, weights in requests.items():
        flow = queue.flow(name, 1)
        for part_name, weight in weights.items():
            part = queue.part(flow, part_name, weight)
            for number in range(items):
                queue.add(f"{part_name}{number}", "l", flow, 0, part)
    return queue


def test_the_parts_of_a_flow_share_by_their_weights() -> None:
    assert started(divided_queue({"one": {"a": 1}, "two": {"b": 1, "c": 3}}, 100), 80) == {"a": 40, "b": 10, "c": 30}


def test_a_flow_whose_parts_come_and_go_begins_anew_with_none_of_them() -> None:
    queue = divided_queue({"one": {"a": 1}}, 100)
    other = queue.flow("other", 1)
    names = Counter[str]()
    for number in range(60):
        part = queue.part(other, f"b{number}", 1)
        queue.add(f"b{number}", "l", other, 0, part)
        names[start_next(queue)[0]] += 1
        if f"b{number}" not in set(queue):
            queue.forget(other, part)
    assert names == {"a": 30, "b": 30}


@pytest.mark.parametrize(
    ("priority", "weight"), [("interactive", 16.0), ("train", 1.0), ("batch", 0.0625), (2.5, 2.5), (1, 1.0)]
)
def test_a_priority_is_a_weight_in_proportion_to_training(priority: Priority, weight: float) -> None:
    assert _weight_of(priority) == weight


def test_counts_by_priority_miss_no_class() -> None:
    counts = counts_by_priority({16.0: 2, 0.0625: 1, 2.5: 3, 0.5: 4})
    assert counts == {"interactive": 2, "train": 0, "batch": 1, "other": 7}
