"""The routes of `/blobs`: images that are uploaded once and named in messages.

Counterpart: `rollout_client/calls/async_client/info.py`.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from deployments.images.book import ImagesFull, ImagesNotConfigured, ImageUnknown
from rollout_client.contract.info import BlobInfo
from rollout_client.contract.messages import IMAGE_NAME
from service.http.openapi import BINARY, AuthorizedCaller, content, limited, needs, refusals
from service.http.request_body import OCTETS, media_type_of, read_body
from service.problems import unsupported_media_type
from service.rollout_requests.result_encoding import JSON, json_of
from service.routes.dependencies import Admitted, Images

IMAGE = "image/"
TYPES = ("image/png", "image/jpeg")
ADVICE = "send a smaller image, or raise images.max_image_bytes in the service's config"
FILE = {media_type: content(BINARY) for media_type in TYPES}
HEADERS = {
    # Equal names are equal contents. It is one key's, so that no cache between may answer another's request.
    "Cache-Control": "private, immutable",
    "X-Content-Type-Options": "nosniff",
}
BlobName = Annotated[str, Path(pattern=IMAGE_NAME, description="The `name` that `POST /blobs` has answered.")]
router = APIRouter(prefix="/blobs", tags=["blobs"], responses=refusals(ImagesNotConfigured))


@router.post(
    "",
    response_model=BlobInfo,
    **needs("rollout"),
    summary="Upload an image",
    status_code=201,
    responses={
        201: {"description": "The image is kept; see `Location`"},
        429: limited(ImagesFull),
        **refusals(reads_body=True),
    },
    openapi_extra={"requestBody": {"required": True, "content": FILE}},
)
async def _upload_blob(request: Request, images: Images, admitted: Admitted, caller: AuthorizedCaller) -> Response:
    """Keeps a PNG or JPEG file, for messages that name it: `{"type": "image", "image": "sha256:..."}`.

    The body is the file. Sent again it has the same name, and is kept for the whole time from then on.
    """
    given = media_type_of(request.headers)
    if not given.startswith(IMAGE) and given not in ("", OCTETS):
        raise unsupported_media_type("content-type", given, TYPES)
    body = await read_body(request, images.settings.max_image_bytes, ADVICE, hold=admitted.hold_body)
    info = await images.upload(bytes(body), caller)
    return Response(json_of(info), 201, {"Location": f"/v1/blobs/{info.name}"}, media_type=JSON)


@router.get(
    "/{name}",
    response_class=Response,
    **needs("rollout"),
    summary="Get an image",
    responses={200: {"description": "The file", "content": FILE}, **refusals(ImageUnknown)},
)
async def _blob(name: BlobName, images: Images, caller: AuthorizedCaller) -> Response:
    """The file as it was uploaded, or as an environment has shown it. Reading it is a use."""
    data, media_type = await images.download(name, caller)
    return Response(data, headers=HEADERS, media_type=media_type)
