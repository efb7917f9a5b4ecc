"""Certifies an environment: plays it without a model, by players, laws and probes that its rewards must withstand."""

import asyncio
import json
import math
import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rollout_env.certificate import Certificate, CertifiedCheck, Group, source_of
from rollout_env.check import ORDINARY_REPLIES, Checker, Rule
from rollout_env.environment import Reference, TaskEnvironment, forks_sessions, has_sessions
from rollout_env.play import Reply, Sample, run
from rollout_env.players import PLAYERS, Play, PlayerName, answer_in, play_to_end, replies_without_work
from rollout_env.probes import MARK, NOTHING, PROBES, Host, Probe, ProbeName, host
from rollout_env.records import OutcomeInvalid
from rollout_env.steps import StepTooSlow, call, longest_block
from rollout_env.worth import MOST_AT_ONCE, NotCertified, PolicyServer, shares

Make = Callable[[], TaskEnvironment]
LawName = Literal["equal_plays", "two_processes", "after_any_end", "rejected_input", "resume", "time_limits"]
WorthName = Literal["band", "disputed"]
LAWS: tuple[LawName, ...] = get_args(LawName)
PLAYS = 20
"""How often equal replies are played, half of the times in another process."""
TURNS = 8
"""How often a player repeats its reply."""
MOST_BLOCKED_S = 1.0
MOST_SLOW = 5
"""Plays beyond the time limit, after which no others are made."""
CLOSE = 1e-6
"""Rewards that differ by less are equal."""
SAMPLE, FIRST = "Sample", "Sample 0"
"""Names of samples in findings; of the first one hangs and floods are tried."""
JUNK: Mapping[str, Any] = {"rollout env certify": "no such value"}


class PanelSettings(BaseModel):
    """How an environment is certified."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    samples: int = Field(default=3, ge=1, le=64)
    """Example samples that are played."""
    seed: int = 0
    """Seed of the example samples and of the random player."""
    floor: FiniteFloat | None = None
    """The most that a player without work may earn, in place of the task's own."""
    best: FiniteFloat | None = None
    """The oracle's reward, in place of the task's own."""
    repeatable: bool = True
    """Whether equal replies must earn equal rewards."""
    step_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that a start, or a step with the opening of its session, may take."""
    replies: Sequence[str] = Field(default=ORDINARY_REPLIES, min_length=1)
    """Played where the task knows no solution."""
    only: Sequence[Rule | PlayerName | LawName | ProbeName | WorthName] = ()
    """Names of the checks that are made; by default all."""


async def certify(
    name: str, make: Make, arguments: Mapping[str, Any], settings: PanelSettings, policy: PolicyServer | None = None
) -> Certificate:
    """Plays the panel. Takes a minute or a few; sets a variable of this process meanwhile.

    Args:
        name: of the environment in the certificate, with its `arguments`.
        make: makes an instance; several are made, one of them in a process of its own, for which it is pickled.
        policy: plays the samples too, to see what they are worth to it.
    """
    with host() as this_machine:
        panel = _Panel(make, settings, this_machine)
        try:
            await panel.play()
            if policy is not None:
                await panel.weigh(policy)
        except _AlwaysSlow:
            for check in panel.checks.values():
                check.note = check.note or f"it was given up after {MOST_SLOW} plays beyond the time limit"
        except NotCertified:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the environment has raised
            panel.end(error)
        finally:
            await panel.close()
    left_out = () if policy else get_args(WorthName)
    names = [one for one in panel.checks if one == panel.ended or (panel.wants(one) and one not in left_out)]
    made = [panel.checks[one] for one in names]
    return Certificate(name, arguments, source_of(panel.first), settings.model_dump(), made, panel.measured)


class _AlwaysSlow(Exception):
    """`MOST_SLOW` plays took too long."""


class _Panel:
    """The checks of one environment, and what they have found so far."""

    def __init__(self, make: Make, settings: PanelSettings, this_machine: Host) -> None:
        self._make, self._settings, self._host = make, settings, this_machine
        groups: Mapping[Group, Sequence[str]] = {
            "rules": get_args(Rule),
            "players": PLAYERS,
            "laws": LAWS,
            "isolation": PROBES,
            "worth": get_args(WorthName),
        }
        self.checks = {name: CertifiedCheck(name, group) for group, names in groups.items() for name in names}
        self._instances = [make(), make()]
        self.first = self._instances[0]
        self._solved: dict[str, Play] = {}
        self._slow, self.ended = 0, ""
        self.measured: dict[str, float] = {}

    def wants(self, *names: str) -> bool:
        """Whether one of these checks is made."""
        return not self._settings.only or not set(names).isdisjoint(self._settings.only)

    async def close(self) -> None:
        for environment in self._instances:
            with suppress(Exception):
                await longest_block(call(environment.close), self._settings.step_timeout_s)

    def end(self, error: Exception) -> None:
        """Judges what ended the panel."""
        place = "".join(traceback.format_exception(error)[-2:-1]).strip()
        self.ended = self._under_way
        self.checks[self.ended].judged(f"It raised {type(error).__name__}: {error}\n{place}")

    async def _samples(self) -> Sequence[Sample]:
        self._under_way: Rule = "example_samples"
        count = min(self._settings.samples, self.first.sample_count or self._settings.samples)
        samples: Sequence[Sample] = await call(self.first.example_samples, count, self._settings.seed)
        if not samples:
            raise ValueError("there are no samples")
        self._under_way = "sample"
        return samples

    async def play(self) -> None:
        samples = await self._samples()
        self._cases = cases = [
            (f"{SAMPLE} {number}", sample, await self._worth_of(sample)) for number, sample in enumerate(samples)
        ]
        self._under_way = "step"
        if self.wants(*get_args(Rule)):
            await self._rules([(sample, self._replies(worth)) for _, sample, worth in cases])
        for case in cases:
            await self._oracle(*case)
        solutions = {name: answer_in(play.result) for name, play in self._solved.items()}
        for case in cases:
            await self._without_work(*case, solutions)
            if self.wants("rejected_input") and self._settings.repeatable:
                await self._rejected(*case)
            if self.wants("resume") and self._settings.repeatable:
                await self._resumed(*case)
        if self.wants(*LAWS[:3]):
            await self._equal(*cases[0])
        for case in cases:
            await self._isolation(*case)

    async def _worth_of(self, sample: Sample) -> Reference:
        given, settings = await call(self.first.reference, sample), self._settings
        best = given.best if settings.best is None else settings.best
        floor = given.floor if settings.floor is None else settings.floor
        return replace(given, best=best, floor=floor)

    def _replies(self, worth: Reference) -> Sequence[Reply]:
        return self._settings.replies if worth.replies is None else worth.replies

    async def _play(
        self,
        sample: Sample,
        replies: Sequence[Reply],
        turns: int | None = None,
        may_hang: bool = False,
        elsewhere: bool = False,
    ) -> Play:
        """A rollout, with what each play must keep: on the first instance, or one that goes on `elsewhere`."""
        instance, limit_s = self._instances[elsewhere], self._settings.step_timeout_s
        play = await play_to_end(instance, sample, replies, limit_s, turns, forks=elsewhere)
        if not may_hang:
            is_slow = isinstance(play.error, StepTooSlow)
            self.checks["time_limits"].judged(f"A step of {_shown(replies)} {play.error}." if is_slow else None)
            self._slow += is_slow
            if self._slow >= MOST_SLOW:
                raise _AlwaysSlow
        if isinstance(play.error, OutcomeInvalid):
            self.checks["outcome"].judged(f"{play.error} The replies were {_shown(replies)}.")
        if play.blocked_s > MOST_BLOCKED_S and not may_hang:
            again = await play_to_end(instance, sample, replies, limit_s, turns, forks=elsewhere)
            play = min(play, again, key=lambda each: each.blocked_s)
        if play.blocked_s > MOST_BLOCKED_S and not may_hang:
            took = f"blocked the event loop for {play.blocked_s:.1f} s"
            self.checks["blocking"].judged(f"A step of {_shown(replies)} {took}.")
        return play

    async def _rules(self, cases: Sequence[tuple[Sample, Sequence[Reply]]]) -> None:
        """The rules of `check`, on two instances of their own."""
        settings, known = self._settings, {json.dumps(sample): replies for sample, replies in cases}
        checker = Checker(
            [self._make(), self._make()],
            lambda sample: known.get(json.dumps(sample), settings.replies),
            MOST_BLOCKED_S,
            settings.step_timeout_s,
        )
        found = await checker.findings(len(cases), settings.seed, settings.repeatable)
        for rule in get_args(Rule):
            self.checks[rule].judged(plays=len(cases))
        for finding in found:
            self.checks[finding.rule].judged(finding.message, plays=0)

    async def _oracle(self, name: str, sample: Sample, worth: Reference) -> None:
        if worth.replies is None:
            self.checks["oracle"].note = "the task knows no solution"
            return
        play = await self._play(sample, worth.replies)
        is_best = play.reward is not None and math.isclose(play.reward, worth.best, abs_tol=CLOSE)
        said = f"{name}: the solution {play}, and the best is {worth.best:g}."
        self.checks["oracle"].judged(None if is_best else said)
        if play.error is None:
            self._solved[name] = play

    async def _without_work(
        self, name: str, sample: Sample, worth: Reference, solutions: Mapping[str, tuple[str, str]]
    ) -> None:
        begun = await self._play(sample, [])
        prompt = begun.result.message_log[-1]["content"] if begun.result.message_log else ""
        solving, answer = solutions.get(name, ("", ""))
        wrong = [other for _, other in solutions.values() if other and other != answer and 0 < len(solving) < 2000]
        # What a wrong answer earns by itself is no fault of what stands beside it.
        alone = [await self._play(sample, [solving.replace(answer, one)] * TURNS) for one in wrong[:1] + wrong[-1:]]
        partial = replace(worth, floor=max([worth.floor, *(play.reward or 0.0 for play in alone)]))
        if not wrong:
            self.checks["all_answers"].note = "no answers of two samples are known"
        for player, reply in replies_without_work(prompt, worth, (solving, answer), wrong, self._settings.seed):
            may_hang = player in ("hang", "flood")
            if (may_hang and name != FIRST) or not self.wants(player, "time_limits", "blocking", "outcome"):
                continue
            play = await self._play(sample, [reply] * (1 if may_hang else TURNS), may_hang=may_hang)
            of_player = partial if player in ("all_answers", "injection") else worth
            self.checks[player].judged(_undeserved(name, play, of_player, f"the reply {_shown([reply])}"))
        if worth.program is None:
            self.checks["hang"].note = "replies run nothing"

    async def _rejected(self, name: str, sample: Sample, worth: Reference) -> None:
        """Fields that are missing or senseless must fail the sample, unless it is played as if they were right."""
        replies, info = self._replies(worth), dict(sample.get("extra_env_info") or {})
        expected = (await self._play(sample, replies)).verdict
        for field in info:
            for what, changed in (("missing", {}), ("senseless", {field: JUNK})):
                given = {key: value for key, value in info.items() if key != field} | changed
                play = await self._play({**sample, "extra_env_info": given}, replies)
                # A default may earn something else, which is right; nothing at all is what trainers see of a failure.
                is_right = (play.error is not None and play.is_typed) or play.verdict == expected or bool(play.reward)
                wrong = f"{name}: with extra_env_info.{field} {what} its rollout {play}. Refuse it by ExtraEnvInfo: "
                wrong += "a trainer takes a failed sample out, and this one for a wrong answer."
                self.checks["rejected_input"].judged(None if is_right else wrong)
        if not info:
            self.checks["rejected_input"].note = "samples have no fields"

    async def _resumed(self, name: str, sample: Sample, worth: Reference) -> None:
        """A rollout that goes on elsewhere from its saved state must end as the undisturbed one."""
        check, replies = self.checks["resume"], self._replies(worth)
        if has_sessions(type(self.first)) and not forks_sessions(self.first):
            check.note = "its sessions cannot be forked"
            return
        undisturbed = await self._play(sample, replies)
        check.note = check.note or "its rollouts have one turn"
        for turn in range(1, len(undisturbed.result.turns)):
            before = (await self._play(sample, replies, turns=turn)).result
            saved = {name: getattr(before, name) for name in ("message_log", "extra_env_info", "stop_strings")}
            resumed = await self._play(saved, replies[turn:], elsewhere=True)
            total = before.total_reward + resumed.result.total_reward
            is_equal = math.isclose(total, undisturbed.result.total_reward, abs_tol=CLOSE) and (
                resumed.result.message_log == undisturbed.result.message_log
            )
            wrong = f"{name}: turns before earned {before.total_reward:g}, and resumed after turn {turn} it {resumed}; "
            wrong += f"undisturbed it {undisturbed}."
            check.judged(None if is_equal else wrong)

    async def _equal(self, _: str, sample: Sample, worth: Reference) -> None:
        """Equal replies must earn equal rewards: again, in another process, and after any end of another rollout."""
        if not self._settings.repeatable:
            for law in ("equal_plays", "two_processes", "after_any_end"):
                self.checks[law].note = "equal replies may earn different rewards"
            return
        cases = [(sample, self._replies(worth)), (sample, [self._settings.replies[0]] * TURNS)]
        expected = [(await self._play(*case)).verdict for case in cases]

        async def again(law: str, place: int, when: str) -> None:
            self.checks[law].judged(_difference((await self._play(*cases[place])).verdict, expected[place], when))

        for number in range(PLAYS // 2):
            await again("equal_plays", number % len(cases), "played again")
        for when, changed, replies, turns in (
            ("after a rollout that was left", {}, cases[0][1], 1),
            ("after a rollout without a reply", {}, [], None),
            ("after an awkward reply", {}, ["\x00"], None),
            ("after a sample that was rejected", {"extra_env_info": JUNK}, cases[0][1], None),
        ):
            await self._play({**sample, **changed}, replies, turns)
            await again("after_any_end", 0, when)
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            work = pool.submit(verdicts_of, self._make, cases, PLAYS // 4, self._settings.step_timeout_s)
            verdicts = await asyncio.wrap_future(work)
            await asyncio.to_thread(pool.shutdown)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever keeps it from another process is said
            problem = f"It cannot be played in a process of its own: {type(error).__name__}: {error}."
            self.checks["two_processes"].judged(problem)
            return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for number, verdict in enumerate(verdicts):
            different = _difference(verdict, expected[number % len(cases)], "in another process")
            self.checks["two_processes"].judged(different)

    async def _isolation(self, name: str, sample: Sample, worth: Reference) -> None:
        if worth.program is None:
            for check in PROBES:
                self.checks[check].note = "replies run nothing"
            return
        for probe in self._host.probes(worth.hidden):
            if not self.wants(probe.check) or (probe.check == "network" and worth.reaches):
                continue
            play = await self._play(sample, [worth.program(probe.source)])
            if probe.check in ("hidden_files", "hidden_variables", "network") and MARK not in play.text:
                self.checks[probe.check].note = "nothing of what its programs print is shown"
                continue
            self.checks[probe.check].judged(_undeserved(name, play, worth, f"a program that {probe.what}"))
            self.checks[probe.check].judged(self._broken_wall(probe, play), plays=0)

    async def weigh(self, policy: PolicyServer) -> None:
        """Has the policy play the samples that were played, and each of its rollouts judged a second time."""
        places, solved = asyncio.Semaphore(MOST_AT_ONCE), []

        async def weighed(sample: Sample, worth: Reference) -> bool:
            tools = sample.get("tools") or self.first.tools
            async with places:
                limit_s = self._settings.step_timeout_s
                play = await play_to_end(self.first, sample, lambda messages: policy.reply(messages, tools), limit_s)
                if isinstance(play.error, NotCertified):
                    raise play.error
                said = [message for message in play.result.message_log if message["role"] == "assistant"]
                again = await play_to_end(self._instances[1], sample, said[-len(play.result.turns) :], limit_s)
            differs = f"A rollout of the policy {play}, and judged a second time it {again}."
            self.checks["disputed"].judged(differs if play.verdict != again.verdict else None)
            return play.reward is not None and play.reward >= worth.best - CLOSE

        for _, sample, worth in self._cases:
            solved.append(await asyncio.gather(*(weighed(sample, worth) for _ in range(policy.generations))))
        self.measured = shares(solved)
        (least, most), share = policy.band, self.measured["solved"]
        outside = f"The policy solves {share:g} of its rollouts, and the band is {least:g} to {most:g}."
        self.checks["band"].judged(None if least <= share <= most else outside, plays=len(solved) * policy.generations)

    def _broken_wall(self, probe: Probe, play: Play) -> str | None:
        was_reached, (_, _, said) = self._host.was_reached(), play.text.partition(f"{MARK} ")
        if probe.check == "left_behind":
            return "A process that a program left runs on after its rollout." if self._host.processes_left() else None
        if said and not said.startswith(NOTHING):
            return f"A program that {probe.what} found {said.partition(chr(10))[0][:200]}."
        return "A program connected to this machine." if was_reached else None


def verdicts_of(make: Make, cases: Sequence[tuple[Sample, Sequence[Reply]]], times: int, timeout_s: float) -> list[Any]:
    """The verdicts of the cases, in turn, so many times: what the other process computes."""

    async def played() -> list[Any]:
        environment = make()
        try:
            return [(await play_to_end(environment, *case, timeout_s)).verdict for _ in range(times) for case in cases]
        finally:
            await longest_block(call(environment.close), timeout_s)

    return run(played())


def _undeserved(name: str, play: Play, worth: Reference, what: str) -> str | None:
    """The fault of a rollout that must earn nothing, if it has one."""
    if play.reward is not None and not play.reward <= worth.floor + CLOSE:
        return f"{name}: {what} {play}, and the floor is {worth.floor:g}."
    return None if play.is_typed else f"{name}: {what} {play}, which is a fault of the environment."


def _difference(verdict: Any, expected: Any, when: str) -> str | None:
    return None if verdict == expected else f"Equal replies gave {verdict} {when}, and {expected} before."


def _shown(replies: Sequence[Reply]) -> str:
    reply = replies[0] if replies else ""
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return repr(text) if len(text) < 300 else f"{text[:300]!r}..."
