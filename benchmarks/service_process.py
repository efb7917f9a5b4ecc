"""The service as a process of its own, which a benchmark can suspend."""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.process_group import ProcessGroup, started

BEHIND_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"}
"""HAProxy, which comes with Ray Serve, as a cluster has it (`serve.env`)."""
NO_VARIABLES: Mapping[str, str] = {}


@contextmanager
def service_process(
    served: dict[str, Any], folder: Path, variables: Mapping[str, str] = NO_VARIABLES
) -> Iterator[tuple[str, ProcessGroup]]:
    """Runs the service as a user would, `python -m service CONFIG`; yields its URL and its processes.

    Args:
        served: the config, which is a file in `folder` for the length of the block, beside its `serve.env`.
        variables: of the environment, beside those of this process.
    """
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".bench-", suffix=".yaml") as config:
        yaml.safe_dump(served, config)
        config.flush()
        url = f"http://127.0.0.1:{served['http_options']['port']}"
        command, environment = [sys.executable, "-m", "service", config.name], {**os.environ, **variables}
        with started(command, f"{url}/readyz", environment) as processes:
            yield url, processes
