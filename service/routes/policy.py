"""The routes of `/policy`: how weights come in over HTTP. What becomes of them is the policy store's business."""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    PolicyNotCurrent,
    SourceRefused,
    TransferRefused,
    UpdateUnderWay,
    VersionRefused,
    VersionUnknown,
    WeightsRefused,
)
from deployments.policy.store_client import PolicyStoreClient
from rollout_client import policy_contract
from rollout_client.policy_contract import (
    CheckpointSource,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    SwitchOptions,
    TransferInit,
    TransferUpdate,
    TransferWorld,
    UploadState,
)
from rollout_client.problem_contract import FieldProblem
from service.responses.problems import problem_of, problem_responses, unreadable_body

JSON = "application/json"
FORWARDED_BYTES = 4 * 2**20
LONGEST_JSON_BYTES = 2**20
LARGEST_BODY_BYTES = 256 * 2**20
CHECKSUMS_WITHIN_S = 5.0
LONGEST_CHECKSUMS_S = 600.0
LARGEST_VERSION = 2**63 - 1
NewVersion = Annotated[int, Path(ge=1, le=LARGEST_VERSION)]
PUSH_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}},
            JSON: {"schema": CheckpointSource.model_json_schema()},
        },
    }
}
PUSH_ANSWERS = {
    202: {"model": UploadState, "description": "Pieces of the weights are missing"},
    **problem_responses(
        WeightsRefused,
        SourceRefused,
        VersionRefused,
        VersionUnknown,
        ChunkMisplaced,
        ChunkDamaged,
        UpdateUnderWay,
        reads_body=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a request's headers say of its body: bytes `[first, end)` of an upload of `total` bytes, where known."""

    first: int = 0
    end: int | None = None
    total: int | None = None
    digest: str | None = None
    whole_digest: str | None = None
    is_zstd: bool = False
    is_all: bool = False

    def completes(self, received: int) -> bool:
        return self.is_all or received == self.total


def policy_routes(store: PolicyStoreClient) -> APIRouter:
    routes = APIRouter(prefix="/policy")

    @routes.get("", responses=problem_responses(PolicyNotCurrent))
    async def policy(
        min_version: Annotated[int, Query(ge=0)] = 0,
        wait_s: Annotated[float, Query(ge=0)] = 0,
        checksums_within_s: Annotated[float, Query(ge=0, le=LONGEST_CHECKSUMS_S)] = CHECKSUMS_WITHIN_S,
    ) -> PolicyState:
        """Which weights are current, which are kept, and what each generator replica holds.

        Checksums of the engines' weights are made after each change, beside the generations: the answer waits for them
        at most `checksums_within_s`, and says null for those that are not there then.
        """
        if min_version:
            await store.wait_for(min_version, None, wait_s)
        return await store.state(checksums_within_s)

    @routes.get("/layout")
    async def layout() -> PolicyLayout:
        """The tensors of the model: their names, dtypes and shapes."""
        return await store.layout()

    @routes.get("/versions/{version}/upload", responses=problem_responses(VersionUnknown))
    async def upload(version: NewVersion) -> UploadState:
        """How much of a version has arrived, so that an upload that broke off can go on."""
        return await store.upload_state(version)

    @routes.put(
        "/versions/{version}",
        openapi_extra=PUSH_BODY,
        response_model=PolicyUpdate,
        responses=PUSH_ANSWERS,
        description=policy_contract.__doc__,
    )
    async def push(version: NewVersion, options: Annotated[PushOptions, Query()], request: Request) -> Response:
        if request.headers.get("content-type", "").lower().startswith(JSON):
            source = await checkpoint_source(request)
            return answer(await store.load_checkpoint(version, source.checkpoint, options))
        piece = piece_of(request)
        refuse_large_body(int(request.headers.get("content-length", 0)))
        if (repeated := await store.repeated_update(version, piece.whole_digest)) is not None:
            return answer(repeated)
        sender = await store.begin_chunk(version, piece.first)
        state = await receive(store, version, sender, piece, request)
        if not piece.completes(state.received_bytes):
            return answer(state, 202)
        return answer(await store.complete_upload(version, sender, options, piece.is_zstd, piece.whole_digest))

    @routes.post("/transfer/init", responses=problem_responses(TransferRefused))
    async def init_transfer(body: TransferInit) -> TransferWorld:
        """Lets every replica meet the trainer, each at ranks of its own; blocks until all have met."""
        return TransferWorld(world_size=await store.init_transfer(body.init_info))

    @routes.post("/transfer/start", status_code=204, responses=problem_responses(TransferRefused, UpdateUnderWay))
    async def start_transfer(options: Annotated[SwitchOptions, Query()]) -> None:
        """Pauses every replica for the weights to come."""
        await store.start_transfer(options)

    @routes.post("/transfer/update", status_code=204, responses=problem_responses(TransferRefused))
    async def update_transfer(body: Annotated[TransferUpdate, Body()]) -> None:
        """Receives what the trainer sends meanwhile."""
        await store.update_transfer(body.update_info)

    @routes.post("/transfer/finish", responses=problem_responses(TransferRefused, VersionRefused))
    async def finish_transfer(version: Annotated[int | None, Query(ge=1, le=LARGEST_VERSION)] = None) -> PolicyUpdate:
        """What was sent is `version`, by default the next; replicas go on with it."""
        return await store.finish_transfer(version)

    return routes


async def checkpoint_source(request: Request) -> CheckpointSource:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_JSON_BYTES:
            raise unreadable_body(f"a JSON body of more than {LONGEST_JSON_BYTES} bytes is no checkpoint's place")
    try:
        return CheckpointSource.model_validate_json(bytes(body))
    except ValidationError as error:
        raise problem_of(error) from error


async def receive(store: PolicyStoreClient, version: int, sender: str, piece: Piece, request: Request) -> UploadState:
    """Hands the body on as it comes; it counts once it is whole.

    Raises:
        ChunkMisplaced: as the store says.
        ChunkDamaged: the body is not what its headers say.
    """
    digest = hashlib.sha256()
    waiting = bytearray()
    end = piece.first
    async for chunk in request.stream():
        digest.update(chunk)
        waiting += chunk
        refuse_large_body(end + len(waiting) - piece.first)
        if len(waiting) >= FORWARDED_BYTES:
            await store.write_chunk(version, sender, end, bytes(waiting))
            end += len(waiting)
            waiting.clear()
    await store.write_chunk(version, sender, end, bytes(waiting))
    end += len(waiting)
    if piece.end is not None and end != piece.end:
        raise damaged("content-range", f"{end - piece.first} bytes came where {piece.end - piece.first} were due", end)
    if piece.digest is not None and digest.hexdigest() != piece.digest:
        raise damaged("content-digest", f"the body's sha-256 is {digest.hexdigest()}; send it again", piece.digest)
    return await store.end_chunk(version, sender, end, end if piece.is_all else piece.total)


def refuse_large_body(size_bytes: int) -> None:
    """What the store has not taken in yet waits in the memory of Serve's proxy: raises `RequestProblem`."""
    if size_bytes > LARGEST_BODY_BYTES:
        raise unreadable_body(
            f"it has more than {LARGEST_BODY_BYTES} bytes; send it in pieces with Content-Range, as the client does"
        )


def piece_of(request: Request) -> Piece:
    """Raises `RequestProblem` where the headers cannot be read."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise unreadable_body(f"weights are read as they are or with Content-Encoding zstd, not {encoding}")
    digests = {name: digest_of(name, request.headers.get(name)) for name in ("content-digest", "repr-digest")}
    content_range = request.headers.get("content-range")
    piece = Piece(
        digest=digests["content-digest"],
        whole_digest=digests["repr-digest"],
        is_zstd=encoding == "zstd",
        is_all=content_range is None,
    )
    return piece if content_range is None else placed(piece, content_range)


def placed(piece: Piece, content_range: str) -> Piece:
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", content_range)
    if match is None:
        raise unreadable_body(f"Content-Range {content_range!r} is not of the form bytes first-last/total")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    if last < first or (total is not None and last >= total):
        raise unreadable_body(f"Content-Range {content_range!r} contradicts itself")
    return replace(piece, first=first, end=last + 1, total=total)


def digest_of(header: str, value: str | None) -> str | None:
    """The sha-256 (hex) in a digest header of RFC 9530; other algorithms are passed over.

    Raises:
        RequestProblem: there is a sha-256, and it is not written as the header has it.
    """
    members = dict(member.strip().partition("=")[::2] for member in (value or "").split(","))
    if "sha-256" not in members:
        return None
    match = re.fullmatch(":(.*):", members["sha-256"])
    if match is None:
        raise unreadable_body(f"the sha-256 in {header} does not stand between colons")
    try:
        return base64.b64decode(match[1], validate=True).hex()
    except binascii.Error as error:
        raise unreadable_body(f"the sha-256 in {header} is no base64: {error}") from error


def damaged(field: str, message: str, value: Any) -> ChunkDamaged:
    return ChunkDamaged(FieldProblem(field=field, message=message, value=value))


def answer(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status, media_type=JSON)
