"""A real engine in the process of the tests, without the service around it."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from vllm.envs import disable_envs_cache

from benchmarks.bare_engine import engine_in
from deployments.generation.engine import VLLMEngine
from deployments.generation.settings import EngineSettings
from deployments.protocols.images import ImageStore
from tests.paths import REPOSITORY

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""Drafts after each token that was there before, by vLLM's `speculative_config`."""
RunningEngine = tuple[VLLMEngine, asyncio.Runner]
"""The engine, and the event loop that it was started in."""


def tiny_settings() -> EngineSettings:
    """Of the embedded model, as `serve_config.cpu.yaml` serves it."""
    return engine_in(yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text()))


def float32_settings(folder: Path, max_model_len: int, **given: Any) -> EngineSettings:
    """Of a model that is held against transformers."""
    usual = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**25}
    return EngineSettings.model_validate({**usual, "model": str(folder), "max_model_len": max_model_len, **given})


@contextmanager
def running_engine(
    settings: EngineSettings, images: ImageStore | None = None, **arguments: Any
) -> Iterator[RunningEngine]:
    """For the length of the block.

    Args:
        arguments: further ones of vLLM, beside those of the environment variable `ENGINE_ARGUMENTS` (JSON).
    """
    # vLLM sets variables of its own, which end with the patch.
    with patch.dict(os.environ, settings.process_variables), asyncio.Runner() as loop:
        of_all = json.loads(os.environ.get("ENGINE_ARGUMENTS", "{}"))
        given = settings.engine_args() | {"max_num_seqs": 8} | of_all | arguments
        engine = loop.run(VLLMEngine.start(given, images=images))
        try:
            yield engine, loop
        finally:
            engine.shutdown()
            disable_envs_cache()
