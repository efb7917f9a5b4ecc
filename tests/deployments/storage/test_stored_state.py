"""The state of a store: what is stored before it is answered, and what a database that fails does to its calls."""

import asyncio

import pytest

from deployments.storage.storage import StorageFailed, StoredChange, StoreReplaced
from deployments.storage.stored_state import ANSWER_WITHIN_S, Planned, StoredState
from tests import virtual_time
from tests.fakes.storage import ScriptedStorage


class Names:
    """A state of the names of its records."""

    def __init__(self, *errors: Exception) -> None:
        self.storage = ScriptedStorage(errors=errors)
        self.state = StoredState(self.storage, "job", lambda records: [record.record_id for record in records])

    async def put(self, name: str) -> list[str]:
        def plan(names: list[str]) -> Planned[list[str]]:
            def commit() -> list[str]:
                names.append(name)
                return list(names)

            return [StoredChange(name, b"")], commit

        return await self.state.change(plan)


async def test_nothing_is_answered_before_it_is_stored_and_then_it_is_committed() -> None:
    names = Names()
    names.storage.gate.clear()
    leaving, waiting, staying = (asyncio.create_task(names.put(name)) for name in "abc")
    await asyncio.sleep(0.1)
    assert (await names.state.started(), staying.done()) == ([], False)
    leaving.cancel()
    waiting.cancel()
    names.storage.gate.set()
    assert await staying == ["a", "c"], "only the first one may have been stored when its caller left"


async def test_a_database_that_fails_is_tried_again_and_calls_end_in_time() -> None:
    names = Names(StorageFailed("no"), StorageFailed("disk"))
    assert await names.put("a") == ["a"]
    names.storage.is_failing = True
    began = virtual_time.now()
    calls = names.put("b"), names.put("c"), names.state.read("a", [])
    failures = await asyncio.gather(*calls, return_exceptions=True)
    message = "The database of the jobs has not answered for 5 s; try again later."
    assert [(type(failure), str(failure)) for failure in failures] == [(StorageFailed, message)] * 3
    assert virtual_time.now() - began == pytest.approx(ANSWER_WITHIN_S)
    names.storage.is_failing = False
    assert await names.put("d") == ["a", "b", "d"], "the first one may have been stored; the other never was"


async def test_a_state_that_cannot_be_loaded_is_loaded_when_it_can() -> None:
    names = Names()
    names.storage.is_failing = True
    for _ in range(2):
        with pytest.raises(StorageFailed, match="has not answered for 5 s"):
            await names.state.started()
    names.storage.is_failing = False
    assert await names.state.started() == []


async def test_a_state_that_another_store_has_taken_over_refuses_every_call() -> None:
    names = Names(StoreReplaced("by another"))
    first, waiting = names.put("a"), names.put("b")
    for refused in await asyncio.gather(first, waiting, return_exceptions=True):
        assert isinstance(refused, StoreReplaced)
    with pytest.raises(StoreReplaced):
        await names.state.started()
    assert names.storage.kept.records == {}
