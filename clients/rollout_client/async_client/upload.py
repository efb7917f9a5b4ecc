"""Sends an `Upload`, chunk by chunk; asks what has arrived where an answer did not come."""

from contextlib import nullcontext
from http import HTTPStatus

from tenacity import AsyncRetrying

from rollout_client.async_client.connection import AsyncConnection
from rollout_client.concurrency import async_call_blocking, async_sleep
from rollout_client.deadline import UPDATE_ADVICE, Deadline
from rollout_client.errors import RequestRejected
from rollout_client.policy_calls import is_known, is_updating_to, policy_call, upload_state_call
from rollout_client.policy_contract import PolicyState, PolicyUpdate, UploadState
from rollout_client.progress import upload_bar
from rollout_client.retry import call_policy, is_worth_asking
from rollout_client.weights.upload import Upload

POLL_S = 1.0
"""Between two questions whether an update has ended that the service goes on with after a disconnect."""


async def send_upload(connection: AsyncConnection, upload: Upload, progress: bool) -> PolicyUpdate:
    """Returns once every replica serves the weights of `upload`."""
    deadline = Deadline(connection.timeout_s, advice=UPDATE_ADVICE)
    with upload_bar(upload.version) if progress else nullcontext(no_bar) as show:
        while upload.update is None:
            attempts = call_policy(connection.retries, deadline.timeout_s, is_worth_asking)
            await AsyncRetrying(**attempts)(send_chunk, connection, upload, deadline)
            show(upload.arrived_bytes, upload.total_bytes)
    return upload.update


async def send_chunk(connection: AsyncConnection, upload: Upload, deadline: Deadline) -> None:
    if upload.is_in_doubt:
        upload.found(await what_arrived(connection, upload.version, deadline))
    call = await async_call_blocking(upload.next_call)
    upload.answered(await connection.result_of_one_attempt(call, deadline))


async def what_arrived(connection: AsyncConnection, version: int, deadline: Deadline) -> UploadState | PolicyState:
    """The state of the upload of `version` or, where there is none, of the whole policy."""
    state = await connection.result_of_one_attempt(policy_call(checksums_within_s=0), deadline)
    while is_updating_to(state, version):
        await async_sleep(POLL_S)
        state = await connection.result_of_one_attempt(policy_call(checksums_within_s=0), deadline)
    if is_known(state, version):
        return state
    try:
        return await connection.result_of_one_attempt(upload_state_call(version), deadline)
    except RequestRejected as error:
        if error.problem.status != HTTPStatus.NOT_FOUND:
            raise
        return state


def no_bar(_arrived_bytes: int, _total_bytes: int | None) -> None:
    pass
