"""The service as a process of its own, which a benchmark can suspend."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.process_group import ProcessGroup, started


@contextmanager
def service_process(served: dict[str, Any], folder: Path) -> Iterator[tuple[str, ProcessGroup]]:
    """Runs the service as a user would, `python -m service CONFIG`; yields its URL and its processes.

    The config `served` is a file in `folder` for the length of the block, beside its `serve.env`.
    """
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".bench-", suffix=".yaml") as config:
        yaml.safe_dump(served, config)
        config.flush()
        url = f"http://127.0.0.1:{served['http_options']['port']}"
        with started([sys.executable, "-m", "service", config.name], f"{url}/readyz", os.environ) as processes:
            yield url, processes
