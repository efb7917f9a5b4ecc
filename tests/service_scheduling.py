"""Which tests one test process runs: two processes then never start the same service, and neither runs two at once."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

LIVE = PurePosixPath("tests/live")
OWN_SERVICES = {
    "test_console.py",
    "test_engine.py",
    "test_environment_replicas.py",
    "test_families.py",
    "test_local.py",
}
"""Files whose tests start services or engines of their own. All others share one service."""


class ServiceScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One process runs the tests that share a service, one those with their own; all other tests go to either.

    The marker `xdist_group` does not do this: pytest-xdist 3.8 ignores it under pytest 9.2, where a plugin cannot
    change the id of a test.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = PurePosixPath(nodeid.partition("::")[0])
        if not path.is_relative_to(LIVE):
            return nodeid
        return "own services" if path.name in OWN_SERVICES else "shared service"
