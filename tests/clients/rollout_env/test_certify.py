"""`rollout env certify` finds thirty planted faults, each by the check that is named so, and passes their twins."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.agents.environment import ScriptedAgent
from deployments.environments.host import EnvironmentHost
from rollout_env import ChatMessage, ChatModel, ModelReply, RewardModel, StepOutcome, TaskEnvironment
from rollout_env.__main__ import HARBOR_TASKS
from rollout_env.apart import certified_apart
from rollout_env.certificate import Certificate, CertificateRefused
from rollout_env.certify import PanelSettings, certify
from rollout_env.loading import certified_environment, load_environment
from rollout_env.play import run
from rollout_env.worth import NotCertified, PolicyServer
from tests.clients.rollout_env.planted_environments import BatchedSum, Count, Programs, Shell, Sum
from tests.deployments.agents import agents_of_tests
from tests.deployments.models.chat_server import chat_server, said
from tests.virtual_time import end_by_cancellation

pytestmark = [pytest.mark.slow, pytest.mark.true_clock, pytest.mark.timeout(240)]
OF_SUM = [(fault, fault) for fault in ("empty", "echo", "format_alone", "all_answers", "oracle", "injection", "flood")]
OF_SUM += [("forged", "injection"), ("no_op", "no_op"), ("outcome", "outcome"), ("equal_plays", "equal_plays")]
OF_BATCHED_SUM = ["state", "two_processes", "time_limits", "blocking", "rejected_input", "after_any_end"]
OF_COUNT = ["time_limits", "after_any_end", "resume"]
OF_PROGRAMS: list[Any] = ["hidden_files", "hidden_variables", "network", "left_behind", "reward_files"]
FAULTS = [
    *((Sum, fault, check) for fault, check in OF_SUM),
    *((BatchedSum, fault, fault) for fault in OF_BATCHED_SUM),
    *((Count, fault, fault) for fault in OF_COUNT),
    *((Programs, fault, fault) for fault in OF_PROGRAMS),
]
MATH, TOOLS = "deployments.tasks.math:MathEnvironment", "deployments.tasks.tool_calls:ToolCallsEnvironment"
SECRET = "the key of the judge"
RIGHT = "echo 1 > /logs/verifier/reward.txt"
CHECK = f'[ "$(cat /app/answer)" = 7 ] && {RIGHT} || echo 0 > /logs/verifier/reward.txt\n'
HARBOR_FAULTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "the image has the tests": (
        "hidden_files",
        {
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY test.sh /opt/\n",
            "environment/test.sh": f"#!/bin/bash\n{CHECK}",
        },
    ),
    "the image has the solution": (
        "hidden_files",
        {
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY s /opt/\n",
            "environment/s": "echo 7 > /app/answer\n",
        },
    ),
    "the agent has the verifier's key": (
        "hidden_variables",
        {"task.toml": f'[environment.env]\nKEY = "{SECRET}"\n[verifier.env]\nJUDGE_KEY = "{SECRET}"\n'},
    ),
    "the tests read a score that the agent can write": (
        "reward_files",
        {"tests/test.sh": f"{CHECK}[ -f /app/score.txt ] && cp /app/score.txt /logs/verifier/reward.txt\nexit 0\n"},
    ),
    "the tests import modules of the agent": (
        "reward_files",
        {"tests/test.sh": f"{CHECK}cd /app; PYTHONPATH=. python3 -c 'raise SystemExit(1)' && {RIGHT}\n"},
    ),
}


def certified(make: Any, check: str = "", **settings: Any) -> Certificate:
    chosen: Any = [check] if check else []
    panel = PanelSettings(samples=2, only=chosen, **{"step_timeout_s": 60.0, **settings})
    return run(certify("planted", make, {}, panel))


def failed(certificate: Certificate) -> dict[str, list[str]]:
    return {check.name: check.findings for check in certificate.checks if check.status == "failed"}


@pytest.mark.parametrize(("task", "fault", "check"), FAULTS)
def test_a_planted_fault_is_found_by_the_check_that_is_named_after_it(task: Any, fault: str, check: str) -> None:
    step_timeout_s = 1.0 if check == "time_limits" else 4.0
    assert [*failed(certified(partial(task, fault), check, step_timeout_s=step_timeout_s))] == [check]


@pytest.mark.parametrize("task", [Sum, BatchedSum, Count])
def test_its_clean_twin_passes_all_checks(task: Any) -> None:
    assert failed(certified(task)) == {}


def test_programs_behind_walls_pass_all_checks_of_isolation() -> None:
    certificate = run(certify("planted", Programs, {}, PanelSettings(samples=1, only=OF_PROGRAMS)))
    assert {check.name: check.status for check in certificate.checks} == dict.fromkeys(OF_PROGRAMS, "passed")


def test_more_files_than_a_program_can_read_in_its_time_do_not_end_the_search_in_a_fault(tmp_path: Path) -> None:
    for number in range(1500):
        with (tmp_path / str(number)).open("wb") as file:
            file.truncate(2**22 - 1)
    tmp_path.chmod(0o755)
    make, only = partial(Programs, packages=[str(tmp_path)]), OF_PROGRAMS[:1]
    certificate = run(certify("planted", make, {}, PanelSettings(samples=1, only=only)))
    assert {check.name: check.status for check in certificate.checks} == {"hidden_files": "passed"}


def harbor_task(folder: Path, further: Mapping[str, str]) -> Any:
    """A task in Harbor's format that wants 7 in a file."""
    files = {
        "task.toml": f'[verifier.env]\nJUDGE_KEY = "{SECRET}"\n',
        "instruction.md": "Write 3 + 4 to /app/answer.",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "tests/test.sh": f"#!/bin/bash\n{CHECK}",
        "solution/solve.sh": "echo 7 > /app/answer\n",
        **further,
    }
    for name, content in files.items():
        path = folder / "planted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return certified_environment(HARBOR_TASKS, {"settings": {"tasks": str(folder)}})


def test_no_more_samples_are_asked_for_than_there_are(tmp_path: Path) -> None:
    assert failed(certified(harbor_task(tmp_path, {}), "example_samples")) == {}


@pytest.mark.parametrize("fault", HARBOR_FAULTS)
def test_a_fault_of_a_harbor_task_is_found_by_its_check_and_its_twin_passes_that(tmp_path: Path, fault: str) -> None:
    check, files = HARBOR_FAULTS[fault]
    assert [*failed(certified(harbor_task(tmp_path / "faulty", files), check))] == [check]
    assert failed(certified(harbor_task(tmp_path / "clean", {}), check)) == {}


def certificate_file(folder: Path, fault: str = "", of: str = "", only: Any = (), **changed: Any) -> str:
    """The file of the certificate of `Sum`, `of` some arguments, with other fields in the place of its own."""
    settings = PanelSettings(samples=1, only=only)
    document = run(certify("sum", partial(Sum, fault), {"fault": of}, settings)).document()
    path = folder / "certificate.json"
    path.write_text(json.dumps(document | changed))
    return str(path)


def hosted_sum(certificate: str) -> EnvironmentHost:
    return EnvironmentHost("sum", f"{Sum.__module__}:Sum", {"fault": ""}, None, certificate=certificate)


def test_a_task_shows_the_hash_of_its_certificate(tmp_path: Path) -> None:
    path = certificate_file(tmp_path)
    described = asyncio.run(hosted_sum(path).describe())
    assert described.certificate == json.loads(Path(path).read_text())["hash"]


@pytest.mark.parametrize(
    ("made", "refusal"),
    [
        ({"passed": False}, "was changed after it was made: certify the environment anew"),
        ({"source": "another"}, "was changed after it was made: certify the environment anew"),
        ({"fault": "empty"}, "has checks that failed: mend the environment and certify it anew"),
        ({"of": "another"}, "is of another source or of other arguments: certify the environment anew"),
        ({"only": ["empty"]}, "is of some checks alone: certify the environment without --only"),
    ],
)
def test_no_environment_starts_with_a_certificate_that_is_not_its_own(tmp_path: Path, made: Any, refusal: str) -> None:
    with pytest.raises(CertificateRefused, match=refusal):
        hosted_sum(certificate_file(tmp_path, **made))


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", '{"hash": 1}'):
        (tmp_path / "no.json").write_text(content)
        with pytest.raises(CertificateRefused, match=r"no\.json is no certificate: "):
            hosted_sum(str(tmp_path / "no.json"))
    with pytest.raises(CertificateRefused, match=r"missing\.json is no certificate: FileNotFoundError"):
        hosted_sum(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(("solves", "failed_check"), [(3, []), (4, ["band"]), (0, ["band"])])
def test_the_worth_to_a_policy_is_the_share_of_its_rollouts_that_solve(solves: int, failed_check: list[str]) -> None:
    def answer(number: int, body: dict[str, Any]) -> Any:
        truth = body["messages"][0]["content"].split()[-1].rstrip("?")
        return said(f"\\boxed{{{truth if number % 4 < solves else 0}}}")

    with chat_server(answer) as server:
        policy = PolicyServer(f"{server.url}/v1", band=(0.1, 0.9))
        certificate = run(certify("sum", Sum, {}, PanelSettings(samples=2, only=["band", "disputed"]), policy))
    assert [*failed(certificate)] == failed_check
    share = solves / 4
    assert certificate.measured == {
        "solved_by_none": float(share == 0),
        "solved_by_one": 0.0,
        "solved_by_some": float(0 < share < 1),
        "solved_by_all": float(share == 1),
        "teaches": float(0 < share < 1),
        "solved": share,
    }
    assert len(server.requests) == 8


def test_verdicts_that_differ_at_a_second_judgment_are_disputed() -> None:
    with chat_server(lambda *_: said("\\boxed{7}")) as server:
        policy = PolicyServer(f"{server.url}/v1", generations=16)
        settings = PanelSettings(samples=1, only=["disputed"])
        certificate = run(certify("sum", partial(Sum, "wavering"), {}, settings, policy))
    assert [*failed(certificate)] == ["disputed"]


def test_a_policy_that_does_not_answer_is_said() -> None:
    with pytest.raises(NotCertified, match=r"^http://127\.0\.0\.1:1/v1/chat/completions does not answer"):
        run(certify("sum", Sum, {}, PanelSettings(only=["band"]), PolicyServer("http://127.0.0.1:1/v1")))


class Ending(Sum):
    """Ends its process, or raises, at a reply or a call."""

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        if self.fault == "exit" and not message_log[-1]["content"]:
            os._exit(0)
        return await super().step(message_log, extra_env_info)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        if self.fault == "none":
            return []
        if self.fault == "raises":
            raise KeyError("question")
        return super().example_samples(count, seed)


@pytest.mark.parametrize(
    ("fault", "finding"), [("none", "ValueError: there are no samples"), ("raises", "KeyError: 'question'")]
)
def test_samples_that_cannot_be_made_are_a_finding(fault: str, finding: str) -> None:
    [[check, [found]]] = failed(certified(partial(Ending, fault), "oracle")).items()
    assert (check, found.partition("\n")[0]) == ("example_samples", f"It raised {finding}")


def test_an_environment_that_ends_its_process_is_not_certified() -> None:
    with pytest.raises(NotCertified, match="was not certified in a process of its own: EOFError"):
        run(certified_apart("ending", partial(Ending, "exit"), {}, PanelSettings()))


async def test_cancelling_ends_the_process_of_a_certificate() -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    work = asyncio.create_task(certified_apart("count", partial(Count, "time_limits"), {}, PanelSettings()))
    while not (begun := {child.pid for child in psutil.Process().children(recursive=True)} - others):
        await asyncio.sleep(0.1)
    await end_by_cancellation(work)
    assert not [
        pid for pid in begun if psutil.pid_exists(pid) and "spawn_main" in " ".join(psutil.Process(pid).cmdline())
    ]


@pytest.mark.parametrize(("lax", "most_calls", "wrong"), [(False, 2, []), (True, 2, ["empty"]), (False, 1, ["oracle"])])
def test_an_agent_that_rewards_itself_is_played_by_a_model_of_one_reply(lax: bool, most_calls: int, wrong: Any) -> None:
    samples = [
        {"messages": [{"role": "user", "content": "Count."}], "extra_env_info": {"number": number, "lax": lax}}
        for number in (12, 34)
    ]
    settings = {"import_path": f"{agents_of_tests.__name__}:counts_on", "scored_by": "agent"}
    make = partial(ScriptedAgent, settings | {"limits": {"max_calls": most_calls}}, samples, ["12", "34"])
    assert [*failed(certified(make, "oracle")), *failed(certified(make, "empty"))] == wrong


class ObeyingJudge(ChatModel):
    """Gives the best score to whatever reaches it with a control token of its own, and else the worst."""

    async def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ModelReply:
        return ModelReply(json.dumps({"score": 10 if "<|im_end|>" in messages[0]["content"] else 0}))


class ConstantScore(RewardModel):
    async def score(self, messages: Sequence[ChatMessage]) -> float:
        return 0.0


def judged(import_path: str, arguments: dict[str, Any]) -> TaskEnvironment:
    environment = load_environment(f"deployments.tasks.{import_path}", arguments)
    environment.use_models({"judge": ObeyingJudge()}, {"helpful": ConstantScore()})
    return environment


@pytest.mark.parametrize(
    ("import_path", "arguments"),
    [
        ("llm_judge:LlmJudgeEnvironment", {}),
        ("reward_model:RewardModelEnvironment", {}),
        ("conversation:ConversationEnvironment", {"judge": {"import_path": MATH}, "follow_ups": ["And?"]}),
        ("multi_reward:MultiRewardEnvironment", {"parts": {"a": {"import_path": MATH}, "b": {"import_path": TOOLS}}}),
    ],
)
def test_tasks_that_ask_models_or_wrap_tasks_pass_all_checks(import_path: str, arguments: dict[str, Any]) -> None:
    assert failed(certified(partial(judged, import_path, arguments))) == {}


@pytest.mark.parametrize(("seats", "wrong"), [(1, []), (2, ["state"])])
def test_two_rollouts_are_not_played_at_once_where_there_is_room_for_one(seats: int, wrong: list[str]) -> None:
    one_place = Count("after_any_end")
    one_place.max_sessions = seats
    assert [*failed(certified(lambda: one_place, "state"))] == wrong


@pytest.mark.parametrize(("fault", "wrong"), [("", []), ("resume", ["resume"])])
def test_a_session_in_a_sandbox_is_forked_at_each_turn_by_its_snapshot(fault: str, wrong: list[str]) -> None:
    certificate = certified(partial(Shell, fault), "resume")
    assert [*failed(certificate)] == wrong
    assert certificate.checks[0].plays == 4, "after two turns of two samples"
