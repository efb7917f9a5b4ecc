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
from tests.endurance.soak.soaked_service import CPU_CONFIG

SIMULATED = Path(__file__).with_name("serve_config.yaml")
"""Everything but the engine is real."""
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


def config_of(has_engine: bool) -> ServeDeploySchema:
    """With a real engine, which the routes of agents need, or on simulated ones."""
    config = read_config(CPU_CONFIG if has_engine else SIMULATED, port=free_port())
    if has_engine:
        args = config.applications[0].args
        args |= {"sessions": {}, "responses": {"tool_call_parser": "hermes"}}
        args["policy"] = args.get("policy", {}) | {"wait_s": WEIGHTS_WAIT_S}
        args["engine"] |= {"max_model_len": LONGEST_CONTEXT, "served_model_name": SERVED_MODEL}
    return config


@contextmanager
def fuzzed_service(has_engine: bool) -> Iterator[FuzzedService]:
    """Runs it for the length of the block."""
    config, key = config_of(has_engine), new_key()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        keys_file = Path(folder, "keys.json")
        keys_file.write_text(json.dumps({"keys": [{"name": "fuzz", "sha256": hash_of(key), "scopes": ["admin"]}]}))
        [application] = config.applications
        application.args["access"] = {"keys_file": str(keys_file)}
        with local_service(config, console) as url:
            yield FuzzedService(url, {"Authorization": f"Bearer {key}"})
