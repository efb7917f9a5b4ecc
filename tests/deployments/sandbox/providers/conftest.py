from collections.abc import Iterator

import pytest

from deployments.sandbox.providers.interface import ProviderUnusable
from deployments.sandbox.providers.local import LocalProvider


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    """Skips the test where bubblewrap does not work."""
    try:
        provider = LocalProvider()
    except ProviderUnusable as error:
        pytest.skip(str(error))
    yield provider
    provider.close()
