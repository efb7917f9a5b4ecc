"""Reloading an environment: its replicas are replaced one after the other, unless its code cannot be loaded."""

from typing import Any

import pytest

from service import reload
from service.reload import reload_environment
from service.startup.failures import ServiceNotStarted

LOADABLE = "tests.clients.rollout_env.faulty_environments:Loadable"


class ScriptedCluster:
    """Replaces each killed replica after it was asked twice, or never."""

    def __init__(self, replicas: int = 1, replaces: bool = True, **environment: Any) -> None:
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
                "deployments": {"game": {"replicas": starting + replicas, "message": "It raised KeyError."}},
            },
        }

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
    with pytest.raises(ServiceNotStarted, match=r"^The running service does not play 'chess'; it plays game\. Where "):
        reload_environment("chess", ScriptedCluster())


def test_a_replica_that_does_not_start_is_said_with_its_reason() -> None:
    with pytest.raises(
        ServiceNotStarted, match=r"^No new replica of 'game' has started after 0\.05 s\. Serve says: It"
    ):
        reload_environment("game", ScriptedCluster(replaces=False))
