"""The encoding of a session in the storage. No I/O.

A session is kept as a small record (`SessionHead`), which changes, and entries: what it was opened with, each call by
its place in the record, once, and each reward. The same calls in their order make the same record.
All is JSON, with ids and log-probabilities as base64 of int32 and float32. Columns of a call, if it has any, follow its
JSON and a line break as bytes: base64 of megabytes would keep the store's loop.
"""

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from math import prod
from typing import Any

from deployments.protocols.generation import WeightSpan, packed_ids, packed_logprobs
from deployments.protocols.token_columns import numbers_of
from deployments.sessions.records import (
    ChatContext,
    EngineCall,
    GeneratedMessage,
    OpenSession,
    Plan,
    RenderedMessage,
)
from deployments.sessions.session_record import SessionRecord
from deployments.storage.storage import EntryName
from rollout_client.contract.messages import NUMBER_BYTES, MediaRange, SampledWith
from rollout_client.contract.sessions import MessageDrift, SessionLimits, SessionRequest

_LINE_BREAK = b"\n"
"""JSON has none."""
OPENED = EntryName("opened", 0)
_NO_IDS = packed_ids(())


@dataclass(slots=True, kw_only=True)
class SessionHead:
    """The part of a session that a store needs at its start, before anybody asks for it. Times count from 1970."""

    namespace: str
    limits: SessionLimits
    opened_at: float
    used_at: float
    deadline_at: float | None
    is_ended: bool = False
    calls: int = 0
    """Those that have begun; stored without those that were in flight."""


@dataclass(slots=True)
class ReadSession:
    """The contents of a session's entries."""

    opened: OpenSession
    record: SessionRecord = field(default_factory=SessionRecord)


def call_name(place: int) -> EntryName:
    """The entry of the call at this place among those that were recorded."""
    return EntryName("call", place)


def reward_name(number: int) -> EntryName:
    """The entry of a reward; `number` is `SessionRecord.reward_number`."""
    return EntryName("reward", number)


def head_bytes(head: SessionHead) -> bytes:
    return written({**asdict(head), "limits": head.limits.model_dump(mode="json")})


def head_of(data: bytes) -> SessionHead:
    fields = json.loads(data)
    return SessionHead(**{**fields, "limits": SessionLimits.model_validate(fields["limits"])})


def opened_entry(opened: OpenSession) -> bytes:
    request = json.loads(opened.request.model_dump_json(exclude_unset=True))
    return written(
        {name: getattr(opened, name) for name in ("id", "namespace", "key_sha256", "base_url", "share_id")}
        | {"request": request}
    )


def opened_of(data: bytes) -> OpenSession:
    fields = json.loads(data)
    return OpenSession(**{**fields, "request": SessionRequest.model_validate(fields["request"])})


def reward_entry(parts: Mapping[str, float], generation_id: str | None) -> bytes:
    return written({"parts": dict(parts), "generation_id": generation_id})


def call_entry(call: EngineCall) -> bytes:
    """The fields that `SessionRecord.add` reads: of the plan neither ids, which the record has, nor the version."""
    plan = call.plan
    columns = [column.data for generated in call.generated for column in generated.columns.values()]
    fields = written(
        {
            "id": call.id,
            "context": [call.context.tools, call.context.chat_template_kwargs],
            "after": plan.after,
            "covered": plan.covered,
            "drift": [message.model_dump(mode="json") for message in plan.drift],
            "seen": [[number, form.hex()] for number, form in plan.seen],
            "rendered": [_rendered_fields(rendered) for rendered in call.rendered],
            "generation_prompt": _ids_text(call.generation_prompt),
            "generated": [generated_fields(generated) for generated in call.generated],
        }
    )
    return b"".join([fields, _LINE_BREAK, *columns]) if columns else fields


def call_of(data: bytes) -> EngineCall:
    text, _, columns = data.partition(_LINE_BREAK)
    fields, numbers = json.loads(text), BytesIO(columns)
    plan = Plan(
        after=fields["after"],
        covered=fields["covered"],
        token_ids=_NO_IDS,
        response_ids=_NO_IDS,
        drift=tuple(MessageDrift.model_validate(message) for message in fields["drift"]),
        seen=tuple((number, bytes.fromhex(form)) for number, form in fields["seen"]),
    )
    return EngineCall(
        id=fields["id"],
        context=ChatContext(*fields["context"]),
        plan=plan,
        rendered=[_rendered_of(*rendered) for rendered in fields["rendered"]],
        generation_prompt=ids_of(fields["generation_prompt"]),
        generated=[generated_of(generated, numbers) for generated in fields["generated"]],
    )


def session_of(entries: Mapping[EntryName, bytes]) -> ReadSession:
    """The session that all its entries encode."""
    read = ReadSession(opened_of(entries[OPENED]))
    for place in sorted(name.number for name in entries if name.kind == "call"):
        read.record.add(call_of(entries[call_name(place)]))
    for name, data in entries.items():
        if name.kind == "reward":
            reward = json.loads(data)
            read.record.reward(reward["parts"], reward["generation_id"])
    return read


def _rendered_fields(rendered: RenderedMessage) -> list[Any]:
    """Message and ids; and name, start and end of each image where the message shows some."""
    fields: list[Any] = [rendered.message, _ids_text(rendered.token_ids)]
    places = [[shown.media, shown.start, shown.end] for shown in rendered.mm_ranges]
    return [*fields, places] if places else fields


def _rendered_of(message: Any, ids: str, places: Sequence[Any] = ()) -> RenderedMessage:
    mm_ranges = [MediaRange.model_construct(media=media, start=start, end=end) for media, start, end in places]
    return RenderedMessage(message, ids_of(ids), mm_ranges)


def generated_fields(generated: GeneratedMessage) -> dict[str, Any]:
    columns = {name: [column.dtype, column.shape] for name, column in generated.columns.items()}
    fields = {
        "id": generated.id,
        "message": generated.message,
        "text": generated.text,
        "token_ids": _ids_text(generated.token_ids),
        "logprobs": _text_of_numbers(packed_logprobs(generated.logprobs)),
        "finish_reason": generated.finish_reason,
        "weight_versions": [[span.version, span.start, span.end] for span in generated.weight_versions],
        "is_constrained": generated.is_constrained,
    }
    if generated.sampled_with is not None:
        fields["sampled_with"] = generated.sampled_with.model_dump(mode="json")
    return fields | {"columns": columns} if columns else fields


def generated_of(fields: Mapping[str, Any], numbers: BytesIO) -> GeneratedMessage:
    """`numbers` are those of its columns and of the messages after it."""
    logprobs = array("f", b64decode(fields["logprobs"]))
    spans = tuple(WeightSpan(*span) for span in fields["weight_versions"])
    columns = {
        name: numbers_of(numbers.read(prod(shape) * NUMBER_BYTES[dtype]), dtype, shape[1:])
        for name, (dtype, shape) in fields.get("columns", {}).items()
    }
    packed = {
        "token_ids": ids_of(fields["token_ids"]),
        "logprobs": logprobs,
        "weight_versions": spans,
        "columns": columns,
    }
    if (sampled_with := fields.get("sampled_with")) is not None:
        packed["sampled_with"] = SampledWith.model_validate(sampled_with)
    return GeneratedMessage(**{**fields, **packed})


def _ids_text(token_ids: Sequence[int]) -> str:
    return _text_of_numbers(packed_ids(token_ids))


def ids_of(text: str) -> "array[int]":
    return array("i", b64decode(text))


def _text_of_numbers(numbers: "array[int] | array[float]") -> str:
    return b64encode(numbers).decode()


def written(fields: Mapping[str, Any]) -> bytes:
    # The standard library alone writes half of a surrogate pair, which the JSON of a call can spell.
    return json.dumps(fields, default=str, separators=(",", ":")).encode()
