"""An upload of weights in pieces: what is sent next, and how it goes on after a break. No I/O.

What is held is the piece in hand and one block of the source; pieces before it can only be made again from the start.
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollout_client.errors import UploadLost
from rollout_client.optional_dependencies import needed_for
from rollout_client.policy_calls import Query, is_known, piece_call
from rollout_client.policy_contract import SAFETENSORS, PolicyState, PolicyUpdate, UploadState, Version
from rollout_client.rollout_calls import Call
from rollout_client.weights.safetensors_file import BLOCK_BYTES, Data
from rollout_client.weights.sources import Weights

CHUNK_BYTES = 32 << 20
MOST_RESTARTS = 3
ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an upload from `begin` on; the last one knows the digest of them all."""

    begin: int
    body: bytes
    repr_digest: str | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.body)

    @property
    def is_last(self) -> bool:
        return self.repr_digest is not None


class Upload:
    """Brings `weights` to the service as `version`.

    The caller sends `next_call()` and hands in what came back with `answered`, until there is an `update`. After a call
    that was not answered `is_in_doubt` is true: `found` then wants to know what the service has.

    Args:
        query: as `push_query` makes it.
        chunk_bytes: size of a piece.
        is_compressed: as one zstd stream (needs the `weights` extra).

    Raises:
        ModuleNotFoundError: zstandard is missing; the message says what to install.
        ValueError: `chunk_bytes` is less than 1.
    """

    def __init__(
        self,
        weights: Weights,
        version: Version,
        query: Query,
        chunk_bytes: int = CHUNK_BYTES,
        is_compressed: bool = False,
    ) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes}: a piece needs at least one byte.")
        self.version = version
        self.update: PolicyUpdate | None = None
        self.is_in_doubt = False
        self.total_bytes = None if is_compressed else weights.header.file_bytes
        """Of all pieces together; unknown until the last one where they are compressed."""
        self.arrived_bytes = 0
        self._weights = weights
        self._query = query
        self._chunk_bytes = chunk_bytes
        self._is_compressed = is_compressed
        self._restarts = 0
        self._piece: Piece | None = None
        self._pieces = self._cut()

    def next_call(self) -> Call[PolicyUpdate | UploadState]:
        """The next piece, or what is missing of the one that was sent before. Makes the piece, which may take long."""
        if self._piece is None:
            self._piece = next(self._pieces)
            if self._piece.is_last:
                self.total_bytes = self._piece.end
        self.is_in_doubt = True
        # A last piece that has arrived and was not answered is sent again whole: it asks for the answer.
        begin = self.arrived_bytes if self.arrived_bytes < self._piece.end else self._piece.begin
        body = self._piece.body[begin - self._piece.begin :]
        return piece_call(self.version, self._query, body, self._headers(self._piece, begin, body))

    def answered(self, answer: PolicyUpdate | UploadState) -> None:
        """Raises `UploadLost` where the service has lost pieces and they cannot be made again."""
        self.is_in_doubt = False
        if isinstance(answer, PolicyUpdate):
            self.update = answer
            self.arrived_bytes = self.total_bytes or 0
            return
        self._go_on_from(answer.received_bytes)

    def found(self, state: UploadState | PolicyState) -> None:
        """What the service has of the version: the state of its upload or, where there is none, of the whole policy.

        Raises:
            UploadLost: pieces are lost and cannot be made again.
        """
        self.is_in_doubt = False
        if isinstance(state, UploadState):
            self._go_on_from(state.received_bytes)
        elif not is_known(state, self.version):
            self._go_on_from(0)

    def _go_on_from(self, received_bytes: int) -> None:
        piece = self._piece
        if piece is None or not piece.begin <= received_bytes <= piece.end:
            self._begin_anew(received_bytes)
            return
        self.arrived_bytes = received_bytes
        if received_bytes == piece.end and not piece.is_last:
            self._piece = None

    def _begin_anew(self, received_bytes: int) -> None:
        self._restarts += 1
        if not self._weights.can_repeat or self._restarts > MOST_RESTARTS:
            why = "each time it was sent" if self._weights.can_repeat else "and sharded weights are gathered only once"
            raise UploadLost(
                f"The service has {received_bytes} bytes of version {self.version} after {self.arrived_bytes} had "
                f"arrived, {why}: push it again."
            )
        self.arrived_bytes = 0
        self._piece = None
        self._pieces = self._cut()

    def _cut(self) -> Iterator[Piece]:
        blocks = self._weights.blocks()
        return pieces(compressed(blocks) if self._is_compressed else blocks, self._chunk_bytes)

    def _headers(self, piece: Piece, begin: int, body: bytes) -> dict[str, str]:
        total = "*" if self.total_bytes is None else self.total_bytes
        headers = {
            "content-type": SAFETENSORS,
            "content-range": f"bytes {begin}-{piece.end - 1}/{total}",
            "content-digest": digest_field(hashlib.sha256(body).digest()),
        }
        if self._is_compressed:
            headers["content-encoding"] = "zstd"
        if piece.repr_digest is not None:
            headers["repr-digest"] = piece.repr_digest
        return headers


def pieces(blocks: Iterable[Data], chunk_bytes: int) -> Iterator[Piece]:
    """`blocks` cut anew into pieces of `chunk_bytes`, the last one shorter."""
    digest = hashlib.sha256()
    begin, held, parts = 0, 0, list[memoryview]()
    for block in blocks:
        rest = memoryview(block)
        while len(rest):
            if held == chunk_bytes:
                # Only now is it clear that more comes after it.
                piece = Piece(begin, b"".join(parts))
                digest.update(piece.body)
                yield piece
                begin, held, parts = piece.end, 0, []
                del piece
            part, rest = rest[: chunk_bytes - held], rest[chunk_bytes - held :]
            parts.append(part)
            held += len(part)
    body = b"".join(parts)
    digest.update(body)
    yield Piece(begin, body, digest_field(digest.digest()))


def compressed(blocks: Iterable[Data]) -> Iterator[bytes]:
    """`blocks` as one zstd stream; raises `ModuleNotFoundError` where zstandard is missing."""
    with needed_for("Compressing weights", "weights"):
        import zstandard
    stream = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    for block in blocks:
        whole = memoryview(block)
        for begin in range(0, len(whole), BLOCK_BYTES):
            yield stream.compress(whole[begin : begin + BLOCK_BYTES])
    yield stream.flush()


def digest_field(sha256: bytes) -> str:
    """As `Content-Digest` and `Repr-Digest` say it (RFC 9530)."""
    return f"sha-256=:{b64encode(sha256).decode()}:"
