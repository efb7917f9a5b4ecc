"""The service that is soaked: the embedded model on processors, with adapters, and a folder that it may read."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.endurance.program import console
from tests.paths import REPOSITORY

CPU_CONFIG = REPOSITORY / "serve_config.cpu.yaml"
KV_CACHE_BLOCKS = 512
"""Of 128 tokens. Small, because its pages count as memory once they are used: soon all of them have been."""
SMALL_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""On processors oneDNN keeps a compiled kernel for each size of a batch, by default a thousand of them: hundreds of
megabytes, which come by and by, with pushes and without. Small caches are full soon."""
ENVIRONMENT = {"RAY_allow_out_of_band_object_ref_serialization": "0"}
"""A reference to an object of Ray inside a message of Serve is an error: nobody would ever free the object."""


@dataclass(frozen=True, slots=True)
class SoakedService:
    url: str
    model: Path
    """The checkpoint that it starts with."""
    checkpoints: Path
    """It may read checkpoints from here."""
    temporary: Path
    """Everything temporary of it is here."""


@contextmanager
def soaked_service(replicas: Mapping[str, int]) -> Iterator[SoakedService]:
    """Runs the service for the length of the block.

    Args:
        replicas: how many each of these deployments has; `Generator` is among them.
    """
    settings = read_config(CPU_CONFIG, port=free_port())
    [application] = settings.applications
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        checkpoints, temporary = folder / "checkpoints", folder / "t"
        checkpoints.mkdir()
        temporary.mkdir()
        engine = application.args["engine"]
        engine |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_cpus": 0.8 / replicas["Generator"]}
        engine["num_gpu_blocks_override"] = KV_CACHE_BLOCKS
        engine["environment_variables"] |= SMALL_KERNEL_CACHES
        application.args |= {"policy": {"checkpoint_roots": [str(checkpoints)]}, "sessions": {}}
        for deployment in application.deployments:
            deployment.num_replicas = replicas.get(deployment.name, deployment.num_replicas)
        with patch.dict(os.environ, ENVIRONMENT, TMPDIR=str(temporary)), local_service(settings, console) as url:
            yield SoakedService(url, Path(engine["model"]).resolve(), checkpoints, temporary)
