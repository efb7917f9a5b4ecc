"""The state machine of a resumable upload in chunks: which chunk is sent next, also after a disconnect. No I/O.

A disconnect resends at most one chunk. The last chunk names the digest of all of them: what was damaged on its way is
sent again as a whole. Memory holds the current chunk and one block of the source; earlier chunks can only be made again
by reading the source from its start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollout_client.calls.call import Call, Query, call_for, path_of
from rollout_client.calls.policy import PushAnswer, is_known
from rollout_client.contract.policy import SAFETENSORS, WEIGHTS_DIGEST, PolicyState, PolicyUpdate, UploadState, Version
from rollout_client.errors import UploadLost, needed_for
from rollout_client.weights.checksum import DigestedWeights
from rollout_client.weights.safetensors_file import BLOCK_BYTES, Data, Weights

ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `[begin, end)` of an upload."""

    begin: int
    body: bytes
    is_last: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.body)


def chunks(blocks: Iterable[Data], chunk_bytes: int) -> Iterator[Chunk]:
    """`blocks` as chunks of `chunk_bytes`; the last one may be shorter, and there is always one.

    Holds one chunk and one block in memory.
    """
    begin, held_bytes, parts = 0, 0, list[memoryview]()
    for block in blocks:
        rest = memoryview(block)
        while len(rest):
            if held_bytes == chunk_bytes:
                # A full chunk is given out only when more bytes follow, because the last one is marked.
                chunk = Chunk(begin, b"".join(parts))
                yield chunk
                begin, held_bytes, parts = chunk.end, 0, []
                del chunk
            part, rest = rest[: chunk_bytes - held_bytes], rest[chunk_bytes - held_bytes :]
            parts.append(part)
            held_bytes += len(part)
    yield Chunk(begin, b"".join(parts), is_last=True)


def compressed(blocks: Iterable[Data]) -> Iterator[bytes]:
    """`blocks` as one zstd stream; raises `ModuleNotFoundError` if zstandard is not installed."""
    with needed_for("Compressing weights", "weights"):
        import zstandard
    stream = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    for block in blocks:
        view = memoryview(block)
        for begin in range(0, len(view), BLOCK_BYTES):
            yield stream.compress(view[begin : begin + BLOCK_BYTES])
    yield stream.flush()


MAX_RESTARTS = 3


class Upload:
    """Uploads `weights` as `version`, chunk by chunk.

    The caller sends `next_call()` and passes the root of its answer to `handle_response`, until `update` is set.
    `is_in_doubt` stays true after a call without an answer: the caller then passes the service's state to
    `resume_from`.

    Args:
        query: the result of `push_query`. A delta is sent as one zstd stream (needs the `weights` extra).
        chunk_bytes: size of a chunk, at least 1.

    Raises:
        ModuleNotFoundError: zstandard is not installed; the message names the extra.
        ValueError: `chunk_bytes` is less than 1.
    """

    def __init__(self, weights: Weights, version: Version, query: Query, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes}: a chunk needs at least one byte.")
        self.version = version
        self.update: PolicyUpdate | None = None
        self.is_in_doubt = False
        self._is_compressed = query.get("kind") == "delta"
        self.total_bytes = None if self._is_compressed else weights.header.file_bytes
        """Size of the whole upload; if it is compressed, known only once its last chunk is made."""
        self.arrived_bytes = 0
        self.sent_bytes = 0
        """Bytes that were sent, those that were sent twice included."""
        self._weights = weights
        self.name = None if query.get("name") is None else str(query["name"])
        """The policy that gets the version; `None` for the one without a name."""
        self._query = query
        self._chunk_bytes = chunk_bytes
        self._restarts = 0
        self._chunk: Chunk | None = None
        self._content = DigestedWeights(weights)
        self._chunks = self._make_chunks()

    def next_call(self) -> Call[PushAnswer]:
        """The next chunk, or the missing part of the current one. Can be slow: it reads and compresses the source."""
        if self._chunk is None:
            self._chunk = next(self._chunks)
            if self._chunk.is_last:
                self.total_bytes = self._chunk.end
        self.is_in_doubt = True
        # The answer to the last chunk is the update. If it was lost, the whole chunk is sent again to get it.
        begin = self.arrived_bytes if self.arrived_bytes < self._chunk.end else self._chunk.begin
        body = self._chunk.body[begin - self._chunk.begin :]
        self.sent_bytes += len(body)
        headers = self._headers(self._chunk, begin)
        path = path_of("policy", "versions", self.version)
        return call_for(PushAnswer, "PUT", path, query=self._query, body=body, content_headers=headers)

    def handle_response(self, answer: PolicyUpdate | UploadState) -> None:
        """Raises `UploadLost` if the service has lost chunks that cannot be made again."""
        self.is_in_doubt = False
        if isinstance(answer, PolicyUpdate):
            self.update = answer
            self.arrived_bytes = self.total_bytes or 0
            return
        self._continue_at(answer.received_bytes)

    def resume_from(self, state: UploadState | PolicyState) -> None:
        """Continues from `state`: that of the upload or, if there is none, that of the policy.

        Raises:
            UploadLost: the service has lost chunks that cannot be made again.
        """
        self.is_in_doubt = False
        if isinstance(state, UploadState):
            self._continue_at(state.received_bytes)
        elif not is_known(state, self.version, self.name):
            self._continue_at(0)

    def _continue_at(self, received_bytes: int) -> None:
        chunk = self._chunk
        if chunk is None or not chunk.begin <= received_bytes <= chunk.end:
            self._restart(received_bytes)
            return
        self.arrived_bytes = received_bytes
        if received_bytes == chunk.end and not chunk.is_last:
            self._chunk = None

    def _restart(self, received_bytes: int) -> None:
        self._restarts += 1
        if not self._weights.is_repeatable or self._restarts > MAX_RESTARTS:
            why = (
                "each time it was sent" if self._weights.is_repeatable else "and sharded weights are gathered only once"
            )
            raise UploadLost(
                f"The service has {received_bytes} bytes of version {self.version} after {self.arrived_bytes} had "
                f"arrived, {why}: push it again."
            )
        self.arrived_bytes = 0
        self._chunk = None
        self._chunks = self._make_chunks()

    def _make_chunks(self) -> Iterator[Chunk]:
        blocks = self._content.blocks()
        return chunks(compressed(blocks) if self._is_compressed else blocks, self._chunk_bytes)

    def _headers(self, chunk: Chunk, begin: int) -> dict[str, str]:
        total = "*" if self.total_bytes is None else self.total_bytes
        headers = {"content-type": SAFETENSORS, "content-range": f"bytes {begin}-{chunk.end - 1}/{total}"}
        if self._is_compressed:
            headers["content-encoding"] = "zstd"
        if chunk.is_last and self._content.digest is not None:
            headers[WEIGHTS_DIGEST] = self._content.digest
        return headers
