"""The deployment that holds the data of the tasks, and the ingress's half of its calls."""

import asyncio
import json
from typing import Any

import pytest

from deployments.data.rows import DataNotLoadable, DataRefused
from deployments.data.settings import DataSettings
from deployments.data.store import BYTES_PER_MESSAGE, DataStore
from deployments.failures import DataLost
from rollout_client.contract.selection import SampleRange
from service.remote.environment import RemoteData
from tests import virtual_time
from tests.fakes.serve_handle import ScriptedCall, ScriptedHandle

LONG = "x" * 100_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DataStore:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number} {LONG}"}) + "\n" for number in range(40)))
    return DataStore({"sums": DataSettings(files=str(path))})


@virtual_time.runs
async def parts_of(store: DataStore, count: int, most_bytes: int) -> list[bytes]:
    return [part async for part in store.samples("sums", None, 0, count, None, most_bytes)]


def test_samples_travel_as_lines_in_messages_of_bounded_size(store: DataStore) -> None:
    parts = parts_of(store, 30, 2**30)
    assert [len(part) == BYTES_PER_MESSAGE for part in parts] == [True, True, False]
    texts = [json.loads(line)["messages"][0]["content"].split()[0] for line in b"".join(parts).splitlines()]
    assert texts == [str(number) for number in range(30)]


def test_samples_end_where_the_bytes_end_that_they_may_take(store: DataStore) -> None:
    assert b"".join(parts_of(store, 30, 250_000)).count(b"\n") == 2


def test_the_sizes_of_all_tasks_are_told(store: DataStore) -> None:
    assert asyncio.run(store.sizes()) == {"sums": {"train": 40}}


def test_data_that_cannot_be_loaded_name_their_task() -> None:
    with pytest.raises(
        DataNotLoadable, match=r"^args\.environments\.sums\.data: files: there is no /no/where\.jsonl on"
    ):
        DataStore({"sums": DataSettings(files="/no/where.jsonl")})


def test_the_revision_is_that_of_the_split_and_the_seed(store: DataStore) -> None:
    first, second = (asyncio.run(store.revision("sums", "train", seed)) for seed in (None, 1))
    assert first != second
    assert asyncio.run(store.revision("sums", None, 1)) == second


class ScriptedDataHandle(ScriptedHandle):
    """Its call of `samples` has these items."""

    def __init__(self, *items: Any) -> None:
        super().__init__()
        self._items = items
        self.asked: tuple[Any, ...] = ()

    def on_samples(self, _replica: str, *asked: Any) -> ScriptedCall:
        self.asked = asked
        return self.start(self._items)


@virtual_time.synchronous
async def read(handle: Any) -> list[bytes]:
    wanted = SampleRange(task_name="sums", start=3, count=2, seed=7)
    return [part async for part in RemoteData(handle).samples(wanted, 100)]


def test_the_ingress_reads_the_parts_of_one_call() -> None:
    handle = ScriptedDataHandle(b"a\n", b"b\n")
    assert read(handle) == [b"a\n", b"b\n"]
    assert handle.asked == ("sums", None, 3, 2, 7, 100)


@pytest.mark.parametrize("error", [DataRefused("no such split", "split", "x"), DataLost("gone")])
def test_what_the_deployment_raises_ends_the_call(error: Exception) -> None:
    handle = ScriptedDataHandle(b"a\n", error)
    with pytest.raises(type(error), match=str(error)):
        read(handle)
    assert handle.calls[0].cancelled
