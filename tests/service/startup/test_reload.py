"""Reloading an environment: its replicas are replaced one after the other, unless its code cannot be loaded."""

from typing import Any

import pytest

from service.startup import reload
from service.startup.commands import ServiceNotStarted
from service.startup.reload import ServeCluster, cluster_here, reload_environment

LOADABLE = "tests.clients.rollout_env.faulty_environments:Loadable"


class ScriptedCluster(ServeCluster):
    """Replaces each killed replica after it was asked twice, or never."""

    def __init__(self, replicas: int = 1, replaces: bool = True, raises: str = "", **environment: Any) -> None:
        """Args: `raises` is what Serve says once a replica was killed."""
        self._raises = raises
        self.killed: list[str] = []
        self.running = [f"old-{number}" for number in range(replicas)]
        self._environment = {"import_path": LOADABLE, "arguments": {"greeting": "Hello."}, **environment}
        self._replaces = replaces
        self._asked = 0

    def applications(self) -> dict[str, Any]:
        self._asked += 1
        if self._replaces and self._asked % 3 == 0 and len(self.killed) > sum("new" in name for name in self.running):
            self.running.append(f"new-{len(self.killed)}")
        replicas = [{"actor_name": name, "state": "RUNNING"} for name in self.running]
        starting = [{"actor_name": "starting", "state": "STARTING"}]
        return {
            "other": {"deployed_app_config": None, "deployments": {}},
            "rollout": {
                "deployed_app_config": {"args": {"environments": {"game": self._environment}}},
                "deployments": {
                    "game": {"replicas": starting + replicas, "message": self._message(), "target_num_replicas": 1}
                },
            },
        }

    def _message(self) -> str:
        return self._raises if self.killed and self._raises else "It raised KeyError."

    def kill(self, actor_name: str) -> None:
        assert len(self.running) == len({*self.running, actor_name})
        self.running.remove(actor_name)
        self.killed.append(actor_name)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0)
    monkeypatch.setattr(reload, "STARTED_WITHIN_S", 0.05)


def test_all_replicas_are_replaced_each_only_when_the_one_before_it_is() -> None:
    cluster = ScriptedCluster(replicas=2)
    assert reload_environment("game", cluster) == 2
    assert (cluster.killed, cluster.running) == (["old-0", "old-1"], ["new-1", "new-2"])


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"import_path": "nowhere:Game"}, "nowhere:Game cannot be imported: there is no module nowhere"),
        ({"arguments": {"greeting": 3}}, "greeting: Input should be a valid string"),
    ],
)
def test_what_cannot_be_loaded_stops_nothing(environment: dict[str, Any], problem: str) -> None:
    cluster = ScriptedCluster(**environment)
    with pytest.raises(ServiceNotStarted) as refusal:
        reload_environment("game", cluster)
    assert problem in str(refusal.value)
    assert str(refusal.value).endswith(" The running environment goes on as it is.")
    assert cluster.killed == []


def test_an_unknown_task_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ServiceNotStarted, match=r"^No running service plays 'chess'; there is game\.$"):
        reload_environment("chess", ScriptedCluster())


def test_a_replica_that_does_not_start_is_said_with_its_reason() -> None:
    with pytest.raises(
        ServiceNotStarted, match=r"^No new replica of 'game' has started after 0\.05 s\. Serve says: It"
    ):
        reload_environment("game", ScriptedCluster(replaces=False))


def test_a_constructor_that_raises_is_said_at_once_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "STARTED_WITHIN_S", 1e6)
    traceback = 'Traceback (most recent call last):\n  File "game.py", line 3\nKeyError: 1'
    said = f"A replica failed to start with exception. Retrying. Error:\nray::ServeReplica() {traceback}"
    with pytest.raises(ServiceNotStarted) as failure:
        reload_environment("game", ScriptedCluster(replaces=False, raises=said))
    assert str(failure.value) == (
        f"The new replica of 'game' failed to start. Serve tries again: correct the code.\n{traceback}"
    )


def test_an_environment_whose_replicas_have_not_started_is_waited_for() -> None:
    cluster = ScriptedCluster(replicas=0, replaces=False)
    with pytest.raises(ServiceNotStarted, match="No new replica of 'game' has started"):
        reload_environment("game", cluster)
    assert cluster.killed == []


CLUSTERS = ["10.0.0.1:6379", "10.0.0.1:6380"]


@pytest.mark.parametrize(
    ("named", "here", "found"), [(None, CLUSTERS[:1], CLUSTERS[0]), ("10.0.0.2:6379", CLUSTERS, "10.0.0.2:6379")]
)
def test_the_cluster_is_the_named_one_or_the_only_one_here(
    monkeypatch: pytest.MonkeyPatch, named: str | None, here: list[str], found: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(reload, "clusters_of_this_machine", lambda: here)
    assert cluster_here() == found


@pytest.mark.parametrize(
    ("here", "says"),
    [
        ([], "No service runs here: start one with `make serve`."),
        (CLUSTERS, "Several Ray clusters run here: name one in RAY_ADDRESS, of 10.0.0.1:6379, 10.0.0.1:6380."),
    ],
)
def test_where_no_cluster_or_several_run_it_is_said(
    monkeypatch: pytest.MonkeyPatch, here: list[str], says: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(reload, "clusters_of_this_machine", lambda: here)
    with pytest.raises(ServiceNotStarted) as refusal:
        cluster_here()
    assert str(refusal.value) == says
