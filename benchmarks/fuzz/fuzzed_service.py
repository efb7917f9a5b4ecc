"""The service that is fuzzed: on simulated engines, and open only to who has a key."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from service.access.keys import hash_of, new_key
from service.local import local_service
from service.startup.config import read_config
from service.startup.ports import free_port

CONFIG = Path(__file__).with_name("serve_config.yaml")


@dataclass(frozen=True, slots=True)
class FuzzedService:
    url: str
    headers: Mapping[str, str]
    """Of every request: without them none gets past the key."""


@contextmanager
def fuzzed_service(console: Console) -> Iterator[FuzzedService]:
    """Runs it for the length of the block."""
    config = read_config(CONFIG, port=free_port())
    key = new_key()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        keys_file = Path(folder, "keys.json")
        keys_file.write_text(json.dumps({"keys": [{"name": "fuzz", "sha256": hash_of(key), "scopes": ["admin"]}]}))
        [application] = config.applications
        application.args["access"] = {"keys_file": str(keys_file)}
        with local_service(config, console) as url:
            yield FuzzedService(url, {"Authorization": f"Bearer {key}"})
