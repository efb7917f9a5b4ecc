"""Methods of the client that play rollouts and score tokens, and the stream of a request's rollouts."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Unpack

import httpx

from rollout_client.calls.async_client.connection import AsyncResource, body_chunks
from rollout_client.calls.call import JSON, NDJSON, Call, call_for, nothing
from rollout_client.calls.ndjson import NdjsonReader, PositionedSample, StreamedRollouts, in_input_order
from rollout_client.calls.options import CallLimits
from rollout_client.calls.rollouts import (
    HEARTBEAT_S,
    RolloutOptions,
    Samples,
    ScoreOptions,
    group_size,
    rollout_body,
    rollout_count,
    score_body,
)
from rollout_client.contract.info import ScoreResponse
from rollout_client.contract.rollouts import SampleResult
from rollout_client.errors import RolloutError, needed_for
from rollout_client.responses import PlayedRollouts

if TYPE_CHECKING:
    from rollout_client.calls.arrow_bodies import ArrowResponse


class AsyncRolloutStream(StreamedRollouts):
    """Rollouts in the order in which they finish.

    async with client.stream(samples) as rollouts:
        async for sample in rollouts:
            ...
    rollouts.summary
    """

    def __init__(self, lines: NdjsonReader, samples: AsyncIterator[PositionedSample]) -> None:
        super().__init__(lines)
        self._samples = samples

    def __aiter__(self) -> AsyncIterator[SampleResult]:
        return (sample async for _, sample in self._samples)

    def with_positions(self) -> AsyncIterator[PositionedSample]:
        """Each sample with its position in the `samples` that `rollout` would have returned."""
        return self._samples


async def positioned_samples(
    response: httpx.Response, limits: CallLimits, lines: NdjsonReader
) -> AsyncGenerator[PositionedSample, None]:
    async with aclosing(body_chunks(response, limits)) as chunks:
        async for chunk in chunks:
            for positioned in lines.feed(chunk):
                yield positioned
    lines.end()


class AsyncRolloutCalls(AsyncResource):
    async def rollout(
        self, samples: Samples = (), *, progress: bool = False, **options: Unpack[RolloutOptions]
    ) -> PlayedRollouts:
        """Plays `samples` and returns their rollouts in input order, those of one sample next to each other.

        Without `samples`, `samples_from` says which samples of the service are played.

        With `progress`, a bar on stderr counts them as they finish (needs the `cli` extra).
        """
        if not progress:
            call = call_for(PlayedRollouts, "POST", "/rollout", body=rollout_body(samples, options))
            return await self._connection.result(call, self._connection.settings.limits(options))
        from rollout_client.calls.progress import rollout_bar

        by_position: dict[int, SampleResult] = {}
        with rollout_bar(rollout_count(samples, options)) as count:
            async with self.stream(samples, **options) as rollouts:
                async for position, sample in rollouts.with_positions():
                    by_position[position] = sample
                    count(sample)
                return in_input_order(rollouts.summary, by_position)

    async def rollout_arrow(self, samples: Samples = (), **options: Unpack[RolloutOptions]) -> "ArrowResponse":
        """`rollout` with its response as Arrow: a third of the bytes, and `to_tensors` makes no Python objects of it.

        Raises `ModuleNotFoundError` without the `arrow` extra.
        """
        with needed_for("Arrow", "arrow"):
            from rollout_client.arrow.schema import ARROW
            from rollout_client.calls.arrow_bodies import joined_body, read_response

        body = rollout_body(samples, options)
        call = Call("POST", "/rollout", lambda chunks: read_response(joined_body(chunks)), ARROW, body=body)
        return await self._connection.result(call, self._connection.settings.limits(options))

    @asynccontextmanager
    async def stream(
        self, samples: Samples = (), **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[AsyncRolloutStream]:
        """Plays `samples` and yields each rollout when it ends: `async with client.stream(samples) as rollouts`.

        The request is sent when the block begins. Leaving the block early ends it, and the service cancels what is
        still running.
        """
        headers = {"content-type": JSON, "prefer": f"heartbeat={HEARTBEAT_S}"}
        body = rollout_body(samples, options)
        call = Call("POST", "/rollout", nothing, NDJSON, body=body, content_headers=headers)
        lines = NdjsonReader(rollout_count(samples, options), group_size(options))
        limits = self._connection.settings.limits(options)
        is_kept = False
        try:
            response = await self._connection.open(call, limits)
            async with aclosing(response), aclosing(positioned_samples(response, limits, lines)) as positioned:
                yield AsyncRolloutStream(lines, positioned)
        except RolloutError:
            # The request may be posted again with its key.
            is_kept = True
            raise
        finally:
            if lines.summary is None and not is_kept:
                await self._connection.end_run(limits)

    async def score(self, sequences: Iterable[Iterable[int]], **options: Unpack[ScoreOptions]) -> ScoreResponse:
        """The log-probability of each token of `sequences` under the service's weights, in input order.

        Each sequence is a list of token ids, or a one-dimensional array or tensor of them. The log-probabilities are
        those of temperature 1, without top-p, top-k and min-p. A sequence that failed has an `error`.
        """
        call = call_for(ScoreResponse, "POST", "/score", body=score_body(sequences, options))
        return await self._connection.result(call, self._connection.settings.limits(options))
