"""What Ray is given of what was counted, with its instruments replaced by ones that remember it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import instruments
from deployments.instruments import SummedCounter, SummedHistogram, flush_periodically
from tests import virtual_time
from tests.fakes.instruments import Given, remembering


@pytest.fixture
def given() -> Given:
    return []


@pytest.fixture
def source(given: Given) -> Any:
    return SimpleNamespace(Counter=remembering(given), Gauge=remembering(given))


def test_a_counter_gives_ray_the_sum_of_what_was_added_once(given: Given, source: Any) -> None:
    counter = SummedCounter("name", "Description.", ("task_name",), source)
    for value in (1, 2, 3):
        counter.add(value, "math")
    counter.add(0, "maze")
    counter.flush()
    counter.flush(repeats=True)
    counter.add(4, "math")
    counter.flush()
    assert given == [("name", {"task_name": "math"}, 6), ("name", {"task_name": "math"}, 4)]


def bucketed(task: str, buckets: dict[str, int], count: int, sum_: float) -> Given:
    tags = {"task_name": task}
    values = [("name_bucket", {**tags, "le": bound}, value) for bound, value in buckets.items()]
    return [*values, ("name_count", tags, count), ("name_sum", tags, sum_)]


def test_a_histogram_has_cumulative_buckets_by_tags_a_sum_and_a_count(given: Given, source: Any) -> None:
    histogram = SummedHistogram("name", "Description.", [0.5, 1, 2.5], ("task_name",), source)
    for value in (0.5, 0.75, 3.0):
        histogram.observe(value, "math")
    histogram.observe(1.0, "maze")
    histogram.flush()
    assert given == [
        *bucketed("math", {"0.5": 1, "1.0": 2, "2.5": 2, "+Inf": 3}, 3, 4.25),
        *bucketed("maze", {"0.5": 0, "1.0": 1, "2.5": 1, "+Inf": 1}, 1, 1.0),
    ]


def test_a_histogram_gives_ray_only_the_tags_that_have_a_new_value(given: Given, source: Any) -> None:
    histogram = SummedHistogram("name", "Description.", [1], ("task_name",), source)
    histogram.observe(1, "math")
    histogram.observe(1, "maze")
    histogram.flush()
    given.clear()
    histogram.observe(2, "maze")
    histogram.flush()
    assert [(tags.get("le"), value) for _, tags, value in given] == [("1.0", 1), ("+Inf", 2), (None, 2), (None, 3.0)]
    assert {tags["task_name"] for _, tags, _ in given} == {"maze"}
    given.clear()
    histogram.flush(repeats=True)
    assert {tags["task_name"] for _, tags, _ in given} == {"math", "maze"}


class Noting:
    """Notes each flush, and whether it repeats."""

    def __init__(self, flushed: list[Any], name: str = "", call: str = "") -> None:
        self._flushed, self._name, self._call = flushed, name, call

    def flush(self, repeats: bool = False) -> None:
        self._flushed.append(self._name or repeats)
        if self._call:
            asyncio.get_running_loop().call_soon(self._flushed.append, self._call)


async def flush_for(seconds: float, *instruments_: Any) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flush_periodically(instruments_, 8.0), seconds)


async def test_all_is_given_again_twice_in_each_interval_of_rays_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(instruments, "monotonic", virtual_time.now)
    await flush_for(10.5, Noting(flushed))
    assert flushed == [True, False, False, False, True, False, False, False, True, False]


def test_bounds_that_differ_in_the_seventh_digit_are_told_apart(given: Given, source: Any) -> None:
    histogram = SummedHistogram("name", "Description.", [1048576, 1048577, 2.5e10], (), source)
    histogram.observe(1048577)
    histogram.flush()
    buckets = [(tags["le"], value) for name, tags, value in given if name == "name_bucket"]
    assert buckets == [("1048576.0", 0), ("1048577.0", 1), ("25000000000.0", 1), ("+Inf", 1)]


async def test_an_instrument_whose_values_ray_refuses_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Refused:
        def flush(self, repeats: bool = False) -> None:
            raise TypeError("value must be int or float")

    flushed: list[str] = []
    await flush_for(3.5, Refused(), Noting(flushed, "flushed"))
    assert flushed == ["flushed"] * 3
    assert [record.getMessage() for record in caplog.records] == ["Ray refuses the values of a metric."]


async def test_calls_go_on_between_two_instruments() -> None:
    order: list[str] = []
    await flush_for(1.5, Noting(order, "first", "call"), Noting(order, "second", "call"))
    assert order == ["first", "call", "second", "call"]
