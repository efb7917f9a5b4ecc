"""Sends an `Upload` chunk by chunk; where a response is missing, asks what has arrived."""

from contextlib import nullcontext
from http import HTTPStatus

from tenacity import AsyncRetrying

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.concurrency import async_call_blocking, async_sleep
from rollout_client.calls.options import CallLimits
from rollout_client.calls.policy import is_known, is_updating_to, policy_call, upload_state_call
from rollout_client.calls.progress import upload_bar
from rollout_client.calls.upload import Upload
from rollout_client.contract.policy import PolicyState, PolicyUpdate, UploadState
from rollout_client.errors import RequestRejected
from rollout_client.retry import call_policy, chunk_may_pass

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
        upload.found(await what_arrived(connection, upload.version, upload.name, limits))
    call = await async_call_blocking(upload.next_call)
    upload.answered(await connection.result_of_one_attempt(call, limits))


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
