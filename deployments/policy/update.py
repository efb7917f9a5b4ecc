"""One update over all replicas: stage everywhere, make the version durable, swap everywhere.

Guarantees: nothing is paused before every replica that lives holds the new weights or has failed; what refuses the
weights before anything was swapped leaves the version unmade; once it is durable, a replica that fails is replaced,
and the one in its place begins with the new version. No replica is left behind the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.policy.commands import Command, CommandReport, Stage, Swap, SwapOptions, VersionPayload
from deployments.policy.failures import WeightsRefused
from deployments.policy.replica_registry import RegisteredReplica, ReplicaLost, ReplicaRegistry
from rollout_client.policy_contract import ReplicaUpdate
from rollout_client.problem_contract import FieldProblem

Answer = CommandReport | ReplicaLost


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas, and how one of them is replaced (its actor is killed; Serve starts another)."""

    registry: ReplicaRegistry
    replace: Callable[[RegisteredReplica], None]
    command_timeout_s: float

    async def ask_all(self, members: Sequence[RegisteredReplica], command: Command) -> list[Answer]:
        return await asyncio.gather(*(self.ask(member, command) for member in members))

    async def ask(self, member: RegisteredReplica, command: Command) -> Answer:
        try:
            return await self.registry.ask(member, command, self.command_timeout_s)
        except ReplicaLost as lost:
            return lost

    def give_up(self, member: RegisteredReplica, why: str) -> None:
        self.registry.forget(member.replica_id, why)
        self.replace(member)

    def give_up_unless_gone(self, member: RegisteredReplica, why: str) -> None:
        """One that died is replaced without us, and one that joined anew is brought up for itself."""
        if self.registry.has(member):
            self.give_up(member, why)


async def update_all(
    fleet: Fleet,
    members: Sequence[RegisteredReplica],
    payload: VersionPayload,
    options: SwapOptions,
    make_durable: Callable[[], None],
) -> list[ReplicaUpdate]:
    """Brings `members` to the version of `payload`.

    Raises:
        WeightsRefused: no engine could take the weights; nothing was changed.
    """
    staged = dict(zip(members, await fleet.ask_all(members, Stage(payload)), strict=True))
    refuse_if_refused(list(staged.values()))
    make_durable()
    ready = [member for member, answer in staged.items() if error_of(answer) is None]
    swapped = dict(zip(ready, await fleet.ask_all(ready, Swap(options)), strict=True))
    return [outcome(fleet, member, staged[member], swapped.get(member, staged[member])) for member in members]


def refuse_if_refused(staged: Sequence[Answer]) -> None:
    """Replicas that died or broke say nothing of the weights; the others do, if none of them could take them."""
    reports = [answer for answer in staged if isinstance(answer, CommandReport) and not answer.broken]
    errors = [report.error for report in reports if report.error is not None]
    if errors and len(errors) == len(reports):
        raise WeightsRefused(FieldProblem(field="weights", message=f"the engine cannot take them: {errors[0]}"))


def outcome(fleet: Fleet, member: RegisteredReplica, staged: Answer, swapped: Answer) -> ReplicaUpdate:
    """What became of one replica; one that failed is replaced."""
    error = error_of(swapped)
    if error is not None:
        fleet.give_up(member, error)
        return ReplicaUpdate(replica_id=member.replica_id, status="replaced", error=error)
    load_s = staged.load_s if isinstance(staged, CommandReport) else 0.0
    report = swapped if isinstance(swapped, CommandReport) else CommandReport(0, member.loaded)
    return ReplicaUpdate(
        replica_id=member.replica_id, status="swapped", load_s=load_s, swap_s=report.swap_s, pause_s=report.pause_s
    )


async def bring_up(fleet: Fleet, member: RegisteredReplica, payloads: Sequence[VersionPayload]) -> bool:
    """Brings one replica that came late to the current version; one that fails is replaced."""
    for payload in payloads:
        for command in (Stage(payload), Swap(SwapOptions())):
            error = error_of(await fleet.ask(member, command))
            if error is not None:
                fleet.give_up_unless_gone(member, error)
                return False
    return True


def error_of(answer: Answer) -> str | None:
    return str(answer) if isinstance(answer, ReplicaLost) else answer.error
