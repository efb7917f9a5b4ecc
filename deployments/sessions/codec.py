"""The encoding of a session in the storage. No I/O.

A session is kept as a small record (`SessionHead`), which changes, and entries: what it was opened with, each call by
its place among those that were recorded (`call`), once, and each reward by `SessionRecord.reward_number` (`reward`).
The same calls in their order make the same record.
All is JSON by the names of the fields, with ids and log-probabilities as base64 of int32 and float32. Columns of a
call, if it has any, follow its JSON and a line break as bytes: base64 of megabytes would keep the store's loop.
"""

import json
from array import array
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from io import BytesIO
from math import prod
from typing import Any

from pydantic import BaseModel, TypeAdapter

from deployments.protocols.token_columns import numbers_of
from deployments.sessions.records import EngineCall, OpenSession
from deployments.sessions.session_record import SessionRecord
from deployments.storage.storage import EntryName
from rollout_client.contract.messages import NUMBER_BYTES, PackedNumbers
from rollout_client.contract.sessions import SessionLimits

_LINE_BREAK = b"\n"
"""JSON has none."""
OPENED = EntryName("opened", 0)
FORM = 1
"""The form of entries: others cannot be read."""


@dataclass(slots=True, kw_only=True)
class SessionHead:
    """The part of a session that a store needs at its start, before anybody asks for it. Times count from 1970."""

    namespace: str
    limits: SessionLimits
    opened_at: float
    used_at: float
    deadline_at: float | None
    is_ended: bool = False
    form: int = 0
    """Form of its entries. Earlier versions of the service stored none."""


@dataclass(slots=True)
class ReadSession:
    """The contents of a session's entries."""

    opened: OpenSession
    record: SessionRecord = field(default_factory=SessionRecord)


_HEAD, _OPENED, _CALL = TypeAdapter(SessionHead), TypeAdapter(OpenSession), TypeAdapter(EngineCall)


def head_of(data: bytes) -> SessionHead:
    return _HEAD.validate_python(json.loads(data))


def call_entry(call: EngineCall) -> bytes:
    columns: list[bytes] = []
    text = written(call, columns)
    return b"".join([text, _LINE_BREAK, *columns]) if columns else text


def call_of(data: bytes) -> EngineCall:
    text, _, columns = data.partition(_LINE_BREAK)
    call, numbers = json.loads(text), BytesIO(columns)
    for generated in call["generated"]:
        generated["columns"] = {
            name: numbers_of(numbers.read(prod(shape) * NUMBER_BYTES[dtype]), dtype, shape[1:])
            for name, (dtype, shape) in generated["columns"].items()
        }
    return _CALL.validate_python(call)


def session_of(entries: Mapping[EntryName, bytes]) -> ReadSession:
    """The session that all its entries encode."""
    read = ReadSession(_OPENED.validate_python(json.loads(entries[OPENED])))
    for name in sorted(name for name in entries if name.kind == "call"):
        read.record.add(call_of(entries[name]))
    for name, data in entries.items():
        if name.kind == "reward":
            reward = json.loads(data)
            read.record.reward(reward["parts"], reward["generation_id"])
    return read


def written(value: object, columns: list[bytes] | None = None) -> bytes:
    """The JSON of a value. Args: `columns` takes the bytes of its packed numbers, which are in no JSON."""
    # The standard library alone writes half of a surrogate pair, which the JSON of a call can spell.
    default = partial(_json_value, columns=[] if columns is None else columns)
    return json.dumps(value, default=default, separators=(",", ":")).encode()


def _json_value(value: object, columns: list[bytes]) -> Any:
    match value:
        case PackedNumbers():
            columns.append(value.data)
            return [value.dtype, value.shape]
        case BaseModel():
            return value.model_dump(mode="json", exclude_unset=True)
        case array():
            return b64encode(value).decode()
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return str(value)
