"""How what breaks a handle call is named."""

import asyncio
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from grpc import RpcError
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentResponseGenerator

from deployments.failures import EnvironmentLost, EnvironmentRejected
from deployments.rpc.handle_calls import call_result
from tests import virtual_time
from tests.fakes.serve_handle import ScriptedCall
from tests.patterns import whole


def task_error(cause: BaseException) -> Exception:
    """What Ray raises when the replica's own code raised `cause`."""
    untyped: Any = RayTaskError
    error: Exception = untyped("step", "traceback", cause)
    return error


def result_of(raised: BaseException) -> Any:
    answer, call = AsyncMock(side_effect=raised), cast(Any, ScriptedCall([]))
    return virtual_time.run(call_result(answer(), call, EnvironmentLost, "The replica"))


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ActorDiedError(), "The replica died during the call."),
        (ActorUnavailableError("gone", None), "The replica died during the call."),
        (WorkerCrashedError(), "The replica could not be reached."),
        (RayServeException("no replicas"), "The replica could not be reached."),
        (RpcError("RESOURCE_EXHAUSTED at ipv4:10.0.0.5:43211"), "The replica could not be reached."),
    ],
)
def test_a_replica_or_connection_that_breaks_is_the_named_failure(
    caplog: pytest.LogCaptureFixture, raised: Exception, message: str
) -> None:
    """Addresses that Ray and gRPC name stay in the log."""
    with pytest.raises(EnvironmentLost, match=whole(message)) as failure:
        result_of(raised)
    assert failure.value.__cause__ is raised
    if message == "The replica could not be reached." and raised.args:
        [record] = caplog.records
        assert (record.getMessage(), str(raised) in vars(record)["cause"]) == (message, True)


def test_what_the_replica_itself_raised_is_raised_as_it_was() -> None:
    rejected = EnvironmentRejected("not a board")
    with pytest.raises(EnvironmentRejected) as failure:
        result_of(task_error(rejected))
    assert failure.value is rejected


def test_a_replica_that_raised_what_is_no_exception_gave_the_call_up() -> None:
    with pytest.raises(EnvironmentLost, match=r"^The replica gave the call up\.$"):
        result_of(task_error(SystemExit(1)))


def test_other_exceptions_pass_through() -> None:
    with pytest.raises(KeyError):
        result_of(KeyError("bug"))


async def test_cancelling_the_wait_cancels_the_call() -> None:
    call: Any = ScriptedCall([])
    waiting = asyncio.create_task(call_result(asyncio.sleep(3600), call, EnvironmentLost, "The replica"))
    await asyncio.sleep(1)
    assert not call.cancelled
    await virtual_time.end_by_cancellation(waiting)
    assert call.cancelled


async def test_a_call_that_reaches_a_replica_too_late_is_cancelled_there() -> None:
    at_replica, metadata = ScriptedCall([]), cast(Any, None)
    assigned: Any = asyncio.get_running_loop().create_future()
    call = DeploymentResponseGenerator[Any](assigned, metadata, _is_router_running_in_separate_loop=False)
    waiting = asyncio.create_task(call_result(anext(call), call, EnvironmentLost, "The replica"))
    await asyncio.sleep(0)
    assigned.set_result(at_replica)
    await virtual_time.end_by_cancellation(waiting)
    assert at_replica.cancelled
