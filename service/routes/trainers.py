"""vLLM's control routes for reinforcement learning, for trainers that bring their own client of a vLLM server.

They are there where the config has `trainers`, and not in the OpenAPI document: their types are vLLM's (0.32,
`vllm/entrypoints/rl/online/api_router.py`), with what TRL, SkyRL and prime-rl add to them. One call reaches all
replicas, and what stands behind is that of `/policy`: weights by a path are a push, an adapter is a version of a named
policy, a transfer is abandoned if its trainer falls silent. A pause is a hold that ends by itself. Answers have a
length and errors are vLLM's, because these clients read no others.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import Field

from deployments.failures import RolloutFailure, StoreFailure
from rollout_client.contract.base import FieldProblem, Lenient, PolicyDemand, PolicyName
from rollout_client.contract.policy import PauseMode, PushOptions, SwitchOptions
from service.http.middlewares import request_id_of
from service.http.openapi import AuthorizedCaller, needs
from service.http.request_body import read_json_body
from service.problems import INVALID_REQUEST, RequestProblem, field_problem, invalid_request, problem_of
from service.routes.dependencies import Calls, Rollouts, Store, Trainers

_LARGEST_BYTES = 64 * 2**20
"""The names, dtypes and shapes of a million tensors."""
_ADVICE = "send the tensors in several updates"
_NO_FOLDER = "it is null; name the folder of a checkpoint below one of policy.checkpoint_roots"
_OWN_PROTOCOL = (
    "prime-rl's own broadcast needs its extension of vLLM's workers; set weight_broadcast.type = filesystem, or train "
    "an adapter"
)
_TAKEN = "calls mean the model itself by this name; give the adapter another one"
_NO_FORMAT = "tensors come in the checkpoint's format; leave it out, or say true"
_NO_RPC = "it is not one of the three with which SkyRL sends weights; for colocate_all and offload_kv_for_weight_sync "
_NO_RPC += "the trainer has to share the engine's card"


class _VLLMErrors(APIRoute):
    """A route that answers errors as vLLM does: TRL, SkyRL and prime-rl read `error.message`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_or_error(request: Request) -> Response:
            try:
                return await answer(request)
            except RequestValidationError as error:
                problem = invalid_request(*(field_problem(finding) for finding in error.errors()))
            except (RequestProblem, StoreFailure, RolloutFailure) as error:
                problem = problem_of(error)
            return _vllm_error(problem, request_id_of(request))

        return answer_or_error


def _vllm_error(problem: RequestProblem, request_id: str) -> Response:
    said = problem.problem
    # Clients send a call again after 5xx and 429 alone; vLLM says 400 where the service says 422.
    status = 400 if said.status == INVALID_REQUEST.status else said.status
    error = {
        "message": said.detail,
        "type": said.title,
        "param": next((error.field for error in said.errors if error.field), None),
        "code": status,
        "request_id": request_id,
    }
    return JSONResponse({"error": error}, status, problem.headers)


router = APIRouter(tags=["trainers"], route_class=_VLLMErrors, include_in_schema=False)
_reads: dict[str, Any] = needs("read")
_changes: dict[str, Any] = needs("policy")


def _done(message: str) -> Response:
    return JSONResponse({"message": message})


class _InitBody(Lenient):
    init_info: dict[str, Any]


class _UpdateBody(Lenient):
    """vLLM's `update_info`, or the `weight_dir` of prime-rl."""

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None


class _FinishBody(Lenient):
    weight_version: str | None = Field(default=None, pattern=r"^[1-9]\d{0,17}$")


class _AdapterName(Lenient):
    lora_name: PolicyName


class _AdapterBody(_AdapterName):
    lora_path: str


class _RpcBody(Lenient):
    """A call of a method of all workers, as SkyRL makes three."""

    method: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


@router.post("/pause", **_changes)
async def _pause(store: Store, trainers: Trainers, mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
    """The cache is emptied with the weights, in each mode: `clear_cache` is deprecated in vLLM too."""
    del clear_cache
    await store.hold(mode, trainers.pause_s)
    return JSONResponse({"status": "paused"})


@router.post("/resume", **_changes)
async def _resume(store: Store, _: Trainers) -> Response:
    await store.release()
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused", **_reads)
async def _is_paused(store: Store, _: Trainers) -> Response:
    return JSONResponse({"is_paused": await store.is_paused()})


@router.get("/get_world_size", **_reads)
async def _get_world_size(store: Store, _: Trainers) -> Response:
    """The workers of all replicas; a trainer that sends weights has one rank besides."""
    with_trainer = (await store.state(0.0)).transfer_world_size or 1
    return JSONResponse({"world_size": with_trainer - 1})


@router.get("/weight_info", **_reads)
async def _weight_info(store: Store, _: Trainers) -> Response:
    return JSONResponse({"weight_version": str((await store.state(0.0)).current)})


@router.get("/server_info", **_reads)
async def _server_info(rollouts: Rollouts, _: Trainers) -> Response:
    """vLLM's configuration, as far as trainers read it."""
    engine = rollouts.episode_factory.generator
    of_model = {"model": engine.model, "dtype": f"torch.{engine.dtype}", "max_model_len": engine.max_model_len}
    lora = {"max_lora_rank": engine.max_lora_rank, "max_loras": engine.max_loras} if engine.max_lora_rank else None
    config = {
        "model_config": of_model,
        # Replicas are none of its ranks: TRL sends no adapters to more than one.
        "parallel_config": {"data_parallel_size": 1},
        "lora_config": lora,
        "weight_transfer_config": engine.transfer_backend and {"backend": engine.transfer_backend},
    }
    return JSONResponse({"vllm_config": config})


@router.post("/reset_prefix_cache", **_changes)
async def _reset_prefix_cache(_: Trainers) -> Response:
    """Weights that come by these routes empty the cache themselves."""
    return JSONResponse({"success": True})


@router.post("/init_weight_transfer_engine", **_changes)
async def _init_transfer(request: Request, store: Store, _: Trainers) -> Response:
    """Each replica has ranks of its own, whatever `rank_offset` says."""
    await store.init_transfer((await read_json_body(request, _InitBody, _LARGEST_BYTES, _ADVICE)).init_info)
    return _done("Weight transfer initialized")


@router.post("/start_weight_update", **_changes)
async def _start_update(store: Store, _: Trainers) -> Response:
    await store.start_transfer(SwitchOptions())
    return _done("Weight update started")


@router.post("/update_weights", **_changes)
async def _update_weights(request: Request, store: Store, _: Trainers) -> Response:
    body = await read_json_body(request, _UpdateBody, _LARGEST_BYTES, _ADVICE)
    if body.update_info is not None:
        await store.update_transfer(body.update_info)
    elif body.weight_dir is not None:
        await store.load_checkpoint(None, body.weight_dir, PushOptions())
    elif "weight_dir" in body.model_fields_set:
        raise invalid_request(FieldProblem(field="weight_dir", message=_NO_FOLDER))
    else:
        raise invalid_request(FieldProblem(field="update_info", message="it is missing; say what is sent"))
    return _done("Weights updated")


@router.post("/finish_weight_update", **_changes)
async def _finish_update(request: Request, store: Store, _: Trainers) -> Response:
    """The version is the next one, or the number that `weight_version` says."""
    version = None
    if await request.body():
        asked = (await read_json_body(request, _FinishBody, _LARGEST_BYTES, _ADVICE)).weight_version
        version = None if asked is None else int(asked)
    await store.finish_transfer(version)
    return _done("Weight update finished")


@router.post("/shutdown_weight_transfer_engine", **_changes)
async def _shutdown_transfer(_: Trainers) -> Response:
    """The connection ends with the trainer's process, and gives way to the next one."""
    return _done("Weight transfer shut down")


@router.post("/load_lora_adapter", **_changes)
@router.post("/v1/load_lora_adapter", **_changes)
@router.post("/skyrl/v1/load_lora_adapter", **_changes)
async def _load_adapter(request: Request, store: Store, rollouts: Rollouts, _: Trainers) -> Response:
    """The same name again is the next version of its policy; the files may change once this has answered."""
    body = await read_json_body(request, _AdapterBody, _LARGEST_BYTES, _ADVICE)
    if body.lora_name in rollouts.episode_factory.generator.model_names:
        raise invalid_request(FieldProblem(field="lora_name", message=_TAKEN, value=body.lora_name))
    update = await store.load_checkpoint(None, body.lora_path, PushOptions(kind="adapter", name=body.lora_name))
    await rollouts.policy.wait_for_version(PolicyDemand(name=body.lora_name, min_version=update.version))
    return _done(f"LoRA adapter '{body.lora_name}' is served as its version {update.version}")


@router.post("/unload_lora_adapter", **_changes)
@router.post("/v1/unload_lora_adapter", **_changes)
async def _unload_adapter(request: Request, store: Store, _: Trainers) -> Response:
    body = await read_json_body(request, _AdapterName, _LARGEST_BYTES, _ADVICE)
    await store.drop_policy(body.lora_name)
    return _done(f"LoRA adapter '{body.lora_name}' is not served any longer")


@router.post("/collective_rpc", **_changes)
async def _collective_rpc(request: Request, store: Store, _: Trainers) -> Response:
    """SkyRL's three methods, which are vLLM's steps of a transfer by other names. No other method is called."""
    body = await read_json_body(request, _RpcBody, _LARGEST_BYTES, _ADVICE)
    match body.method:
        case "skyrl_start_weight_update":
            if body.kwargs.get("is_checkpoint_format") is False:
                raise invalid_request(
                    FieldProblem(field="kwargs.is_checkpoint_format", message=_NO_FORMAT, value=False)
                )
            await store.start_transfer(SwitchOptions())
        case "update_weights_nccl":
            await store.update_transfer(body.kwargs.get("update_info", body.kwargs))
        case "skyrl_finish_weight_update":
            await store.finish_transfer(None)
        case other:
            raise invalid_request(FieldProblem(field="method", message=_NO_RPC, value=other))
    return JSONResponse({"results": [None]})


@router.post("/finish_session", **needs("rollout"))
async def _finish_session(calls: Calls, caller: AuthorizedCaller, session_id: str, _: Trainers) -> Response:
    """Calls with this `X-Session-ID` follow no more: the scheduler forgets where their prefix lies."""
    calls.end_routing_key(session_id, caller)
    return JSONResponse({"status": "finished"})


@router.post("/init_broadcaster", **_changes)
async def _init_broadcaster(_: Trainers) -> Response:
    raise invalid_request(FieldProblem(field="init_broadcaster", message=_OWN_PROTOCOL))
