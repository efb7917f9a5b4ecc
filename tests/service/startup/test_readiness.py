"""What Serve's states mean to somebody who starts the service."""

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from deployments.generation.response_parser import ParserUnusable
from deployments.policy.run_identity import FolderRefused
from deployments.protocols.chat import UnsupportedTokenizer
from deployments.sessions.session_table import _ModelNotRecordable
from service.startup.config import ServiceNotStarted
from service.startup.readiness import _Startup

RAISED = """\
A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:rollout:math.initialize_and_get_metadata()\x1b[39m (pid=23180, ip=192.0.2.2)
  File "/venv/lib/python3.11/site-packages/ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/ray/serve/_private/replica.py", line 4008, in _call_func_or_gen
    result = callable(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/my_task.py", line 8, in __init__
    TypeAdapter(int).validate_python("x")
pydantic_core._pydantic_core.ValidationError: 1 validation error for int
  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, input_value='x']
"""
RAISED_SHORTENED = """\
math failed to start. Traceback (most recent call last):
  File "/home/me/my_task.py", line 8, in __init__
    TypeAdapter(int).validate_python("x")
pydantic_core._pydantic_core.ValidationError: 1 validation error for int
  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, input_value='x']"""

REFUSED = """\
A replica failed to start with exception. Retrying 2 more time(s). Error:
RuntimeError: Traceback (most recent call last):
  File "/app/service/ingress.py", line 84, in __init__
    tokenizer, parser = await load_chat(settings)
deployments.{module}: A sentence,
which says what to do.
"""


def no_room(required: str, available: str) -> str:
    return (
        "Deployment 'math' in application 'rollout' has 1 replicas that have taken more than 5s to be scheduled. "
        "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
        f"Resources required for each replica: {required}, total resources available: {available}. "
        "Use `ray status` for more details."
    )


UPDATING, HEALTHY = DeploymentStatus.UPDATING, DeploymentStatus.HEALTHY
DEPLOYING, RUNNING = ApplicationStatus.DEPLOYING, ApplicationStatus.RUNNING


def application(
    status: ApplicationStatus = DEPLOYING, says: str = "", **deployments: tuple[DeploymentStatus, str]
) -> dict[str, ApplicationStatusOverview]:
    trigger = DeploymentStatusTrigger.CONFIG_UPDATE_STARTED
    states = {
        name: DeploymentStatusOverview(status=state, status_trigger=trigger, replica_states={}, message=text)
        for name, (state, text) in deployments.items()
    }
    overview = ApplicationStatusOverview(status=status, message=says, last_deployed_time_s=0, deployments=states)
    return {"rollout": overview}


def ended_by(states: dict[str, ApplicationStatusOverview]) -> str:
    with pytest.raises(ServiceNotStarted) as raised:
        startup().observe(states, now=0)
    return str(raised.value)


def startup() -> _Startup:
    return _Startup(["rollout"])


@pytest.mark.parametrize("refusal", [UnsupportedTokenizer, ParserUnusable, FolderRefused, _ModelNotRecordable])
def test_of_what_the_service_refuses_the_sentence_is_shown(refusal: type[Exception]) -> None:
    module = f"{refusal.__module__}.{refusal.__qualname__}".removeprefix("deployments.")
    failed = application(Ingress=(DeploymentStatus.DEPLOY_FAILED, REFUSED.format(module=module)))
    assert ended_by(failed) == "Ingress failed to start. A sentence,\nwhich says what to do."


def test_the_start_is_over_when_every_application_runs() -> None:
    running = application(RUNNING, math=(HEALTHY, ""))
    assert startup().observe(running, now=0) is None
    assert _Startup(["rollout", "other"]).observe(running, now=0) == "Ray Serve"


def test_what_is_not_healthy_yet_is_named() -> None:
    slow = "1 replicas that have taken more than 5s to initialize."
    states = application(Policy=(HEALTHY, ""), math=(UPDATING, ""), Generator=(UPDATING, slow))
    assert startup().observe(states, now=0) == "math, Generator"
    assert startup().observe({}, now=0) == "Ray Serve"


@pytest.mark.parametrize("status", [UPDATING, DeploymentStatus.DEPLOY_FAILED])
def test_a_constructor_that_raises_ends_the_start_with_its_traceback(status: DeploymentStatus) -> None:
    assert ended_by(application(Policy=(HEALTHY, ""), math=(status, RAISED))) == RAISED_SHORTENED


def test_a_replica_that_is_replaced_does_not_end_its_application() -> None:
    states = application(RUNNING, math=(DeploymentStatus.UNHEALTHY, RAISED))
    assert startup().observe(states, now=0) is None


def test_an_application_that_cannot_be_built_ends_the_start() -> None:
    failed = application(ApplicationStatus.DEPLOY_FAILED, "No module named 'servise'")
    assert ended_by(failed) == "The application could not be built. No module named 'servise'"


def test_a_deployment_without_room_ends_the_start_after_the_timeout() -> None:
    states = application(math=(UPDATING, no_room('{"CPU": 1.0, "GPU": 2}', '{"CPU": 0.6}')))
    waiting = "math waits for room: a replica asks for 1 CPU and 2 GPU, free are 0.6 CPU and 0 GPU"
    judge = startup()
    assert [judge.observe(states, now=now) for now in (10, 189.9)] == [waiting] * 2
    with pytest.raises(ServiceNotStarted) as raised:
        judge.observe(states, now=190)
    assert str(raised.value).startswith(f"Given up after 180 s: {waiting}.\nGive a deployment less")


def test_the_timeout_counts_from_the_last_time_with_room() -> None:
    without_room = application(math=(UPDATING, no_room('{"CPU": 1.0}', '{"CPU": 0.6}')))
    judge = startup()
    judge.observe(without_room, now=0)
    judge.observe(application(math=(UPDATING, "")), now=50)
    judge.observe(without_room, now=51)
    assert judge.observe(without_room, now=110) is not None


def test_a_replica_whose_process_starts_slowly_does_not_wait_for_room() -> None:
    states = application(math=(UPDATING, no_room('{"CPU": 0.1}', '{"CPU": 1.5}')))
    judge = startup()
    assert [judge.observe(states, now=now) for now in (0, 1000)] == ["math"] * 2
