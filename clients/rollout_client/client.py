"""The clients: `RolloutClient` and its twin `AsyncRolloutClient`.

I/O only: what to send, how to read it and when to try again is decided in the modules beside this one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager, nullcontext
from http import HTTPStatus
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx
from tenacity import AsyncRetrying, Retrying

from rollout_client.cli.progress import rollout_bar, upload_bar
from rollout_client.contract import RolloutResponse, RolloutSummary, SampleInput, SampleResult
from rollout_client.deadline import UPDATE_ADVICE, Deadline
from rollout_client.errors import RequestRejected, ServiceUnreachable, StreamBroken, error_of_answer
from rollout_client.ndjson import NdjsonReader, Placed, in_input_order
from rollout_client.policy_calls import (
    UpdateOptions,
    checkpoint_call,
    is_being_brought,
    is_known,
    next_version,
    policy_call,
    policy_layout_call,
    push_query,
    upload_state_call,
)
from rollout_client.policy_contract import PolicyLayout, PolicyState, PolicyUpdate, UploadState, WeightsKind
from rollout_client.retry import call_policy, is_unavailable, is_worth_asking, readiness_policy
from rollout_client.rollout_calls import (
    Answer,
    Call,
    RolloutOptions,
    Samples,
    arrow_rollout_call,
    example_samples_call,
    readiness_call,
    rollout_call,
    rollout_count,
    streamed_rollout_call,
    tasks_call,
)
from rollout_client.task_contract import TaskInfo
from rollout_client.version_wait import VersionWait
from rollout_client.weights.sources import WeightsSource, needs_layout, weights_to_send
from rollout_client.weights.upload import CHUNK_BYTES, Upload

if TYPE_CHECKING:
    from rollout_client.arrow.response import ArrowResponse

DEFAULT_URL = "http://127.0.0.1:8000"
SHORT_CALL_TIMEOUT_S = 30.0
"""For calls that play no rollout."""
ASK_AGAIN_S = 1.0
"""While the service brings a version to its replicas and the call that waited for it has broken off."""

UNBOUNDED = httpx.Limits(max_connections=None, max_keepalive_connections=64)
"""Admission is the service's: a request that waited for a connection here would be seen by nobody."""


class RolloutClient:
    """Talks to one rollout service; safe to share between threads.

    Args:
        base_url: of the service, with its scheme.
        timeout_s: what a whole rollout or a whole update of the weights may take, in seconds, the caller's own time
            between the samples of a stream included; without it, as long as it takes. It is looked at when a piece of
            the answer arrives, and when none arrives for that long.
        retries: further attempts after a connection that failed before the answer began, or a 503; nothing else is
            tried again but pieces of an upload. A long rollout in one piece begins its answer when its last sample is
            done.
        transport: carries the requests in place of httpx's own.

    Every method that talks to the service raises a `RolloutError`. `ValueError` means that the arguments are at fault:
    `base_url` is no URL, or a sample holds what is no JSON.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        timeout_s: float | None = None,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(base_url=checked_url(base_url), limits=UNBOUNDED, transport=transport)
        self._timeout_s = timeout_s
        self._retries = retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def rollout(
        self, samples: Samples, *, progress: bool = False, **options: Unpack[RolloutOptions]
    ) -> RolloutResponse:
        """Plays `samples` and returns their rollouts in input order, those of one sample next to each other.

        With `progress`, a bar on stderr counts them as they finish (needs the `cli` extra).
        """
        if not progress:
            return self._answer(rollout_call(samples, options), Deadline(self._timeout_s))
        by_position: dict[int, SampleResult] = {}
        with rollout_bar(rollout_count(samples, options)) as count, self.stream(samples, **options) as rollouts:
            for position, sample in rollouts.placed():
                by_position[position] = sample
                count(sample)
            return in_input_order(rollouts.summary, by_position)

    def rollout_arrow(self, samples: Samples, **options: Unpack[RolloutOptions]) -> "ArrowResponse":
        """`rollout`, request and answer as Arrow: the same in a third of the bytes, and `to_tensors` takes it as it is.

        Raises `ModuleNotFoundError` without the `arrow` extra.
        """
        return self._answer(arrow_rollout_call(samples, options), Deadline(self._timeout_s))

    def stream(self, samples: Samples, **options: Unpack[RolloutOptions]) -> "RolloutStream":
        """Plays `samples` and gives out each rollout the moment it ends. Use it in a `with` statement.

        Leaving the block early ends the request, and the service cancels what is still running.
        """
        call = streamed_rollout_call(samples, options)
        lines = NdjsonReader(rollout_count(samples, options))
        return RolloutStream(lambda deadline: self._open(call, deadline), lines, self._timeout_s)

    def tasks(self) -> list[TaskInfo]:
        """The tasks of the service, the fields they need and an example of each."""
        return self._answer(tasks_call(), Deadline(SHORT_CALL_TIMEOUT_S))

    def example_samples(self, task_name: str, count: int = 8, seed: int = 0) -> list[SampleInput]:
        """Samples of a task, ready to post; equal seeds give equal samples."""
        return self._answer(example_samples_call(task_name, count, seed), Deadline(SHORT_CALL_TIMEOUT_S))

    def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Returns once rollouts can be served; raises `ServiceUnreachable` with the last reason after `timeout_s`."""
        deadline = Deadline(timeout_s)

        def ask() -> None:
            with closing(self._attempt(readiness_call(), deadline)):
                pass

        Retrying(**readiness_policy(address(self._http.base_url), timeout_s))(ask)

    def policy(self, checksums_within_s: float | None = None) -> PolicyState:
        """Which weights the service serves, which it has, and what each of its replicas has loaded.

        It waits at most `checksums_within_s` (by default the service says how long) for checksums of the engines'
        weights that are still being made.
        """
        call = policy_call(checksums_within_s=checksums_within_s)
        return self._answer(call, Deadline(SHORT_CALL_TIMEOUT_S + (checksums_within_s or 0)))

    def policy_layout(self) -> PolicyLayout:
        """The tensors that full weights must have: name, dtype and shape of each."""
        return self._answer(policy_layout_call(), Deadline(SHORT_CALL_TIMEOUT_S))

    def wait_for_version(self, version: int, timeout_s: float = 600.0) -> PolicyState:
        """Returns once every replica serves `version` or a newer one; raises `RolloutTimeout` after `timeout_s`."""
        wait = VersionWait(version, timeout_s)
        while True:
            try:
                return self._answer(wait.call(), wait.answer_deadline())
            except RequestRejected as error:
                time.sleep(wait.pause_s(error))

    def push_weights(
        self,
        source: WeightsSource,
        version: int | None = None,
        *,
        kind: WeightsKind = "full",
        base: int | None = None,
        progress: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        **options: Unpack[UpdateOptions],
    ) -> PolicyUpdate:
        """Uploads weights and returns once every replica serves them.

        They are sent in pieces of `chunk_bytes`, and memory holds one piece and one tensor of them. A break costs the
        piece that was under way. With `progress`, a bar on stderr counts the bytes (needs the `cli` extra).

        Args:
            source: a torch module, a state dict, or a path on this machine: a `.safetensors` file or a folder of them
                for full weights, which are cast to the service's dtypes; a file for a delta; a folder of PEFT for an
                adapter. `load_checkpoint` is for weights that the service can reach itself.
            version: its number; without it, one more than the newest that the service knows.
            base: the version that a delta changes. `PolicyPusher` makes and sends deltas of a module.

        Raises:
            ValueError: the source does not fit (`WeightsDoNotFit`), is no safetensors file (`NotSafetensors`), or the
                arguments contradict each other. Nothing was sent.
        """
        query = push_query(kind, base, options)
        layout = self.policy_layout() if needs_layout(source, kind) else None
        weights = weights_to_send(source, kind, layout)
        return self._upload(Upload(weights, self._number(version), query, chunk_bytes, kind == "delta"), progress)

    def load_checkpoint(
        self,
        checkpoint: str | PathLike[str],
        version: int | None = None,
        *,
        kind: WeightsKind = "full",
        base: int | None = None,
        **options: Unpack[UpdateOptions],
    ) -> PolicyUpdate:
        """Has the service fetch weights itself, and returns once every replica serves them.

        `checkpoint` is a path or an fsspec URL, as the service sees it, under one of the roots that it allows. A call
        that breaks off is not repeated, for the service goes on with it: `wait_for_version` tells how it ended.
        """
        query = push_query(kind, base, options)
        call = checkpoint_call(self._number(version), query, fspath(checkpoint))
        deadline = Deadline(self._timeout_s, advice=UPDATE_ADVICE)
        attempts = call_policy(self._retries, deadline.timeout_s, is_unavailable)
        update: PolicyUpdate = Retrying(**attempts)(self._once, call, deadline)
        return update

    def once(self, call: Call[Answer], timeout_s: float | None = None) -> Answer:
        """Makes one of the calls of `rollout_calls` or `policy_calls`, and never tries it again."""
        return self._once(call, Deadline(timeout_s, advice=UPDATE_ADVICE))

    def _number(self, version: int | None) -> int:
        return next_version(self.policy(checksums_within_s=0)) if version is None else version

    def _upload(self, upload: Upload, progress: bool) -> PolicyUpdate:
        deadline = Deadline(self._timeout_s, advice=UPDATE_ADVICE)
        with upload_bar(upload.version) if progress else nullcontext(no_bar) as show:
            while upload.update is None:
                attempts = call_policy(self._retries, deadline.timeout_s, is_worth_asking)
                Retrying(**attempts)(self._send_piece, upload, deadline)
                show(upload.arrived_bytes, upload.total_bytes)
        return upload.update

    def _send_piece(self, upload: Upload, deadline: Deadline) -> None:
        if upload.is_in_doubt:
            upload.found(self._what_arrived(upload.version, deadline))
        upload.answered(self._once(upload.next_call(), deadline))

    def _what_arrived(self, version: int, deadline: Deadline) -> UploadState | PolicyState:
        state = self._once(policy_call(checksums_within_s=0), deadline)
        while is_being_brought(state, version):
            time.sleep(ASK_AGAIN_S)
            state = self._once(policy_call(checksums_within_s=0), deadline)
        if is_known(state, version):
            return state
        try:
            return self._once(upload_state_call(version), deadline)
        except RequestRejected as error:
            if error.problem.status != HTTPStatus.NOT_FOUND:
                raise
            return state

    def _answer(self, call: Call[Answer], deadline: Deadline) -> Answer:
        with closing(self._open(call, deadline)) as response:
            return call.read(call.joined(list(chunks(response, deadline))))

    def _once(self, call: Call[Answer], deadline: Deadline) -> Answer:
        with closing(self._attempt(call, deadline)) as response:
            return call.read(call.joined(list(chunks(response, deadline))))

    def _open(self, call: Call[Any], deadline: Deadline) -> httpx.Response:
        return Retrying(**call_policy(self._retries, deadline.timeout_s))(self._attempt, call, deadline)

    def _attempt(self, call: Call[Any], deadline: Deadline) -> httpx.Response:
        """Returns the answer with its body still to be read, if it is a success."""
        with before_the_answer(self._http.base_url, deadline):
            response = self._http.send(http_request(self._http, call, deadline), stream=True)
        if response.is_success:
            return response
        with closing(response):
            body = b"".join(chunks(response, deadline))
        raise error_of_answer(response.status_code, response.headers, body)


class AsyncRolloutClient:
    """`RolloutClient` for asyncio: the same methods, awaited. Cancelling a rollout ends it at the service too."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        timeout_s: float | None = None,
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=checked_url(base_url), limits=UNBOUNDED, transport=transport)
        self._timeout_s = timeout_s
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def rollout(
        self, samples: Samples, *, progress: bool = False, **options: Unpack[RolloutOptions]
    ) -> RolloutResponse:
        """Plays `samples` and returns their rollouts in input order, those of one sample next to each other.

        With `progress`, a bar on stderr counts them as they finish (needs the `cli` extra).
        """
        if not progress:
            return await self._answer(rollout_call(samples, options), Deadline(self._timeout_s))
        by_position: dict[int, SampleResult] = {}
        with rollout_bar(rollout_count(samples, options)) as count:
            async with self.stream(samples, **options) as rollouts:
                async for position, sample in rollouts.placed():
                    by_position[position] = sample
                    count(sample)
                return in_input_order(rollouts.summary, by_position)

    async def rollout_arrow(self, samples: Samples, **options: Unpack[RolloutOptions]) -> "ArrowResponse":
        """`rollout`, request and answer as Arrow: the same in a third of the bytes, and `to_tensors` takes it as it is.

        Raises `ModuleNotFoundError` without the `arrow` extra.
        """
        return await self._answer(arrow_rollout_call(samples, options), Deadline(self._timeout_s))

    def stream(self, samples: Samples, **options: Unpack[RolloutOptions]) -> "AsyncRolloutStream":
        """Plays `samples` and gives out each rollout the moment it ends. Use it in an `async with` statement.

        Leaving the block early ends the request, and the service cancels what is still running.
        """
        call = streamed_rollout_call(samples, options)
        lines = NdjsonReader(rollout_count(samples, options))
        return AsyncRolloutStream(lambda deadline: self._open(call, deadline), lines, self._timeout_s)

    async def tasks(self) -> list[TaskInfo]:
        """The tasks of the service, the fields they need and an example of each."""
        return await self._answer(tasks_call(), Deadline(SHORT_CALL_TIMEOUT_S))

    async def example_samples(self, task_name: str, count: int = 8, seed: int = 0) -> list[SampleInput]:
        """Samples of a task, ready to post; equal seeds give equal samples."""
        return await self._answer(example_samples_call(task_name, count, seed), Deadline(SHORT_CALL_TIMEOUT_S))

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Returns once rollouts can be served; raises `ServiceUnreachable` with the last reason after `timeout_s`."""
        deadline = Deadline(timeout_s)

        async def ask() -> None:
            async with aclosing(await self._attempt(readiness_call(), deadline)):
                pass

        await AsyncRetrying(**readiness_policy(address(self._http.base_url), timeout_s))(ask)

    async def policy(self, checksums_within_s: float | None = None) -> PolicyState:
        """Which weights the service serves, which it has, and what each of its replicas has loaded.

        It waits at most `checksums_within_s` (by default the service says how long) for checksums of the engines'
        weights that are still being made.
        """
        call = policy_call(checksums_within_s=checksums_within_s)
        return await self._answer(call, Deadline(SHORT_CALL_TIMEOUT_S + (checksums_within_s or 0)))

    async def policy_layout(self) -> PolicyLayout:
        """The tensors that full weights must have: name, dtype and shape of each."""
        return await self._answer(policy_layout_call(), Deadline(SHORT_CALL_TIMEOUT_S))

    async def wait_for_version(self, version: int, timeout_s: float = 600.0) -> PolicyState:
        """Returns once every replica serves `version` or a newer one; raises `RolloutTimeout` after `timeout_s`."""
        wait = VersionWait(version, timeout_s)
        while True:
            try:
                return await self._answer(wait.call(), wait.answer_deadline())
            except RequestRejected as error:
                await asyncio.sleep(wait.pause_s(error))

    async def push_weights(
        self,
        source: WeightsSource,
        version: int | None = None,
        *,
        kind: WeightsKind = "full",
        base: int | None = None,
        progress: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        **options: Unpack[UpdateOptions],
    ) -> PolicyUpdate:
        """Uploads weights and returns once every replica serves them.

        They are sent in pieces of `chunk_bytes`, and memory holds one piece and one tensor of them. A break costs the
        piece that was under way. With `progress`, a bar on stderr counts the bytes (needs the `cli` extra).

        Args:
            source: a torch module, a state dict, or a path on this machine: a `.safetensors` file or a folder of them
                for full weights, which are cast to the service's dtypes; a file for a delta; a folder of PEFT for an
                adapter. `load_checkpoint` is for weights that the service can reach itself.
            version: its number; without it, one more than the newest that the service knows.
            base: the version that a delta changes. `PolicyPusher` makes and sends deltas of a module.

        Raises:
            ValueError: the source does not fit (`WeightsDoNotFit`), is no safetensors file (`NotSafetensors`), or the
                arguments contradict each other. Nothing was sent.
        """
        query = push_query(kind, base, options)
        layout = await self.policy_layout() if needs_layout(source, kind) else None
        # Reading headers, casting and compressing take long: other calls of this loop go on meanwhile.
        weights = await asyncio.to_thread(weights_to_send, source, kind, layout)
        upload = Upload(weights, await self._number(version), query, chunk_bytes, kind == "delta")
        return await self._upload(upload, progress)

    async def load_checkpoint(
        self,
        checkpoint: str | PathLike[str],
        version: int | None = None,
        *,
        kind: WeightsKind = "full",
        base: int | None = None,
        **options: Unpack[UpdateOptions],
    ) -> PolicyUpdate:
        """Has the service fetch weights itself, and returns once every replica serves them.

        `checkpoint` is a path or an fsspec URL, as the service sees it, under one of the roots that it allows. A call
        that breaks off is not repeated, for the service goes on with it: `wait_for_version` tells how it ended.
        """
        query = push_query(kind, base, options)
        call = checkpoint_call(await self._number(version), query, fspath(checkpoint))
        deadline = Deadline(self._timeout_s, advice=UPDATE_ADVICE)
        attempts = call_policy(self._retries, deadline.timeout_s, is_unavailable)
        update: PolicyUpdate = await AsyncRetrying(**attempts)(self._once, call, deadline)
        return update

    async def once(self, call: Call[Answer], timeout_s: float | None = None) -> Answer:
        """Makes one of the calls of `rollout_calls` or `policy_calls`, and never tries it again."""
        return await self._once(call, Deadline(timeout_s, advice=UPDATE_ADVICE))

    async def _number(self, version: int | None) -> int:
        return next_version(await self.policy(checksums_within_s=0)) if version is None else version

    async def _upload(self, upload: Upload, progress: bool) -> PolicyUpdate:
        deadline = Deadline(self._timeout_s, advice=UPDATE_ADVICE)
        with upload_bar(upload.version) if progress else nullcontext(no_bar) as show:
            while upload.update is None:
                attempts = call_policy(self._retries, deadline.timeout_s, is_worth_asking)
                await AsyncRetrying(**attempts)(self._send_piece, upload, deadline)
                show(upload.arrived_bytes, upload.total_bytes)
        return upload.update

    async def _send_piece(self, upload: Upload, deadline: Deadline) -> None:
        if upload.is_in_doubt:
            upload.found(await self._what_arrived(upload.version, deadline))
        call = await asyncio.to_thread(upload.next_call)
        upload.answered(await self._once(call, deadline))

    async def _what_arrived(self, version: int, deadline: Deadline) -> UploadState | PolicyState:
        state = await self._once(policy_call(checksums_within_s=0), deadline)
        while is_being_brought(state, version):
            await asyncio.sleep(ASK_AGAIN_S)
            state = await self._once(policy_call(checksums_within_s=0), deadline)
        if is_known(state, version):
            return state
        try:
            return await self._once(upload_state_call(version), deadline)
        except RequestRejected as error:
            if error.problem.status != HTTPStatus.NOT_FOUND:
                raise
            return state

    async def _answer(self, call: Call[Answer], deadline: Deadline) -> Answer:
        async with aclosing(await self._open(call, deadline)) as response:
            return call.read(call.joined([chunk async for chunk in async_chunks(response, deadline)]))

    async def _once(self, call: Call[Answer], deadline: Deadline) -> Answer:
        async with aclosing(await self._attempt(call, deadline)) as response:
            return call.read(call.joined([chunk async for chunk in async_chunks(response, deadline)]))

    async def _open(self, call: Call[Any], deadline: Deadline) -> httpx.Response:
        return await AsyncRetrying(**call_policy(self._retries, deadline.timeout_s))(self._attempt, call, deadline)

    async def _attempt(self, call: Call[Any], deadline: Deadline) -> httpx.Response:
        """Returns the answer with its body still to be read, if it is a success."""
        with before_the_answer(self._http.base_url, deadline):
            response = await self._http.send(http_request(self._http, call, deadline), stream=True)
        if response.is_success:
            return response
        async with aclosing(response):
            body = b"".join([chunk async for chunk in async_chunks(response, deadline)])
        raise error_of_answer(response.status_code, response.headers, body)


class RolloutStream:
    """Rollouts in the order in which they finish.

    with client.stream(samples) as rollouts:
        for sample in rollouts:
            ...
        rollouts.summary
    """

    def __init__(
        self, open_: Callable[[Deadline], httpx.Response], lines: NdjsonReader, timeout_s: float | None
    ) -> None:
        self._open = open_
        self._lines = lines
        self._timeout_s = timeout_s
        self._response: httpx.Response | None = None
        self._placed: Generator[Placed, None, None] | None = None

    @property
    def expected(self) -> int:
        """Rollouts that come in all."""
        return self._lines.expected

    @property
    def summary(self) -> RolloutSummary:
        """Raises `RuntimeError` before the last sample."""
        return summary_of(self._lines)

    def __enter__(self) -> Self:
        deadline = Deadline(self._timeout_s)
        self._response = self._open(deadline)
        self._placed = self._read(self._response, deadline)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._placed is not None:
            self._placed.close()
        if self._response is not None:
            self._response.close()

    def __iter__(self) -> Iterator[SampleResult]:
        return (sample for _, sample in self.placed())

    def placed(self) -> Iterator[Placed]:
        """Each sample with its position in what `rollout` would have returned."""
        if self._placed is None:
            raise RuntimeError("A stream starts in a with statement: with client.stream(...) as rollouts.")
        return self._placed

    def _read(self, response: httpx.Response, deadline: Deadline) -> Generator[Placed, None, None]:
        for chunk in chunks(response, deadline):
            yield from self._lines.feed(chunk)
        self._lines.end()


class AsyncRolloutStream:
    """Rollouts in the order in which they finish.

    async with client.stream(samples) as rollouts:
        async for sample in rollouts:
            ...
        rollouts.summary
    """

    def __init__(
        self, open_: Callable[[Deadline], Awaitable[httpx.Response]], lines: NdjsonReader, timeout_s: float | None
    ) -> None:
        self._open = open_
        self._lines = lines
        self._timeout_s = timeout_s
        self._response: httpx.Response | None = None
        self._placed: AsyncGenerator[Placed, None] | None = None

    @property
    def expected(self) -> int:
        """Rollouts that come in all."""
        return self._lines.expected

    @property
    def summary(self) -> RolloutSummary:
        """Raises `RuntimeError` before the last sample."""
        return summary_of(self._lines)

    async def __aenter__(self) -> Self:
        deadline = Deadline(self._timeout_s)
        self._response = await self._open(deadline)
        self._placed = self._read(self._response, deadline)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._placed is not None:
            await self._placed.aclose()
        if self._response is not None:
            await self._response.aclose()

    def __aiter__(self) -> AsyncIterator[SampleResult]:
        return (sample async for _, sample in self.placed())

    def placed(self) -> AsyncIterator[Placed]:
        """Each sample with its position in what `rollout` would have returned."""
        if self._placed is None:
            raise RuntimeError("A stream starts in a with statement: async with client.stream(...) as rollouts.")
        return self._placed

    async def _read(self, response: httpx.Response, deadline: Deadline) -> AsyncGenerator[Placed, None]:
        async with aclosing(async_chunks(response, deadline)) as pieces:
            async for chunk in pieces:
                for placed in self._lines.feed(chunk):
                    yield placed
        self._lines.end()


def http_request(http: httpx.Client | httpx.AsyncClient, call: Call[Any], deadline: Deadline) -> httpx.Request:
    return http.build_request(
        call.method,
        call.path,
        params=call.query,
        content=call.body,
        headers=call.headers,
        timeout=deadline.http_timeout(),
    )


def chunks(response: httpx.Response, deadline: Deadline) -> Iterator[bytes]:
    with during_the_answer(deadline):
        for chunk in response.iter_bytes():
            deadline.left_s()
            yield chunk


async def async_chunks(response: httpx.Response, deadline: Deadline) -> AsyncGenerator[bytes, None]:
    with during_the_answer(deadline):
        async for chunk in response.aiter_bytes():
            deadline.left_s()
            yield chunk


@contextmanager
def before_the_answer(base_url: httpx.URL, deadline: Deadline) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ServiceUnreachable(f"{address(base_url)} does not answer: connecting timed out.") from error
    except httpx.TimeoutException as error:
        raise deadline.error() from error
    except httpx.RequestError as error:
        raise ServiceUnreachable(f"{address(base_url)} cannot be reached: {error}") from error


@contextmanager
def during_the_answer(deadline: Deadline) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise deadline.error() from error
    except httpx.RequestError as error:
        raise StreamBroken(f"The answer broke off: {error}") from error


def no_bar(_arrived_bytes: int, _total_bytes: int | None) -> None:
    pass


def address(base_url: httpx.URL) -> str:
    return str(base_url).rstrip("/")


def summary_of(lines: NdjsonReader) -> RolloutSummary:
    if lines.summary is None:
        raise RuntimeError("The summary comes after the last sample: iterate to the end first.")
    return lines.summary


def checked_url(base_url: str) -> httpx.URL:
    """Raises `ValueError` if `base_url` is no URL of the web."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{base_url!r} is no URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"{base_url!r} is no URL of a service; it must look like {DEFAULT_URL}.")
    return url
