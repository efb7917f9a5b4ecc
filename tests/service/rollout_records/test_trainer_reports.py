"""Reports of trainers over HTTP, and the check of a replica that parts from its siblings."""

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from deployments.failures import GenerationLost
from deployments.protocols.generation import Generation, ScoredPrompt, ScoringRequest
from deployments.rollout_records.book import KeptRecord, RecordBook, RolloutRecordsSettings
from deployments.rollout_records.comparison import TrainerReport
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client import AsyncRolloutClient
from rollout_client.contract.records import ReportAnswer
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import ANYBODY
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import ONE_REPORT, TrainerReports
from service.settings import RequestLimits
from tests.service.scripted import ScriptedGenerator
from tests.service.scripted_http import LIMITS, ScriptedHttp

pytestmark = pytest.mark.true_clock

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Q"}]}


class ScriptedReplicas:
    """Replicas that give tokens the log-probability -1, and those in `faulty` another one."""

    def __init__(self, faulty: str = "", fails: bool = False, running: str = "abcd") -> None:
        self.faulty = faulty
        self.fails = fails
        self.running = running
        self.taken_out: list[str] = []
        self.asked: list[str] = []

    def replicas(self) -> Sequence[str]:
        return list(self.running)

    async def score_on(self, replica: str, request: ScoringRequest) -> Generation:
        if self.fails:
            raise GenerationLost("The replica is gone.")
        self.asked.append(replica)
        tokens = len(request.prompt_token_ids) - request.start
        logprob = -1.2 if replica in self.faulty else -1.0
        return ScoredPrompt([], [], "stop", prompt_logprobs=[logprob] * tokens, weight_version="3")

    def take_out_of_service(self, replica: str, reason: str) -> None:
        self.taken_out.append(replica)


def reports_over(replicas: ScriptedReplicas, served: int = 3) -> tuple[RolloutRecordStore, TrainerReports]:
    store, unchecked = RolloutRecordStore(RolloutRecordsSettings(), lambda: 60.0), cast("Any", replicas)
    return store, TrainerReports(store, unchecked, lambda: {"": served})


def reporting_http(limits: RequestLimits = LIMITS) -> ScriptedHttp:
    store, reports = reports_over(ScriptedReplicas(), served=99)
    recorder = RolloutRecorder(cast("Any", store))
    return ScriptedHttp(limits, generator=ScriptedGenerator(["AB"]), recorder=recorder, reports=reports)


async def recorded(client: AsyncRolloutClient, **options: Any) -> list[SampleResult]:
    """Rollouts whose records are kept: these are written beside the answer, and asked for until they are there."""
    played = (await client.rollout([SAMPLE], **options)).samples
    for result in played:
        await client.rollout_record(result.rollout_id or "")
    return played


async def reported(client: AsyncRolloutClient) -> tuple[ReportAnswer, Any, Any]:
    """The answer to a report of two rollouts and one that nobody knows, a record after it, and the ledger."""
    played = await recorded(client, num_generations=2)
    rollouts: list[Any] = [*played, "unknown"]
    logprobs: list[Any] = [np.array([-1.0, -1.5]), [-1.0, -1.0], [None]]
    answer = await client.report_logprobs(rollouts, logprobs, masks=[[1, 0], [1, 0], [1]])
    return answer, await client.rollout_record(played[0].rollout_id or ""), await client.mismatch()


def test_what_a_trainer_reports_is_in_the_answer_the_record_and_the_ledger() -> None:
    answer, record, ledger = reporting_http().call(reported)
    assert (answer.compared, answer.causes) == (2, [])
    assert answer.mean_ratio == pytest.approx((np.exp(0.5) + 3) / 4)
    assert answer.largest_ratio == pytest.approx(np.exp(0.5))
    [refused] = answer.refused
    assert refused.rollout_id == "unknown"
    assert "there is no record of it" in refused.message
    assert record.mismatch.logprobs == [-1.0, -1.5]
    assert (record.mismatch.tokens, record.mismatch.reported_at) == (2, 60.0)
    assert (ledger.rollouts, ledger.tokens) == (2, 4)
    assert next(one.rollout_id for one in ledger.worst) == record.rollout.rollout_id
    assert {value: sums.tokens for value, sums in ledger.by["policy"].items()} == {"unnamed": 4}


def test_what_a_trainer_has_cut_is_not_compared_where_it_gives_a_start() -> None:
    async def scenario(client: AsyncRolloutClient) -> tuple[ReportAnswer, Any]:
        [result] = await recorded(client)
        prompt = result.message_log[0].token_ids
        ids = [*prompt, *result.message_log[1].token_ids[:1]]
        answer = await client.report_logprobs([result], [[-1.5]], starts=[len(prompt)], token_ids=[ids])
        return answer, await client.rollout_record(result.rollout_id or "")

    answer, record = reporting_http().call(scenario)
    assert (answer.refused, answer.causes) == ([], [])
    assert answer.mean_ratio == pytest.approx(np.exp(0.5))
    assert (record.mismatch.logprobs, record.mismatch.start, record.mismatch.tokens) == ([-1.5], 0, 1)


def record_by(replica: str, name: str, temperature: float = 1.0) -> dict[str, Any]:
    tokens = [5, 6, 7, 8] * 2
    sampled = [-1.2 if replica == "c" else -1.0] * 8
    spans = [{"version": "3", "start": 0, "end": 8}]
    messages = [
        {"role": "user", "token_ids": [1, 2], "content": ""},
        {"role": "assistant", "token_ids": tokens, "generation_logprobs": sampled, "weight_versions": spans},
    ]
    replay = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {
        "rollout": {"rollout_id": name, "message_log": messages, "replay": replay},
        "group_id": name,
        "policy": None,
        "generations": [{"message": 1, "start": 0, "end": 8, "replica": replica, "cached_tokens": 0, "batch_size": 1}],
    }


async def others_ended() -> None:
    """The checks of replicas, which are made beside the reports."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


async def after_reports(replicas: ScriptedReplicas, temperature: float = 1.0) -> list[str]:
    """Reports 64 rollouts on four replicas, of which `c` has sampled with other log-probabilities than the trainer.

    Returns the causes that the ledger names.
    """
    store, reports = reports_over(replicas)
    random = np.random.default_rng(3)
    for number in range(64):
        name = f"r{number}"
        await store.keep([KeptRecord(name, "", pickle.dumps(record_by("abcd"[number % 4], name, temperature)))])
        await reports.report([TrainerReport(name, -1.0 + random.normal(0, 0.002, 8))], ANYBODY)
        await others_ended()
    return [cause["kind"] for cause in (await store.mismatch(""))["causes"]]


def test_a_replica_that_scores_as_no_other_is_taken_out_of_service() -> None:
    replicas = ScriptedReplicas(faulty="c")
    causes = asyncio.run(after_reports(replicas))
    assert (replicas.taken_out, causes) == (["c"], ["replica"])
    # Four rollouts, each scored by the replica itself and by two others.
    assert [replicas.asked.count("c"), len(replicas.asked)] == [4, 12]


@pytest.mark.parametrize(
    ("replicas", "temperature", "is_asked"),
    [
        (ScriptedReplicas(), 1.0, True),
        (ScriptedReplicas(faulty="abcd"), 1.0, True),
        (ScriptedReplicas(faulty="c", running="ac"), 1.0, False),
        (ScriptedReplicas(faulty="c", fails=True), 1.0, False),
        (ScriptedReplicas(faulty="c"), 0.7, False),
    ],
    ids=["as before", "others agree", "of two", "scores fail", "another temperature"],
)
def test_a_replica_that_is_not_shown_to_differ_stays_in_service(
    replicas: ScriptedReplicas, temperature: float, is_asked: bool
) -> None:
    assert asyncio.run(after_reports(replicas, temperature)) == []
    assert (replicas.taken_out, "c" in replicas.asked) == ([], is_asked)


async def test_what_a_trainer_says_takes_no_sound_replica_out_of_service() -> None:
    """It says of the rollouts of one replica, which are sound, what it likes."""
    store, reports = reports_over(replicas := ScriptedReplicas())
    for number in range(240):
        fields, name = record_by("abd"[number % 3], f"r{number}"), f"r{number}"
        await store.keep([KeptRecord(name, "", pickle.dumps(fields))])
        await reports.report([TrainerReport(name, np.full(8, -9.0 if number % 3 == 0 else -1.001))], ANYBODY)
        await others_ended()
    assert replicas.taken_out == []
    # It is looked at, and at a bounded rate: 16 rollouts, each on three replicas.
    assert len(replicas.asked) == 48


async def test_a_report_without_numbers_or_a_second_one_costs_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    record = RecordBook.record

    def counted(book: RecordBook, rollout_id: str, owner: str) -> KeptRecord:
        read.append(rollout_id)
        return record(book, rollout_id, owner)

    store, reports = reports_over(ScriptedReplicas())
    await store.keep([KeptRecord("r", "", pickle.dumps(record_by("a", "r")))])
    monkeypatch.setattr(RecordBook, "record", counted)
    given = [np.zeros(0), np.full(8, -1.0), np.full(8, -9.0), np.zeros(0)]
    outcome = await reports.report([TrainerReport("r", numbers) for numbers in given], ANYBODY)
    assert (outcome["compared"], outcome["mean_ratio"], read) == (1, 1.0, ["r"])
    assert outcome["refused"] == [{"rollout_id": "r", "message": ONE_REPORT}] * 3


def test_a_report_larger_than_the_bound_of_bodies_is_refused() -> None:
    http = reporting_http(RequestLimits(max_body_bytes=100))
    response = http.request("POST", "/rollouts/logprobs", content='{"logprobs": [' + "-1," * 100 + "-1]}")
    assert (response.status_code, response.json()["errors"][0]["field"]) == (413, "body")


async def test_a_version_that_was_never_served_is_unknown_in_the_ledger() -> None:
    store, reports = reports_over(ScriptedReplicas(), served=2)
    await store.keep([KeptRecord("r", "", pickle.dumps(record_by("a", "r")))])
    await reports.report([TrainerReport("r", np.full(8, -1.0))], ANYBODY)
    assert list((await store.mismatch(""))["by"]["version"]) == ["unknown"]
