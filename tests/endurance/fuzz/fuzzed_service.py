"""The services that are fuzzed: on simulated engines, or on a real one; open only to who has a key."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray.serve.schema import ServeDeploySchema

from service.access.keys import hash_of, new_key
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.endurance.program import console

SIMULATED = Path(__file__).with_name("serve_config.yaml")
ENGINE = Path(__file__).parents[3] / "serve_config.cpu.yaml"
LONGEST_CONTEXT = 160
"""Of the real engine, in tokens: what random numbers ask for ends within seconds."""
SERVED_MODEL = "tiny"
"""The name by which calls of agents ask for the real engine's model: those with another are refused early."""
WEIGHTS_WAIT_S = 0.05
"""Requests that demand weights that there are not are refused soon."""


@dataclass(frozen=True, slots=True)
class FuzzedService:
    url: str
    headers: Mapping[str, str]
    """Of every request: without them none gets past the key."""


def simulated() -> ServeDeploySchema:
    """Everything but the engine is real."""
    return read_config(SIMULATED, port=free_port())


def with_engine() -> ServeDeploySchema:
    """With a real engine, which the routes of agents need."""
    config = read_config(ENGINE, port=free_port())
    args = config.applications[0].args
    args["sessions"] = {}
    args["policy"] = args.get("policy", {}) | {"wait_s": WEIGHTS_WAIT_S}
    args["engine"] |= {"max_model_len": LONGEST_CONTEXT, "served_model_name": SERVED_MODEL}
    args["responses"] = {"tool_call_parser": "hermes"}
    return config


@contextmanager
def fuzzed_service(config: ServeDeploySchema) -> Iterator[FuzzedService]:
    """Runs it for the length of the block."""
    key = new_key()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        keys_file = Path(folder, "keys.json")
        keys_file.write_text(json.dumps({"keys": [{"name": "fuzz", "sha256": hash_of(key), "scopes": ["admin"]}]}))
        [application] = config.applications
        application.args["access"] = {"keys_file": str(keys_file)}
        with local_service(config, console) as url:
            yield FuzzedService(url, {"Authorization": f"Bearer {key}"})
