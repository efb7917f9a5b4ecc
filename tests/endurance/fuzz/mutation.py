"""Mutations of bodies. No I/O: the caller's generator of random numbers decides everything."""

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63) - 1, 2**200, 0.5, -0.0, 1e308, 5e-324),
    *("", "a", "\x00", "\ud800", "\U0001f600", "../../../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/"),
    *("os:system", "__import__('os')", "{{7*7}}", "{% for x in range(9**9) %}{% endfor %}", "A" * 10_000, "9" * 5_000),
    *([], {}, [None], [[]], {"": {}}, {"__class__": "x"}, {"$ref": "#"}, [0] * 1_000, {str(n): n for n in range(300)}),
)
HOSTILE_TEXTS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "01", "0x10", "'a'", "undefined", '"\\ud800"', '"\\u0000"', "[" * 500),
    *('{"a":1,"a":2}', "[1,]", "/*", "\ufeff1", "1" * 5_000),
)
HOSTILE_NAMES = ("x", "", "__proto__", "import_path", "model", "path")
HOSTILE_LINES = (b"", b"null", b"[]", b"{}", b"\x00", b"data: {}", b"event: x", b": comment", b"{" * 5_000)
PLACE = "the place of a hostile text"
DEEPEST = 150


def mutated_json(body: bytes, draw: Random) -> bytes:
    """JSON with one to three of its values replaced, removed, repeated or nested, or with its bytes mutated."""
    if draw.random() < 0.2:
        return mutated_bytes(body, draw)
    document = json.loads(body)
    for _ in range(draw.randint(1, 3)):
        document = with_mutated_value(document, draw)
    if draw.random() < 0.2:
        text = json.dumps(with_value(document, draw, PLACE))
        return text.replace(json.dumps(PLACE), draw.choice(HOSTILE_TEXTS)).encode("utf-8", "surrogatepass")
    return json.dumps(document).encode()


def with_mutated_value(document: Any, draw: Random) -> Any:
    kind = draw.randrange(4)
    if kind == 0:
        return with_value(document, draw, draw.choice(HOSTILE_VALUES))
    if kind == 1:
        return without_value(document, draw)
    if kind == 2:
        return with_value(document, draw, nested(draw.randint(1, DEEPEST), draw))
    return with_field(document, draw)


def nested(levels: int, draw: Random) -> Any:
    value: Any = draw.choice(HOSTILE_VALUES)
    for _ in range(levels):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def places(document: Any) -> list[tuple[Any, Any]]:
    """Each container of the document with one of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            waiting.append(holder[key])
    return found


def with_value(document: Any, draw: Random, value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    found = places(copy)
    if not found:
        return value
    holder, key = draw.choice(found)
    holder[key] = value
    return copy


def without_value(document: Any, draw: Random) -> Any:
    copy = json.loads(json.dumps(document))
    found = places(copy)
    if found:
        holder, key = draw.choice(found)
        del holder[key]
    return copy


def with_field(document: Any, draw: Random) -> Any:
    copy = json.loads(json.dumps(document))
    objects = [copy, *(holder[key] for holder, key in places(copy))]
    objects = [each for each in objects if isinstance(each, dict)]
    if objects:
        draw.choice(objects)[draw.choice(HOSTILE_NAMES)] = draw.choice(HOSTILE_VALUES)
    return copy


def mutated_bytes(body: bytes, draw: Random) -> bytes:
    """Bytes flipped, cut, repeated, overwritten by a large number, or inserted, one to four times."""
    mutated = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        draw.choice(BYTE_MUTATIONS)(mutated, draw)
    return bytes(mutated)


def flip(body: bytearray, draw: Random) -> None:
    if body:
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)


def cut(body: bytearray, draw: Random) -> None:
    del body[draw.randint(0, len(body)) :]


def remove(body: bytearray, draw: Random) -> None:
    begin = draw.randint(0, len(body))
    del body[begin : begin + draw.randint(1, 16)]


def repeat(body: bytearray, draw: Random) -> None:
    begin = draw.randint(0, len(body))
    part = body[begin : begin + draw.randint(1, 64)]
    body[begin:begin] = part * draw.randint(1, 8)


def insert(body: bytearray, draw: Random) -> None:
    begin = draw.randint(0, len(body))
    body[begin:begin] = draw.randbytes(draw.randint(1, 16))


def overwrite(body: bytearray, draw: Random) -> None:
    number = draw.choice((0, 1, -1, 2**31 - 1, -(2**31), 2**20))
    begin = draw.randint(0, max(0, len(body) - 4))
    body[begin : begin + 4] = struct.pack("<i", number)


BYTE_MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (flip, cut, remove, repeat, insert, overwrite)


def mutated_safetensors(body: bytes, draw: Random) -> bytes:
    """Safetensors with a mutated header, a header of another length than is said, or mutated bytes."""
    kind = draw.randrange(3)
    if kind == 0:
        return mutated_bytes(body, draw)
    length = int.from_bytes(body[:8], "little")
    header, data = body[8 : 8 + length], body[8 + length :]
    if kind == 1:
        said = draw.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return said.to_bytes(8, "little") + header + data
    header = mutated_json(header, draw)
    return len(header).to_bytes(8, "little") + header + data


def mutated_lines(body: bytes, draw: Random) -> bytes:
    """Lines, as of NDJSON or of server-sent events: dropped, repeated, swapped, merged, or one of them mutated."""
    lines = body.split(b"\n")
    place = draw.randrange(len(lines))
    kind = draw.randrange(6)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines[place:place] = [lines[place]] * draw.randint(1, 5)
    elif kind == 2:
        draw.shuffle(lines)
    elif kind == 3:
        lines[place] = mutated_bytes(lines[place], draw)
    elif kind == 4:
        lines[place] = draw.choice(HOSTILE_LINES)
    else:
        return mutated_bytes(body, draw)
    return b"\n".join(lines)
