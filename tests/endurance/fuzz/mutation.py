"""Mutations of bodies. No I/O: the caller's generator of random numbers decides everything.

The values of JSON are schemathesis's to change (`routes.py`).
"""

from random import Random

HOSTILE_LINES = (b"", b"null", b"[]", b"{}", b"\x00", b"data: {}", b"event: x", b": comment", b"{" * 5_000)
NUMBERS = tuple(n.to_bytes(4, "little", signed=True) for n in (0, 1, -1, 2**31 - 1, -(2**31), 2**20))


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
    changed = mutated_bytes(header, draw)
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
