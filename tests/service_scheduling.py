"""Which tests one test process runs: those that share a service in one of them, and no process runs two services."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

LIVE = PurePosixPath("tests/live")
TINY = "tiny"
GROUPS = {
    "small": ("test_agents.py", "test_small_model.py", "test_vllm_server.py", "test_harbor.py"),
    "simulated": ("test_environment_replicas.py", "test_image_store.py", "test_jobs.py", "test_keys.py"),
}
"""The files whose tests share a service, in the order in which they run: the last ones of a group disturb it most."""
ALONE = {
    "test_console.py",
    "test_engine.py",
    "test_engine_adapters.py",
    "test_families.py",
    "test_gpu_runner.py",
    "test_images.py",
    "test_images_families.py",
    "test_images_service.py",
    "test_leaving.py",
    "test_local.py",
    "test_judges.py",
    "test_nodes.py",
    "test_smollm2.py",
    "test_token_columns.py",
    "test_train_agent_harbor.py",
}
"""Files whose tests start services or engines of their own. All that are named nowhere share the service `TINY`."""


FIRST = (TINY, *GROUPS)
"""What takes longest, in the order in which it is begun: what a process has left at the end is short."""


def group_of(file: str) -> str:
    """The service that the tests of the file share; the file itself if they share none."""
    shared = [group for group, files in GROUPS.items() if file in files]
    return shared[0] if shared else file if file in ALONE else TINY


def place_of_group(file: str) -> tuple[int, str]:
    group = group_of(file)
    return FIRST.index(group) if group in FIRST else len(FIRST), group


def place_in_group(file: str) -> int:
    files = GROUPS.get(group_of(file), ())
    return files.index(file) if file in files else 0


class ServiceScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The tests of a group run in one process, one after the other, and so do those of a file, which import the same.

    The marker `xdist_group` does not do this: pytest-xdist 3.8 ignores it under pytest 9.2, where a plugin cannot
    change the id of a test.
    """

    def schedule(self) -> None:
        """Gives the groups out in the order in which they were collected, not those of the most tests first."""
        self.config.option.loadscopereorder = False
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        path = PurePosixPath(nodeid.partition("::")[0])
        return group_of(path.name) if path.is_relative_to(LIVE) else str(path)
