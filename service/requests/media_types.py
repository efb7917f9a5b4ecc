"""What the headers of a request say of its body: which types and encodings the service reads, and how long it is."""

from collections.abc import Collection, Mapping

from rollout_client.arrow.schema import ARROW
from rollout_client.policy_contract import SAFETENSORS
from service.problems import unreadable_body, unsupported_media_type

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
"""The type that `curl -d` sends when it is not told another one."""
OCTETS = "application/octet-stream"
IDENTITY = "identity"
MOST_DIGITS = 18


def rollout_media_type(headers: Mapping[str, str]) -> str:
    """`JSON` or `ARROW`. A body without a type is JSON, and so is `FORM`: the service reads no forms.

    Raises:
        RequestProblem: 415, the body has another type.
    """
    given = media_type_of(headers)
    if given in ("", JSON, FORM):
        return JSON
    if given == ARROW:
        return ARROW
    raise unsupported_media_type("content-type", given, [JSON, ARROW])


def refuse_other_than_json(headers: Mapping[str, str]) -> None:
    """Raises `RequestProblem` (415) unless the body is JSON or has no type."""
    given = media_type_of(headers)
    if given not in ("", JSON, FORM):
        raise unsupported_media_type("content-type", given, [JSON])


def weights_media_type(headers: Mapping[str, str]) -> str:
    """`JSON` for a `CheckpointSource` or `SAFETENSORS` for weights, which is also the default.

    Raises:
        RequestProblem: 415, the body has another type.
    """
    given = media_type_of(headers)
    if given == JSON:
        return JSON
    if given in ("", SAFETENSORS, OCTETS):
        return SAFETENSORS
    raise unsupported_media_type("content-type", given, [SAFETENSORS, JSON])


def content_coding(headers: Mapping[str, str], supported: Collection[str]) -> str:
    """The `Content-Encoding`, by default `IDENTITY`; `x-gzip` is `gzip` (RFC 9110).

    Raises:
        RequestProblem: 415, the encoding is not among `supported`.
    """
    given = headers.get("content-encoding", "").strip().lower().removeprefix("x-") or IDENTITY
    if given not in (IDENTITY, *supported):
        raise unsupported_media_type("content-encoding", given, [*supported, "the body without an encoding"])
    return given


def stated_length(headers: Mapping[str, str]) -> int:
    """The `Content-Length` in bytes; 0 if there is none.

    Raises:
        RequestProblem: 400, it is not a number of bytes.
    """
    given = headers.get("content-length", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS):
        raise unreadable_body(f"Content-Length {given[:MOST_DIGITS]!r} is not a number of bytes")
    return int(given)


def media_type_of(headers: Mapping[str, str]) -> str:
    """The `Content-Type` without its parameters, in lower case; empty if there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()
