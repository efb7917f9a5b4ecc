"""The calls of `/blobs`: the request and the response of each. No I/O."""

from collections.abc import Mapping
from urllib.parse import quote

from rollout_client.calls.call import Call, call_for
from rollout_client.contract.blobs import BlobInfo

BLOBS = "/blobs"
ANY_IMAGE = "image/*"
OCTETS: Mapping[str, str] = {"content-type": "application/octet-stream"}
"""The service reads the type from the content."""


def upload_call(image: bytes) -> Call[str]:
    """Its result is the name of the image."""
    call = call_for(BlobInfo, "POST", BLOBS, body=image, content_headers=OCTETS)
    return call.picking(lambda info: info.name)


def image_call(name: str) -> Call[bytes]:
    return Call("GET", f"{BLOBS}/{quote(name, safe='')}", bytes, accept=ANY_IMAGE)
