"""One update over all replicas: stage everywhere, make the version durable, swap everywhere.

Guarantees: nothing is paused before every replica that lives holds the new weights or has failed; what refuses the
weights before anything was swapped leaves the version unmade; once it is durable, a replica that fails is replaced,
and the one in its place begins with the new version. No replica is left behind the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.policy_failures import WeightsRefused
from deployments.policy_records import Command, Parcel, Report, Stage, Swap, SwapOptions
from deployments.roster import Member, ReplicaLost, Roster
from rollout_client.contract import FieldProblem
from rollout_client.policy import ReplicaUpdate

Answer = Report | ReplicaLost


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas, and how one of them is replaced (its actor is killed; Serve starts another)."""

    roster: Roster
    replace: Callable[[Member], None]
    order_timeout_s: float

    async def ask_all(self, members: Sequence[Member], command: Command) -> list[Answer]:
        return await asyncio.gather(*(self.ask(member, command) for member in members))

    async def ask(self, member: Member, command: Command) -> Answer:
        try:
            return await self.roster.ask(member, command, self.order_timeout_s)
        except ReplicaLost as lost:
            return lost

    def give_up(self, member: Member, why: str) -> None:
        self.roster.forget(member.replica_id, why)
        self.replace(member)

    def give_up_unless_gone(self, member: Member, why: str) -> None:
        """One that died is replaced without us, and one that joined anew is brought up for itself."""
        if self.roster.has(member):
            self.give_up(member, why)


async def update_all(
    fleet: Fleet, members: Sequence[Member], parcel: Parcel, options: SwapOptions, make_durable: Callable[[], None]
) -> list[ReplicaUpdate]:
    """Brings `members` to the version of `parcel`.

    Raises:
        WeightsRefused: no engine could take the weights; nothing was changed.
    """
    staged = dict(zip(members, await fleet.ask_all(members, Stage(parcel)), strict=True))
    refuse_if_refused(list(staged.values()))
    make_durable()
    ready = [member for member, answer in staged.items() if error_of(answer) is None]
    swapped = dict(zip(ready, await fleet.ask_all(ready, Swap(options)), strict=True))
    return [outcome(fleet, member, staged[member], swapped.get(member, staged[member])) for member in members]


def refuse_if_refused(staged: Sequence[Answer]) -> None:
    """Replicas that died or broke say nothing of the weights; the others do, if none of them could take them."""
    reports = [answer for answer in staged if isinstance(answer, Report) and not answer.broken]
    errors = [report.error for report in reports if report.error is not None]
    if errors and len(errors) == len(reports):
        raise WeightsRefused(FieldProblem(field="weights", message=f"the engine cannot take them: {errors[0]}"))


def outcome(fleet: Fleet, member: Member, staged: Answer, swapped: Answer) -> ReplicaUpdate:
    """What became of one replica; one that failed is replaced."""
    error = error_of(swapped)
    if error is not None:
        fleet.give_up(member, error)
        return ReplicaUpdate(replica_id=member.replica_id, status="replaced", error=error)
    load_s = staged.load_s if isinstance(staged, Report) else 0.0
    report = swapped if isinstance(swapped, Report) else Report(0, member.loaded)
    return ReplicaUpdate(
        replica_id=member.replica_id, status="swapped", load_s=load_s, swap_s=report.swap_s, pause_s=report.pause_s
    )


async def bring_up(fleet: Fleet, member: Member, parcels: Sequence[Parcel]) -> bool:
    """Brings one replica that came late to the current version; one that fails is replaced."""
    for parcel in parcels:
        for command in (Stage(parcel), Swap(SwapOptions())):
            error = error_of(await fleet.ask(member, command))
            if error is not None:
                fleet.give_up_unless_gone(member, error)
                return False
    return True


def error_of(answer: Answer) -> str | None:
    return str(answer) if isinstance(answer, ReplicaLost) else answer.error
