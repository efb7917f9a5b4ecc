"""The steps of vLLM's weight transfer as calls of the service, and what a refusal becomes."""

import json
from collections import deque
from typing import Any

import httpx
import pytest

from rollout_client import RequestRejected, RolloutClient
from rollout_client.contract.policy import PolicyUpdate
from rollout_client.trainers.vllm_transfer import ConnectAgain, RolloutWeightSyncClient

UPDATE: dict[str, Any] = {"version": 4, "checksum": None, "replicas": []}


class Service:
    """Answers each step of a transfer, or the next of `refusals` in its place."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.refusals: deque[str] = deque()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.url.path, request.url.query.decode(), body))
        if self.refusals:
            document = {"type": self.refusals.popleft(), "title": "Refused", "status": 409, "detail": "Not now."}
            return httpx.Response(409, json=document)
        step = request.url.path.rpartition("/")[2]
        return httpx.Response(200, json={"init": {"world_size": 3}, "finish": UPDATE}.get(step))


@pytest.fixture
def service() -> Service:
    return Service()


def transfer_to(service: Service, **options: Any) -> RolloutWeightSyncClient:
    http_client = httpx.Client(transport=httpx.MockTransport(service))
    client = RolloutClient("http://service", http_client=http_client)
    return RolloutWeightSyncClient(client, **options)


def test_each_step_is_one_call_and_the_last_one_gives_the_update(service: Service) -> None:
    transfer = transfer_to(service, mode="wait", reset_prefix_cache=False)
    transfer.init_weight_transfer_engine({"master_port": 1})
    transfer.start_weight_update()
    transfer.update_weights([{"names": ["a"]}, {"names": ["b"]}])
    transfer.finish_weight_update("4")
    assert service.requests == [
        ("/policy/transfer/init", "", {"init_info": {"master_port": 1}}),
        ("/policy/transfer/start", "mode=wait&reset_prefix_cache=false", None),
        ("/policy/transfer/update", "", {"update_info": [{"names": ["a"]}, {"names": ["b"]}]}),
        ("/policy/transfer/finish", "version=4", None),
    ]
    assert transfer.update == PolicyUpdate(version=4, checksum=None, replicas=[])


def test_a_version_is_a_number_or_the_choice_of_the_service(service: Service) -> None:
    with pytest.raises(ValueError, match="'step-4'"):
        transfer_to(service).finish_weight_update("step-4")
    transfer_to(service).finish_weight_update()
    assert service.requests == [("/policy/transfer/finish", "", None)]


@pytest.mark.parametrize("step", ["start_weight_update", "finish_weight_update"])
def test_a_transfer_that_the_service_refuses_asks_to_connect_again(service: Service, step: str) -> None:
    service.refusals.append("urn:rollout:problem:transfer-refused")
    with pytest.raises(
        ConnectAgain, match=r"^Refused \(409\): Not now\. Connect again: a new trainer_init, with world_size="
    ):
        getattr(transfer_to(service), step)()
    assert len(service.requests) == 1


def test_any_other_refusal_is_passed_on(service: Service) -> None:
    service.refusals.extend(["urn:rollout:problem:version-refused", "urn:rollout:problem:transfer-refused"])
    with pytest.raises(RequestRejected, match="Not now"):
        transfer_to(service).finish_weight_update("1")
    with pytest.raises(RequestRejected, match="Not now"):
        transfer_to(service).init_weight_transfer_engine({})
