"""Mutations of bodies. No I/O: the caller's generator of random numbers decides everything."""

import json
from copy import deepcopy
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
NUMBERS = tuple(n.to_bytes(4, "little", signed=True) for n in (0, 1, -1, 2**31 - 1, -(2**31), 2**20))
PLACE = "the place of a hostile text"
DEEPEST = 150


def mutated_json(body: bytes, draw: Random) -> bytes:
    """JSON with one to three of its values replaced, removed, nested or given a field, or with its bytes mutated."""
    if draw.random() < 0.2:
        return mutated_bytes(body, draw)
    root = [json.loads(body)]
    for _ in range(draw.randint(1, 3)):
        holder, key = draw.choice(places(root))
        hostile = deepcopy(draw.choice(HOSTILE_VALUES))
        kind = draw.randrange(4)
        if kind == 0 and holder is not root:
            del holder[key]
        elif kind == 1 and isinstance(holder[key], dict):
            holder[key][draw.choice(HOSTILE_NAMES)] = hostile
        else:
            holder[key] = nested(hostile, draw.randint(1, DEEPEST), draw) if kind == 2 else hostile
    if draw.random() < 0.8:
        return json.dumps(root[0]).encode()
    holder, key = draw.choice(places(root))
    holder[key] = PLACE
    text = json.dumps(root[0]).replace(json.dumps(PLACE), draw.choice(HOSTILE_TEXTS))
    return text.encode("utf-8", "surrogatepass")


def nested(value: Any, levels: int, draw: Random) -> Any:
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
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    return found


def mutated_bytes(body: bytes, draw: Random) -> bytes:
    """A stretch of bytes removed, repeated, flipped, or replaced by a large number or by others, one to four times."""
    mutated = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        begin = draw.randint(0, len(mutated))
        end = begin + draw.choice((0, 1, 4, draw.randint(1, 64), len(mutated)))
        part = mutated[begin:end]
        flipped = bytes(byte ^ 1 << draw.randrange(8) for byte in part)
        others = draw.randbytes(draw.randint(1, 16))
        mutated[begin:end] = draw.choice((b"", part * draw.randint(2, 8), flipped, draw.choice(NUMBERS), others))
    return bytes(mutated)


def mutated_safetensors(body: bytes, draw: Random) -> bytes:
    """Safetensors with a mutated header, a header of another length than is said, or mutated bytes."""
    length = int.from_bytes(body[:8], "little")
    header, data = body[8 : 8 + length], body[8 + length :]
    changed = mutated_json(header, draw)
    said = draw.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
    return draw.choice(
        (
            mutated_bytes(body, draw),
            said.to_bytes(8, "little") + header + data,
            len(changed).to_bytes(8, "little") + changed + data,
        )
    )


def mutated_lines(body: bytes, draw: Random) -> bytes:
    """Lines, as of NDJSON or of server-sent events: dropped, repeated, swapped, mutated or replaced, or any bytes."""
    if draw.random() < 0.2:
        return mutated_bytes(body, draw)
    lines = body.split(b"\n")
    place = draw.randrange(len(lines))
    line = lines[place]
    others: list[list[bytes]] = [[], [line] * draw.randint(2, 6), draw.sample(lines, len(lines))]
    others += [[mutated_bytes(line, draw)], [draw.choice(HOSTILE_LINES)]]
    lines[place : place + 1] = draw.choice(others)
    return b"\n".join(lines)
