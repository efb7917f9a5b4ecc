"""Methods of the client that send weights, and the upload.

An `Upload` is sent chunk by chunk. Where a response is missing, the service is asked what has arrived.
"""

import time
from http import HTTPStatus
from os import PathLike, fspath
from typing import TYPE_CHECKING, Unpack

from tenacity import AsyncRetrying

from rollout_client.calls.async_client.connection import AsyncResource
from rollout_client.calls.call import call_for, path_of
from rollout_client.calls.concurrency import async_call_blocking, async_sleep
from rollout_client.calls.json_values import json_bytes
from rollout_client.calls.options import SHORT_CALL_TIMEOUT_S, UPDATE_ADVICE, CallLimits
from rollout_client.calls.policy import (
    PushCallOptions,
    is_known,
    is_updating_to,
    next_version,
    push_query,
    with_logged_warnings,
)
from rollout_client.contract.policy import (
    CheckpointSource,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushResult,
    UploadState,
)
from rollout_client.errors import RequestRejected
from rollout_client.retry import call_policy, chunk_may_pass, has_not_begun

if TYPE_CHECKING:
    from rollout_client.calls.upload import Upload
    from rollout_client.weights.sources import WeightsSource

CHUNK_BYTES = 32 << 20
POLICY_STATE = call_for(PolicyState, "GET", "/policy")
POLL_S = 1.0
"""Seconds between two questions whether an update has ended that went on after a disconnect."""


class AsyncWeightCalls(AsyncResource):
    async def push_weights(
        self,
        source: "WeightsSource",
        version: int | None = None,
        *,
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
            kind: `full` by default. `partial` sends of a module only what is trained (`requires_grad`), and of any
                other source only the tensors that it holds; the service has the others.
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
        from rollout_client.calls.progress import upload_bar
        from rollout_client.calls.upload import Upload
        from rollout_client.weights.sources import needs_layout, weights_to_send

        began = time.perf_counter()
        query, kind = push_query(options), options.get("kind", "full")
        limits = self._connection.settings.limits(options, advice=UPDATE_ADVICE)
        layout = None
        if needs_layout(source, kind):
            call = call_for(PolicyLayout, "GET", "/policy/layout")
            layout = await self._connection.result(call, limits.at_most(SHORT_CALL_TIMEOUT_S))
        weights = await async_call_blocking(weights_to_send, source, kind, layout)
        upload = Upload(weights, await self._number(version, limits, options), query, chunk_bytes)
        with upload_bar(upload.version, progress) as show:
            while upload.update is None:
                policy = call_policy(limits.retries, limits.timeout_s, chunk_may_pass)
                await AsyncRetrying(sleep=async_sleep, **policy)(self._send_chunk, upload, limits)
                show(upload.arrived_bytes, upload.total_bytes)
        update = with_logged_warnings(upload.update)
        return PushResult(**dict(update), sent_bytes=upload.sent_bytes, push_s=time.perf_counter() - began)

    async def load_checkpoint(
        self, checkpoint: str | PathLike[str], version: int | None = None, **options: Unpack[PushCallOptions]
    ) -> PolicyUpdate:
        """Has the service read weights itself, and returns once every replica serves them.

        `checkpoint` is a path or an fsspec URL, as the service sees it, under one of the roots that it allows. The call
        is made again only where the service has not begun with it: after a disconnect the service goes on, and
        `client.policy.wait_for_version` tells how it ended. The other arguments are those of `push_weights`.
        """
        query = push_query(options)
        limits = self._connection.settings.limits(options, advice=UPDATE_ADVICE)
        path = path_of("policy", "versions", await self._number(version, limits, options))
        body = json_bytes(CheckpointSource(checkpoint=fspath(checkpoint)))
        call = call_for(PolicyUpdate, "PUT", path, query=query, body=body)
        return with_logged_warnings(await self._connection.result(call, limits, has_not_begun))

    async def _number(self, version: int | None, limits: CallLimits, options: PushCallOptions) -> int:
        if version is not None:
            return version
        state = await self._connection.result(POLICY_STATE, limits.at_most(SHORT_CALL_TIMEOUT_S))
        return next_version(state, options.get("name"))

    async def _send_chunk(self, upload: "Upload", limits: CallLimits) -> None:
        if upload.is_in_doubt:
            upload.resume_from(await self._what_arrived(upload, limits))
        call = await async_call_blocking(upload.next_call)
        upload.handle_response((await self._connection.result_of_one_attempt(call, limits)).root)

    async def _what_arrived(self, upload: "Upload", limits: CallLimits) -> UploadState | PolicyState:
        """The state of the upload or, where there is none, of the whole policy."""
        state = await self._connection.result_of_one_attempt(POLICY_STATE, limits)
        while is_updating_to(state, upload.version, upload.name):
            await async_sleep(POLL_S)
            state = await self._connection.result_of_one_attempt(POLICY_STATE, limits)
        if is_known(state, upload.version, upload.name):
            return state
        path = path_of("policy", "versions", upload.version, "upload")
        call = call_for(UploadState, "GET", path, query={"name": upload.name})
        try:
            return await self._connection.result_of_one_attempt(call, limits)
        except RequestRejected as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return state
