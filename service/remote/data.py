"""The `DataReader` port over a Serve handle. Server half: `deployments/data/store.py`."""

from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.data.rows import DataReader
from deployments.failures import DataLost
from deployments.rpc.handle_calls import call_result
from deployments.rpc.store_client import StoreClient
from deployments.upstream.ray_serve.serve_internals import cancel_call
from rollout_client.contract.sample_ranges import SampleRange

WHO = "The deployment that holds the data of the tasks"


class RemoteData(DataReader):
    """Asks any replica: all hold the same."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._store = StoreClient(handle, DataLost, WHO)

    async def sizes(self) -> dict[str, dict[str, int]]:
        sizes: dict[str, dict[str, int]] = await self._store.sizes()
        return sizes

    async def revision(self, wanted: SampleRange) -> str:
        revision: str = await self._store.revision(wanted.task_name, wanted.split, wanted.seed)
        return revision

    async def samples(self, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
        stream: Any = self._handle.options(stream=True).samples.remote(
            wanted.task_name, wanted.split, wanted.start, wanted.count, wanted.seed, most_bytes
        )
        parts = aiter(stream)
        try:
            while part := await call_result(anext(parts, b""), stream, DataLost, WHO):
                yield part
        finally:
            cancel_call(stream)
