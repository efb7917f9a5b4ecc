"""The routes of `/policy`: each reads its request and calls the policy store."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    PolicyNotCurrent,
    PolicyUnknown,
    SourceRefused,
    UpdateUnderWay,
    VersionRefused,
    VersionUnknown,
    VersionUntried,
    WeightsRefused,
)
from rollout_client.contract import policy as policy_contract
from rollout_client.contract.base import PolicyName
from rollout_client.contract.policy import (
    SAFETENSORS,
    CheckpointSource,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    RollbackTarget,
    SwitchOptions,
    UploadState,
)
from service.http.openapi import BINARY, content, header_parameter, json_content, json_request, needs, refusals
from service.http.request_body import JSON, read_json_body, weights_media_type
from service.http.upload_chunk import checked_parts, chunk_of
from service.routes.dependencies import Store

LONGEST_CHECKSUMS_S = 600.0
LARGEST_VERSION = 2**63 - 1
LARGEST_SOURCE_BYTES = 2**20
"""A larger JSON body is not a `CheckpointSource`."""
SOURCE_ADVICE = "JSON names a checkpoint; send weights as application/vnd.safetensors"
ROLLBACK_ADVICE = 'send {"to": 5}, the number of the version'
Name = Annotated[PolicyName | None, Query(description="The named policy; by default the one without a name.")]
NewVersion = Annotated[int, Path(ge=1, le=LARGEST_VERSION, description="Number of the version, from 1.")]
router = APIRouter(prefix="/policy", tags=["policy"])
_changes: dict[str, Any] = needs("policy")


@router.get("", **needs("read"), summary="Get the state of the weights", responses=refusals(PolicyNotCurrent))
async def _policy(
    store: Store,
    min_version: Annotated[int, Query(ge=0, description="Waits until this version or a newer one is current.")] = 0,
    wait_s: Annotated[float, Query(ge=0, description="Longest wait for `min_version`; then 409.")] = 0,
    checksums_within_s: Annotated[
        float,
        Query(
            ge=0,
            le=LONGEST_CHECKSUMS_S,
            description="Has the replicas compute the checksums of their weights; longest wait, then they are null.",
        ),
    ] = 0,
) -> PolicyState:
    """Which version is current, which versions are kept, and what each generator replica has loaded.

    The checksums of the engines' weights are computed only when `checksums_within_s` asks for them, while generations
    go on. Without it those are shown that are known already.
    """
    if min_version:
        await store.wait_for(None, min_version, None, wait_s)
    return await store.state(checksums_within_s)


@router.get("/layout", **needs("read"), summary="List the tensors of the model")
async def _policy_layout(store: Store) -> PolicyLayout:
    """Names, dtypes and shapes of the tensors that full weights have."""
    return await store.layout()


@router.get(
    "/versions/{version}/upload", **_changes, summary="Get the state of an upload", responses=refusals(VersionUnknown)
)
async def _upload_state(store: Store, version: NewVersion, name: Name = None) -> UploadState:
    """Progress of the upload of a version, so that an interrupted upload can continue."""
    return await store.upload_state(version, name)


@router.put(
    "/versions/{version}",
    response_model=PolicyUpdate,
    **_changes,
    summary="Push weights",
    description=policy_contract.__doc__,
    responses={
        200: {"description": "Every replica serves the new weights"},
        202: {"description": "Chunks of the weights are missing", "model": UploadState},
        **refusals(
            WeightsRefused,
            VersionUntried,
            SourceRefused,
            VersionRefused,
            VersionUnknown,
            ChunkMisplaced,
            ChunkDamaged,
            UpdateUnderWay,
            reads_body=True,
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                SAFETENSORS: content(BINARY),
                JSON: json_content(CheckpointSource(checkpoint="/checkpoints/step-12")),
            },
        },
        "parameters": [
            header_parameter(
                "Content-Range",
                "Which bytes of the upload the body holds: `bytes first-last/total`, with `*` for an unknown total. "
                "Without it the body is the whole upload.",
                "bytes 0-67108863/268435456",
            ),
            header_parameter(
                "Weights-Digest",
                "With the last chunk: names the content of the file, as `rollout_client.weights.checksum.file_digest` "
                "computes it. A repeated push is known by it.",
                "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            ),
            header_parameter("Content-Encoding", "`zstd` if the whole upload is one zstd stream.", "zstd"),
        ],
    },
)
async def _push_version(
    store: Store, version: NewVersion, options: Annotated[PushOptions, Query()], request: Request
) -> Response:
    if weights_media_type(request.headers) == JSON:
        source = await read_json_body(request, CheckpointSource, LARGEST_SOURCE_BYTES, SOURCE_ADVICE)
        return _json_reply(await store.load_checkpoint(version, source.checkpoint, options))
    chunk, name = chunk_of(request.headers), options.name
    if (repeated := await store.repeated_update(version, chunk.weights_digest, name)) is not None:
        return _json_reply(repeated)
    sender: str | None = None
    received_bytes = 0
    async for offset, data in checked_parts(chunk, request.stream()):
        sender = await store.write_chunk(version, sender, offset, data, name)
        received_bytes = offset + len(data)
    if not chunk.completes(received_bytes):
        return _json_reply(UploadState(version=version, received_bytes=received_bytes), 202)
    return _json_reply(await store.complete_upload(version, str(sender), options, chunk.is_zstd, chunk.weights_digest))


@router.delete(
    "/names/{name}", **_changes, summary="Drop a named policy", status_code=204, responses=refusals(PolicyUnknown)
)
async def _drop_policy(store: Store, name: Annotated[PolicyName, Path(description="The named policy.")]) -> None:
    """Stops serving a named policy. Generations in flight end; rollouts that need more fail (kind `policy`)."""
    await store.drop_policy(name)


@router.post(
    "/rollback",
    **_changes,
    summary="Go back to the weights of an older version",
    responses=refusals(VersionUnknown, VersionRefused, WeightsRefused, UpdateUnderWay, reads_body=True),
    openapi_extra=json_request(RollbackTarget(to=5)),
)
async def _rollback(store: Store, options: Annotated[SwitchOptions, Query()], request: Request) -> PolicyUpdate:
    """Makes the weights of an older version current again, as a new version; numbers only go up."""
    body = await read_json_body(request, RollbackTarget, LARGEST_SOURCE_BYTES, ROLLBACK_ADVICE)
    return await store.roll_back(body.to, body.version, options, body.name)


def _json_reply(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status, media_type=JSON)
