"""The methods of the client that show and change the weights."""

from os import PathLike, fspath
from typing import Unpack

from tenacity import AsyncRetrying

from rollout_client.async_client.connection import AsyncConnection
from rollout_client.async_client.upload import send_upload
from rollout_client.concurrency import async_call_blocking, async_sleep
from rollout_client.deadline import SHORT_CALL_TIMEOUT_S, UPDATE_ADVICE, Deadline
from rollout_client.errors import RequestRejected
from rollout_client.policy_calls import (
    UpdateOptions,
    checkpoint_call,
    next_version,
    policy_call,
    policy_layout_call,
    push_query,
)
from rollout_client.policy_contract import PolicyLayout, PolicyState, PolicyUpdate, WeightsKind
from rollout_client.retry import call_policy, is_unavailable
from rollout_client.version_wait import VersionWait
from rollout_client.weights.chunks import CHUNK_BYTES
from rollout_client.weights.sources import WeightsSource, needs_layout, weights_to_send
from rollout_client.weights.upload import Upload


class AsyncPolicyMethods:
    _connection: AsyncConnection

    async def policy(self, checksums_within_s: float | None = None) -> PolicyState:
        """Which weights the service serves, which it has, and what each of its replicas has loaded.

        It waits at most `checksums_within_s` (by default the service says how long) for checksums of the engines'
        weights that are still being made.
        """
        call = policy_call(checksums_within_s=checksums_within_s)
        return await self._connection.result(call, Deadline(SHORT_CALL_TIMEOUT_S + (checksums_within_s or 0)))

    async def policy_layout(self) -> PolicyLayout:
        """The tensors that full weights must have: name, dtype and shape of each."""
        return await self._connection.result(policy_layout_call(), Deadline(SHORT_CALL_TIMEOUT_S))

    async def wait_for_version(self, version: int, timeout_s: float = 600.0) -> PolicyState:
        """Returns once every replica serves `version` or a newer one; raises `RolloutTimeout` after `timeout_s`."""
        wait = VersionWait(version, timeout_s)
        while True:
            try:
                return await self._connection.result(wait.call(), wait.answer_deadline())
            except RequestRejected as error:
                await async_sleep(wait.pause_s(error))

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

        They are sent in chunks of `chunk_bytes`, and memory holds one chunk and one tensor of them. A disconnect
        resends at most one chunk. With `progress`, a bar on stderr counts the bytes (needs the `cli` extra).

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
        weights = await async_call_blocking(weights_to_send, source, kind, layout)
        upload = Upload(weights, await self._number(version), query, chunk_bytes, kind == "delta")
        return await send_upload(self._connection, upload, progress)

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
        deadline = Deadline(self._connection.timeout_s, advice=UPDATE_ADVICE)
        attempts = call_policy(self._connection.retries, deadline.timeout_s, is_unavailable)
        update: PolicyUpdate = await AsyncRetrying(**attempts)(self._connection.result_of_one_attempt, call, deadline)
        return update

    async def _number(self, version: int | None) -> int:
        return next_version(await self.policy(checksums_within_s=0)) if version is None else version
