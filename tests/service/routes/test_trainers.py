"""vLLM's control routes over a scripted store: what becomes of each call of trainers' clients, and errors as vLLM's."""

from typing import Any

import httpx
import pytest

from deployments.failures import PolicyStoreLost
from deployments.policy.failures import PolicyUnknown, TransferRefused
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.policy import PushOptions, SwitchOptions
from service.settings import TrainersSettings
from tests.service.scripted_http import ScriptedHttp

ADAPTER = {"lora_name": "run-b", "lora_path": "/adapters/run-b", "load_inplace": False}
OF_B = PushOptions(kind="adapter", name="run-b")
LOADED = ("load_checkpoint", None, "/adapters/run-b", OF_B)
UPDATED = ("update_transfer", {"names": ["w"]})
STARTED, FINISHED = ("start_transfer", SwitchOptions()), ("finish_transfer", None)


def service_with(trainers: TrainersSettings | None = TrainersSettings(), **parts: Any) -> ScriptedHttp:  # noqa: B008
    return ScriptedHttp(trainers=trainers, **parts)


def asked(service: ScriptedHttp, call: str, body: Any = None) -> httpx.Response:
    method, _, path = call.partition(" ")
    return service.request(method, path, json=body)


def rpc(method: str, **arguments: Any) -> dict[str, Any]:
    return {"method": method, "kwargs": arguments}


@pytest.mark.parametrize(
    ("call", "body", "made"),
    [
        ("POST /pause", None, ("hold", "abort", 20.0)),
        ("POST /pause?mode=keep&clear_cache=false", None, ("hold", "keep", 20.0)),
        ("POST /pause?mode=wait", None, ("hold", "wait", 20.0)),
        ("POST /resume", None, ("release",)),
        ("POST /init_weight_transfer_engine", {"init_info": {"world_size": 3}}, ("init_transfer", {"world_size": 3})),
        ("POST /start_weight_update", None, STARTED),
        ("POST /start_weight_update", {"is_checkpoint_format": True}, STARTED),
        ("POST /update_weights", {"update_info": {"names": ["w"]}}, UPDATED),
        ("POST /update_weights", {"update_info": [{"names": ["w"]}]}, ("update_transfer", [{"names": ["w"]}])),
        ("POST /update_weights", {"weight_dir": "/w/step_7"}, ("load_checkpoint", None, "/w/step_7", PushOptions())),
        ("POST /finish_weight_update", None, FINISHED),
        ("POST /finish_weight_update", {}, FINISHED),
        ("POST /finish_weight_update", {"weight_version": "9"}, ("finish_transfer", 9)),
        ("POST /collective_rpc", rpc("skyrl_start_weight_update", is_checkpoint_format=True), STARTED),
        ("POST /collective_rpc", rpc("update_weights_nccl", update_info={"names": ["w"]}), UPDATED),
        ("POST /collective_rpc", rpc("skyrl_finish_weight_update"), FINISHED),
        ("POST /v1/load_lora_adapter", ADAPTER, LOADED),
        ("POST /load_lora_adapter", ADAPTER, LOADED),
        ("POST /skyrl/v1/load_lora_adapter", ADAPTER, LOADED),
        ("POST /v1/unload_lora_adapter", {"lora_name": "run-b"}, ("drop_policy", "run-b")),
        ("POST /unload_lora_adapter", {"lora_name": "run-b"}, ("drop_policy", "run-b")),
    ],
)
def test_a_call_of_a_trainer_is_one_call_of_the_store(call: str, body: Any, made: tuple[Any, ...]) -> None:
    service = service_with()
    answer = asked(service, call, body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    assert service.store.calls[0] == made
    assert service.store.calls[1:] == ([("wait_for", "run-b", 7, None, None)] if made == LOADED else [])


@pytest.mark.parametrize(
    ("call", "answered"),
    [
        ("GET /is_paused", {"is_paused": True}),
        ("GET /get_world_size", {"world_size": 0}),
        ("GET /weight_info", {"weight_version": "3"}),
        ("POST /reset_prefix_cache", {"success": True}),
    ],
)
def test_questions_are_answered_in_vllms_form(call: str, answered: dict[str, Any]) -> None:
    service = service_with()
    service.store.answers["is_paused"] = True
    assert asked(service, call).json() == answered


@pytest.mark.parametrize(
    ("engine", "lora", "transfer"),
    [
        (GeneratorDescription("m", 100, 262, dtype="bfloat16", max_lora_rank=0), None, None),
        (
            GeneratorDescription(
                "m", 100, 262, dtype="bfloat16", max_lora_rank=8, max_loras=2, transfer_backend="nccl"
            ),
            {"max_lora_rank": 8, "max_loras": 2},
            {"backend": "nccl"},
        ),
    ],
)
def test_the_servers_configuration_has_what_trainers_read(engine: Any, lora: Any, transfer: Any) -> None:
    assert asked(service_with(description=engine), "GET /server_info?config_format=json").json() == {
        "vllm_config": {
            "model_config": {"model": "m", "dtype": "torch.bfloat16", "max_model_len": 100},
            "parallel_config": {"data_parallel_size": 1},
            "lora_config": lora,
            "weight_transfer_config": transfer,
        }
    }


KERNEL_FORMAT = rpc("skyrl_start_weight_update", is_checkpoint_format=False)


@pytest.mark.parametrize(
    ("call", "body", "param", "says"),
    [
        ("POST /pause?mode=stop", None, "query.mode", "keep"),
        ("POST /update_weights", {}, "update_info", "it is missing"),
        ("POST /update_weights", {"weight_dir": None}, "weight_dir", "name the folder"),
        ("POST /update_weights", {"update_info": 3}, "update_info.dict[str,any]", "object"),
        ("POST /finish_weight_update", {"weight_version": "step-3"}, "weight_version", ""),
        ("POST /load_lora_adapter", {"lora_name": "a/b", "lora_path": "/a"}, "lora_name", ""),
        ("POST /load_lora_adapter", {"lora_name": "a"}, "lora_path", ""),
        ("POST /load_lora_adapter", {"lora_name": "tiny", "lora_path": "/a"}, "lora_name", "the model itself"),
        ("POST /collective_rpc", rpc("sleep"), "method", "SkyRL"),
        ("POST /collective_rpc", KERNEL_FORMAT, "kwargs.is_checkpoint_format", "checkpoint's format"),
        ("POST /init_broadcaster", {"host": "h"}, "init_broadcaster", "filesystem"),
        ("POST /finish_session", None, "query.session_id", ""),
    ],
)
def test_a_wrong_call_is_refused_in_vllms_form_before_a_store(call: str, body: Any, param: str, says: str) -> None:
    service = service_with(description=GeneratorDescription("m", 100, 262, model_names=("tiny",)))
    answer = asked(service, call, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, param)
    assert says in error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert service.store.calls == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (TransferRefused.of("transfer", "none is under way"), 409),
        (PolicyUnknown.of("policy.name", "there is none", "run-b"), 404),
        (PolicyStoreLost("The policy store died."), 503),
    ],
)
def test_what_the_store_refuses_is_an_error_in_vllms_form(failure: Exception, status: int) -> None:
    service = service_with()
    service.store.failures["drop_policy"] = failure
    answer = asked(service, "POST /unload_lora_adapter", {"lora_name": "run-b"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_service_without_trainers_has_no_such_routes() -> None:
    service = service_with(None)
    answer = asked(service, "POST /pause")
    assert (answer.status_code, service.store.calls) == (404, [])
    assert answer.json()["error"]["message"] == "trainers: the config has no `trainers`; add `trainers: {}`."
