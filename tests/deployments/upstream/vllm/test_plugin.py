"""What the engine's processes do before they import the engine."""

import gc
import multiprocessing

import pytest

from deployments.upstream.vllm.plugin import pass_collector_on

pytestmark = pytest.mark.slow


def test_a_spawned_process_collects_garbage_as_seldom_as_its_parent() -> None:
    assert gc.get_threshold() == (10_000, 2, 10)
    pass_collector_on()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(gc.get_threshold) == (10_000, 2, 10)
