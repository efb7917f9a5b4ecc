"""Methods of the client about rollouts that have ended: their records, and what they generate again."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from rollout_client.calls.async_client.connection import AsyncResource
from rollout_client.calls.call import call_for, path_of, without_none
from rollout_client.calls.json_values import as_given, json_bytes
from rollout_client.calls.options import CallOptions, call_options
from rollout_client.calls.rollouts import ReportOptions, report_body
from rollout_client.contract.records import (
    Mismatch,
    RecordedRollout,
    RecordedRollouts,
    ReplayResponse,
    ReportAnswer,
    RolloutRecord,
)
from rollout_client.contract.rollouts import SampleResult


class AsyncRecordCalls(AsyncResource):
    async def rollout_record(self, rollout_id: str, **options: Unpack[CallOptions]) -> RolloutRecord:
        """The result of a rollout that has ended, with where and how each of its generations was made.

        The service keeps it for the key that has played it, until newer ones need its room.
        """
        return await self._connection.short(call_for(RolloutRecord, "GET", path_of("rollouts", rollout_id)), options)

    async def replay(
        self,
        rollout: SampleResult | Mapping[str, Any] | None = None,
        *,
        rollout_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> ReplayResponse:
        """Generates the tokens of a rollout again, under the same weights, and compares them.

        Each generation is made again with the recorded tokens before it.

        Args:
            rollout: a result, as a request returned it or `read_rollouts` has read it.
            rollout_id: in its place, that of one whose record the service keeps.
        """
        given = without_none({"rollout": as_given(rollout), "rollout_id": rollout_id})
        call = call_for(ReplayResponse, "POST", "/replay", body=json_bytes(given))
        return await self._connection.result(call, self._connection.settings.limits(options))

    async def rollout_records(self, count: int = 50, **options: Unpack[CallOptions]) -> list[RecordedRollout]:
        """The rollouts of this key that ended last, the newest first: at most `count`."""
        call = call_for(RecordedRollouts, "GET", "/rollouts", query={"count": count})
        return (await self._connection.short(call, options)).rollouts

    async def report_logprobs(
        self, rollouts: Iterable[str | SampleResult | None], logprobs: Iterable[Any], **options: Unpack[ReportOptions]
    ) -> ReportAnswer:
        """Tells the service what a trainer has computed for the tokens of rollouts, and returns what that shows.

        Args:
            rollouts: results, or their `rollout_id`.
            logprobs: for each rollout log-probabilities at its own temperature, as a list, an array or a tensor: of
                each generated token; or of each token after the prompt, of each but the first, or of each.
            masks: for each rollout which of its `logprobs` are in the loss.
            token_ids: for each rollout the tokens of the whole log as the trainer has them.
            starts: for each rollout the index in its tokens of the one that the first of `logprobs` is for. They may
                then leave out the end of the log, and so may `token_ids`: what is left out is not compared.
            weight_version: the version that the trainer has computed with; by default that of each token.

        Raises:
            ValueError: an argument has another number of rows than there are rollouts, or a rollout has no id.
        """
        call = call_for(ReportAnswer, "POST", "/rollouts/logprobs", body=report_body(rollouts, logprobs, options))
        return await self._connection.short(call, call_options(options))

    async def mismatch(self, **options: Unpack[CallOptions]) -> Mismatch:
        """The mismatch ledger: how far trainers' log-probabilities part from the sampled ones, and why."""
        return await self._connection.short(call_for(Mismatch, "GET", "/mismatch"), options)
