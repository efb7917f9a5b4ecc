"""Each test begins without live replicas."""

from collections.abc import Iterator

import pytest

from deployments.rpc import handle_calls


@pytest.fixture(autouse=True)
def _no_live_replicas() -> Iterator[None]:
    yield
    handle_calls._live_replicas.clear()
