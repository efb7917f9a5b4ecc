"""Jobs are played in virtual time."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_tracked_objects() -> None:
    """Freezes the objects of the tests before.

    While there are too many for a full collection, `PacedCollections` waits on: in virtual time, 50 times a second of
    a job's hours.
    """
    gc.collect()
    gc.freeze()
