"""The methods of the client that show and change the weights.

An `Upload` is sent chunk by chunk. Where a response is missing, the service is asked what has arrived.
"""

import time
from contextlib import nullcontext
from http import HTTPStatus
from os import PathLike, fspath
from typing import Unpack

from tenacity import AsyncRetrying

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.concurrency import async_call_blocking, async_sleep
from rollout_client.calls.options import (
    SHORT_CALL_TIMEOUT_S,
    UPDATE_ADVICE,
    CallLimits,
    CallOptions,
    Deadline,
)
from rollout_client.calls.policy import (
    LONGEST_QUESTION_S,
    RESPONSE_S,
    PushCallOptions,
    checkpoint_call,
    drop_policy_call,
    is_known,
    is_updating_to,
    next_version,
    pause_s,
    policy_call,
    policy_layout_call,
    push_query,
    rollback_call,
    upload_state_call,
    with_logged_warnings,
)
from rollout_client.calls.progress import upload_bar
from rollout_client.calls.upload import CHUNK_BYTES, Upload
from rollout_client.contract.policy import (
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushResult,
    UploadState,
    WeightsKind,
)
from rollout_client.errors import RequestRejected
from rollout_client.retry import call_policy, chunk_may_pass, has_not_begun
from rollout_client.weights.sources import WeightsSource, needs_layout, weights_to_send

POLL_S = 1.0
"""Seconds between two questions whether an update has ended that went on after a disconnect."""


async def send_upload(connection: AsyncConnection, upload: Upload, limits: CallLimits, progress: bool) -> PolicyUpdate:
    """Returns once every replica serves the weights of `upload`."""
    with upload_bar(upload.version) if progress else nullcontext(no_bar) as show:
        while upload.update is None:
            policy = call_policy(limits.retries, limits.deadline.timeout_s, chunk_may_pass)
            await AsyncRetrying(sleep=async_sleep, **policy)(send_chunk, connection, upload, limits)
            show(upload.arrived_bytes, upload.total_bytes)
    return upload.update


async def send_chunk(connection: AsyncConnection, upload: Upload, limits: CallLimits) -> None:
    if upload.is_in_doubt:
        upload.resume_from(await what_arrived(connection, upload.version, upload.name, limits))
    call = await async_call_blocking(upload.next_call)
    upload.handle_response(await connection.result_of_one_attempt(call, limits))


async def what_arrived(
    connection: AsyncConnection, version: int, name: str | None, limits: CallLimits
) -> UploadState | PolicyState:
    """The state of the upload of `version` or, where there is none, of the whole policy."""
    state = await connection.result_of_one_attempt(policy_call(), limits)
    while is_updating_to(state, version, name):
        await async_sleep(POLL_S)
        state = await connection.result_of_one_attempt(policy_call(), limits)
    if is_known(state, version, name):
        return state
    try:
        return await connection.result_of_one_attempt(upload_state_call(version, name), limits)
    except RequestRejected as error:
        if error.problem.status != HTTPStatus.NOT_FOUND:
            raise
        return state


def no_bar(_arrived_bytes: int, _total_bytes: int | None) -> None:
    pass


class AsyncPolicyMethods:
    _connection: AsyncConnection

    async def policy(self, checksums_within_s: float = 0.0, **options: Unpack[CallOptions]) -> PolicyState:
        """Which weights the service serves, which it has, and what each of its replicas has loaded.

        With `checksums_within_s` the replicas compute the checksums of the weights in their engines, while generations
        go on, and the answer waits at most so many seconds for them. Without it nothing is computed.
        """
        call = policy_call(checksums_within_s=checksums_within_s)
        return await self._connection.short(call, options, SHORT_CALL_TIMEOUT_S + checksums_within_s)

    async def policy_layout(self, **options: Unpack[CallOptions]) -> PolicyLayout:
        """The tensors that full weights must have: name, dtype and shape of each."""
        return await self._connection.short(policy_layout_call(), options)

    async def wait_for_version(
        self, version: int, timeout_s: float = 600.0, *, retries: int | None = None
    ) -> PolicyState:
        """Returns once every replica serves `version` or a newer one; raises `RolloutTimeout` after `timeout_s`."""
        deadline = Deadline(timeout_s)
        given: CallOptions = {} if retries is None else {"retries": retries}
        while True:
            wait_s = min(deadline.remaining_s() or 0.0, LONGEST_QUESTION_S)
            limits = self._connection.defaults.limits({**given, "timeout_s": wait_s + RESPONSE_S})
            try:
                return await self._connection.result(policy_call(version, round(wait_s, 3)), limits)
            except RequestRejected as error:
                await async_sleep(pause_s(error, version, deadline))

    async def push_weights(
        self,
        source: WeightsSource,
        version: int | None = None,
        *,
        kind: WeightsKind = "full",
        base: int | None = None,
        checksum: str | None = None,
        name: str | None = None,
        progress: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        **options: Unpack[PushCallOptions],
    ) -> PushResult:
        """Uploads weights and returns once every replica serves them.

        They are sent in chunks of `chunk_bytes` bytes, and memory holds one chunk and one tensor of them. A disconnect
        resends at most one chunk. With `progress`, a bar on stderr counts the bytes (needs the `cli` extra).

        Args:
            source: a torch module, a state dict, or a path on this machine: a `.safetensors` file or a folder of them
                for full weights, which are cast to the service's dtypes; a file for a delta; for an adapter a folder
                of PEFT, or the module that PEFT has wrapped. `load_checkpoint` is for weights that the service can
                read itself.
            version: its number; without it, one more than the newest that the service knows.
            kind: `partial` sends of a module only what is trained (`requires_grad`), and of any other source only the
                tensors that it holds; the service has the others.
            base: the version that a delta changes, or from which partial weights take the other tensors (by default
                the current full weights). `PolicyPusher` makes and sends deltas of a module. Of an adapter the full
                weights that it was trained on: the service refuses it on others.
            checksum: the `Checksum` of the full weights. The service refuses others.
            name: the policy that an adapter becomes a version of, served beside others; versions count for each name.
            options: `timeout_s` bounds the whole update; `retries` are those of one chunk.

        Raises:
            ValueError: the source does not fit (`WeightsDoNotFit`, `RankTooHigh`), is no safetensors file
                (`NotSafetensors`), or the arguments contradict each other. Nothing was sent.
            RequestRejected: the service refuses the weights; the message names the tensor or the field.
        """
        began = time.perf_counter()
        query = push_query(kind, base, options, checksum, name)
        limits = self._connection.defaults.limits(options, advice=UPDATE_ADVICE)
        layout = None
        if needs_layout(source, kind):
            layout = await self._connection.result(policy_layout_call(), limits.at_most(SHORT_CALL_TIMEOUT_S))
        weights = await async_call_blocking(weights_to_send, source, kind, layout)
        upload = Upload(weights, await self._number(version, limits, name), query, chunk_bytes, kind == "delta")
        update = with_logged_warnings(await send_upload(self._connection, upload, limits, progress))
        return PushResult(**dict(update), sent_bytes=upload.sent_bytes, push_s=time.perf_counter() - began)

    async def load_checkpoint(
        self,
        checkpoint: str | PathLike[str],
        version: int | None = None,
        *,
        kind: WeightsKind = "full",
        base: int | None = None,
        name: str | None = None,
        **options: Unpack[PushCallOptions],
    ) -> PolicyUpdate:
        """Has the service read weights itself, and returns once every replica serves them.

        `checkpoint` is a path or an fsspec URL, as the service sees it, under one of the roots that it allows. The call
        is made again only where the service has not begun with it: after a disconnect the service goes on, and
        `wait_for_version` tells how it ended. The other arguments are those of `push_weights`.
        """
        query = push_query(kind, base, options, name=name)
        limits = self._connection.defaults.limits(options, advice=UPDATE_ADVICE)
        call = checkpoint_call(await self._number(version, limits, name), query, fspath(checkpoint))
        return with_logged_warnings(await self._connection.result(call, limits, has_not_begun))

    async def rollback(
        self, to: int, version: int | None = None, name: str | None = None, **options: Unpack[PushCallOptions]
    ) -> PolicyUpdate:
        """Makes the weights of version `to` current again, as a new version, and returns once every replica serves it.

        Args:
            to: a version whose weights the service still has; `policy()` lists them.
            version: number of the new version; without it, one more than the newest that the service knows.
            name: serves the adapter of version `to` as this named policy, beside the current weights, which stay.

        Raises:
            RequestRejected: 404, the service does not have these weights, or no longer; the message lists those it has.
        """
        limits = self._connection.defaults.limits(options, advice=UPDATE_ADVICE)
        call = rollback_call(to, version, options, name)
        return await self._connection.result(call, limits, has_not_begun)

    async def drop_policy(self, name: str, **options: Unpack[CallOptions]) -> None:
        """The service serves the named policy no longer. Rollouts of it that need further tokens fail.

        Raises:
            RequestRejected: 404, there is no policy of this name; the message lists those that there are.
        """
        limits = self._connection.defaults.limits(options, advice=UPDATE_ADVICE)
        await self._connection.result(drop_policy_call(name), limits, has_not_begun)

    async def _number(self, version: int | None, limits: CallLimits, name: str | None = None) -> int:
        if version is not None:
            return version
        state = await self._connection.result(policy_call(), limits.at_most(SHORT_CALL_TIMEOUT_S))
        return next_version(state, name)
