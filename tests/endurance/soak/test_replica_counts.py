"""What counts as still running after a load has ended."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.endurance.soak.replica_counts import counted, left_over, most_of


def test_nothing_is_left_over_where_no_work_runs_and_no_more_tasks_than_before() -> None:
    idle = {"asyncio tasks of Ingress": 7.0, "asyncio tasks of Generator": 9.0}
    assert left_over(idle, {"asyncio tasks of Ingress": 7.0, "asyncio tasks of Generator": 5.0, "steps": 0.0}) == {}


@pytest.mark.parametrize("name", ["engine requests", "rollouts in flight", "running jobs", "steps"])
def test_work_that_still_runs_is_left_over_whatever_ran_before(name: str) -> None:
    assert left_over({name: 3.0}, {name: 2.0}) == {name: 2.0}


def test_tasks_beyond_those_of_the_idle_service_are_left_over() -> None:
    assert left_over({"asyncio tasks of Ingress": 7.0}, {"asyncio tasks of Ingress": 9.0}) == {
        "asyncio tasks of Ingress": 2.0
    }


def test_most_of_several_looks_is_taken_by_name() -> None:
    assert most_of([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": 3.0, "b": 5.0}


def running(instance: Any) -> dict[str, int]:
    async def look() -> dict[str, int]:
        waiting = [asyncio.create_task(asyncio.Event().wait()) for _ in range(3)]
        found = await counted(instance)
        for task in waiting:
            task.cancel()
        return found

    return asyncio.run(look())


def test_of_a_generator_the_requests_of_its_engine_and_the_generations_that_nobody_has_ended_are_counted() -> None:
    engine = SimpleNamespace(load=lambda: SimpleNamespace(ongoing_generations=4))
    assert running(SimpleNamespace(_engine=engine, _running={"a": None})) == {"asyncio tasks": 3, "engine requests": 5}


def test_of_an_ingress_replica_rollouts_and_jobs_are_counted() -> None:
    admission = SimpleNamespace(in_flight=SimpleNamespace(rollouts=8))
    rollouts, jobs = SimpleNamespace(admission=admission), SimpleNamespace(_players={"job": None})
    expected = {"asyncio tasks": 3, "rollouts in flight": 8, "running jobs": 1}
    assert running(SimpleNamespace(_rollouts=rollouts, _jobs=jobs)) == expected
    assert running(SimpleNamespace(_rollouts=rollouts, _jobs=None)) == {**expected, "running jobs": 0}


def test_of_an_environment_replica_its_steps_are_counted() -> None:
    assert running(SimpleNamespace(_steps=SimpleNamespace(in_progress=2))) == {"asyncio tasks": 3, "steps": 2}
