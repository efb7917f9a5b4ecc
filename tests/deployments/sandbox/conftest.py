from collections.abc import Iterator

import pytest

from deployments.sandbox import LocalSandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[LocalSandbox]:
    """Under the strongest isolation that this machine permits."""
    sandbox = LocalSandbox(max_concurrent_runs=2)
    yield sandbox
    sandbox.close()
