"""Which tests one test process runs: each file's service is started in one of them, and neither runs two at once."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

LIVE = PurePosixPath("tests/live")
OWN_SERVICES = {
    "test_agents.py",
    "test_console.py",
    "test_engine.py",
    "test_environment_replicas.py",
    "test_families.py",
    "test_gloo_transfer.py",
    "test_jobs.py",
    "test_keys.py",
    "test_local.py",
    "test_models_and_tools.py",
    "test_nodes.py",
    "test_small_model.py",
}
"""Files whose tests start services or engines of their own. All others share a service."""


class ServiceScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One process runs most tests that share a service, one all others below `tests/live`; the rest goes to either.

    The marker `xdist_group` does not do this: pytest-xdist 3.8 ignores it under pytest 9.2, where a plugin cannot
    change the id of a test.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = PurePosixPath(nodeid.partition("::")[0])
        if not path.is_relative_to(LIVE):
            return nodeid
        return "own services" if path.name in OWN_SERVICES else "shared service"
