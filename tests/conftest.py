"""For all tests. Those below `live/` need Ray and the engine; all others start neither."""

import gc
import inspect
import logging
import os
import re
import signal
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import Scheduling

from tests import virtual_time
from tests.service_scheduling import ServiceScheduling

# Before torch is imported, here and in the processes that tests start. The threads of an operation spin while they wait
# for each other: on a busy machine, two of them took twenty times the processor time of one for a forward pass.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all that they start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_TIMEOUT_S = 400
"""A slow test starts processes that import vLLM or torch, which on a busy machine takes minutes."""

pytest.register_assert_rewrite("tests.live.played_with_weights")

# How long an example takes, or its making, says more of the machine than of the code.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A change is judged by the same examples on every machine; `make test-long` looks for further ones.
settings.register_profile("fast", settings.get_profile("any speed"), max_examples=20, derandomize=True)
settings.load_profile("any speed")

LIVE = Path(__file__).parent / "live"
SLOW_TEST, LONG_TEST = "pytest.mark.slow", "pytest.mark.long"
SLOW_FILE, LONG_FILE = (
    re.compile(rf"^pytestmark = (\[[^\]]*)?pytest\.mark\.{mark}\b", re.MULTILINE) for mark in ("slow", "long")
)

REAL_TOKENIZERS = re.compile(r"\bmarked\(|pytest\.mark\.tokenizers\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files whose tests a target's markers would all deselect: importing them takes seconds."""
    if collection_path.suffix != ".py":
        return None
    code = collection_path.read_text()
    is_live = collection_path.is_relative_to(LIVE)
    left_out = {
        "not live and not slow": is_live or bool(SLOW_FILE.search(code)),
        "(live or slow) and not long": bool(LONG_FILE.search(code)) or (not is_live and SLOW_TEST not in code),
        "long": LONG_TEST not in code,
        "tokenizers": not REAL_TOKENIZERS.search(code),
    }
    return left_out.get(config.option.markexpr) or None


@pytest.fixture(scope="module", autouse=True)
def no_preloaded_libraries() -> Iterator[None]:
    """Takes back what vLLM's configuration of an engine on processors writes into this process for those it starts.

    The programs of other tests would inherit it: the loader complains on their stderr where the path has a space.
    """
    before = os.environ.get("LD_PRELOAD")
    yield
    if before is None:
        os.environ.pop("LD_PRELOAD", None)
    else:
        os.environ["LD_PRELOAD"] = before


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """For each of hundreds of clients httpx reads the certificates of all authorities, which takes 25 ms."""
    with patch("httpx._transports.default.create_ssl_context", lru_cache(httpx.create_ssl_context)):
        yield


def pytest_unconfigure() -> None:
    """Leaves what the tests made to the end of the process: pytest would look through all of it five times."""
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "true_clock: asynchronous, on a loop whose clock does not jump (virtual_time)")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Gives slow tests their time, and runs each asynchronous test on its own loop: in virtual time, unless marked."""
    if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        decorate = virtual_time.runs if item.get_closest_marker("true_clock") else virtual_time.synchronous
        item.obj = decorate(item.obj)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return ServiceScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collects no garbage while the tests are imported: they leave hundreds of thousands of objects that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Lets the collections during the tests pass over what was imported.

    pytest adds its handlers six times a test to each logger that keeps its records to itself: torch has fifty.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.freeze()
    gc.enable()
