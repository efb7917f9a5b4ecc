"""A Ray that does not start ends the start of the service with a sentence."""

import os
from unittest.mock import patch

import pytest
import ray

from service.startup import local_service as local
from service.startup.commands import ServiceNotStarted


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup."), OSError("no memory")])
def test_whatever_ray_raises_is_said(error: Exception) -> None:
    with (
        patch.dict(os.environ),
        patch.object(local, "require_cluster_token"),
        patch.object(ray, "init", side_effect=error),
        pytest.raises(ServiceNotStarted) as raised,
    ):
        local.start_ray()
    assert str(raised.value) == f"Ray did not start: {error}"
