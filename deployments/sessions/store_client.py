"""The session store over its Serve handle, for ingress and generator replicas."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ray.serve.handle import DeploymentHandle

from deployments.failures import SessionStoreLost, StoreLost
from deployments.rpc.batching import (
    BYTES_PER_LOGPROB,
    BYTES_PER_RECORD,
    BYTES_PER_TOKEN_ID,
    CallBatcher,
    at_once,
    bytes_of_columns,
    bytes_of_json,
    bytes_of_text,
)
from deployments.rpc.handle_calls import StoreClient
from deployments.storage.storage import StoreReplaced, attempts

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

AWAY = (SessionStoreLost, StoreReplaced)
AT_ONCE = ("answer", "heard")
"""Methods that are called periodically, and so not again while the store is away."""


def session_store_client(handle: DeploymentHandle[Any]) -> "SessionStore":
    """Raises `SessionStoreLost` if the store cannot be reached for `AWAY_S` seconds; `AT_ONCE` raise it at once."""
    return cast("SessionStore", _SessionStoreClient(handle))


class _SessionStoreClient(StoreClient):
    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        super().__init__(handle, SessionStoreLost, "The session store")
        call = super()._call
        # Generator replicas make these for each call of a session, many in one event-loop iteration. One batch for
        # each method: a plan does not wait for calls to be stored.
        self._batched: Mapping[str, CallBatcher[tuple[Any, ...], Any]] = {
            method: CallBatcher(at_once(partial(call, "batched", method)), bytes_of)
            for method, bytes_of in (("plan", _bytes_of_plan), ("add", bytes_of_add))
        }

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        if method in AT_ONCE:
            return await super()._call(method, *arguments, **named)
        if method in self._batched:
            # What was generated must not be lost because a database fails; of all else the caller is told.
            lost = StoreLost if method == "add" else AWAY
            return await attempts(lost)(self._batched[method].call, arguments)
        return await attempts(AWAY)(super()._call, method, *arguments, **named)


def _bytes_of_plan(arguments: tuple[Any, ...]) -> int:
    _, _, messages, _ = arguments
    return BYTES_PER_RECORD + bytes_of_json(messages)


def bytes_of_add(arguments: tuple[Any, ...]) -> int:
    _, call = arguments
    rendered = sum(len(message.token_ids) for message in call.rendered)
    generated = sum(len(message.token_ids) for message in call.generated)
    texts = sum(2 * bytes_of_text(message.text) for message in call.generated)
    return (
        BYTES_PER_RECORD
        + bytes_of_json([message.message for message in call.rendered])
        + BYTES_PER_TOKEN_ID * (rendered + generated)
        + BYTES_PER_LOGPROB * generated
        + texts
        + sum(bytes_of_columns(message.columns) for message in call.generated)
    )
