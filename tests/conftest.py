"""For all tests. Those below `live/` need Ray and the engine; all others start neither."""

import gc
import re
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import Scheduling

from tests.service_scheduling import ServiceScheduling

pytest.register_assert_rewrite("tests.live.played_with_weights")

# How long an example takes says more of the machine than of the code.
settings.register_profile("without deadlines", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("without deadlines")

LIVE = Path(__file__).parent / "live"
SLOW_TEST = "pytest.mark.slow"
SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files whose tests a target's markers would all deselect: importing them takes seconds."""
    if collection_path.suffix != ".py":
        return None
    code = collection_path.read_text()
    is_live = collection_path.is_relative_to(LIVE)
    left_out = {
        "not live and not slow": is_live or bool(SLOW_FILE.search(code)),
        "live or slow": not is_live and SLOW_TEST not in code,
    }
    return left_out.get(config.option.markexpr) or None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return ServiceScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collects no garbage while the tests are imported: they leave hundreds of thousands of objects that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Lets the collections during the tests pass over what was imported."""
    gc.freeze()
    gc.enable()
