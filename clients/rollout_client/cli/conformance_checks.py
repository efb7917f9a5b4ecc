"""The checks of `rollout conformance`: what a trainer must be able to rely on, asked of a rollout server from outside.

The server answers vLLM's `/inference/v1/generate` or SGLang's `/generate`. Each check is told by what it saw, and cites
who demands it. A server that lacks what a check needs does not offer it, which is no failure.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from math import exp, log
from statistics import fmean
from typing import Any, Literal, TypeVar
from uuid import uuid4

import httpx

from rollout_client.cli.probed_server import (
    LIKELIEST,
    PROMPT,
    TOKENS,
    NotOffered,
    ProbedGeneration,
    ProbedServer,
    Refused,
)

_MILES = "miles at 31f1ca9, docs/advanced/disaggregated-rollout.md"
_TRL = "TRL 1.16, experimental/async_grpo/async_rollout_worker.py"
_SKYRL = "SkyRL at a956457, inference_servers/remote_inference_client.py"
_NEMO_RL = "NeMo-RL v0.3.0, experience/rollouts.py: failed samples have a reward of 0"
_LONG, _LONG_BY_DEFAULT = 4096, 1024
"""Tokens of a generation that others meet while it runs: at most, and where the server does not say its longest."""
IN_FLIGHT = 64
_TEMPERATURE = 0.5
_MEAN_DIFFERENCE, _LARGEST_DIFFERENCE = 0.05, 0.5
"""In nats: bfloat16 rounds by less, and another temperature differs by more."""
_TIE, _ROUNDING = -0.5, 0.2
"""Neither of two equally likely tokens has a probability above one half, and they differ by rounding alone."""
_FAR = 1_000_000
BEGUN_AFTER_S = 0.5
CLEARLY_LONG_S = 2.0
_RETRYABLE = frozenset({HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS, 502, 503, 504})
Result = Literal["pass", "fail", "not offered"]
Sent = TypeVar("Sent")


class _Violated(Exception):
    """A server does not do what a check demands; the message says what it saw."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the table."""

    check: str
    result: Result
    saw: str
    demanded_by: str


def _demand(holds: bool, saw: str) -> None:
    if not holds:
        raise _Violated(saw)


def _first_difference(one: ProbedGeneration, other: ProbedGeneration, skipped: int = 0) -> str | None:
    """Where greedy generations differ other than by a tie; `other` begins with the token `skipped` of `one`."""
    for place, (left, right) in enumerate(zip(one.ids[skipped:], other.ids, strict=False)):
        if left != right:
            of_one, of_other = one.logprobs[skipped + place], other.logprobs[place]
            is_tie = max(of_one, of_other) <= _TIE and abs(of_one - of_other) <= _ROUNDING
            return None if is_tie else f"token {skipped + place} is {left}, and {right} when it is asked again"
    return None


async def _tokens(server: ProbedServer) -> str:
    whole = await server.generate()
    _demand(len(whole.ids) == TOKENS, f"{len(whole.ids)} token ids where {TOKENS} were asked for")
    _demand(len(whole.logprobs) == TOKENS, f"{len(whole.logprobs)} log-probabilities of {TOKENS} tokens")
    half = TOKENS // 2
    rest = await server.generate([*PROMPT, *whole.ids[:half]], tokens=half)
    _demand(len(rest.ids) == half, f"{len(rest.ids)} token ids where {half} were asked for")
    if (difference := _first_difference(whole, rest, half)) is not None:
        raise _Violated(f"{difference} with the ids before it as the prompt")
    return f"{TOKENS} greedy ids, and the same after the first {half} as a prompt"


async def _distances(server: ProbedServer, temperature: float) -> list[float]:
    """How far the log-probabilities of a generation are from those that the server gives its tokens as a prompt."""
    made = await server.generate(temperature=temperature)
    scored = (await server.generate([*PROMPT, *made.ids], tokens=1, scores=True)).prompt[len(PROMPT) :]
    if len(scored) != len(made.ids):
        raise NotOffered("the server gives no log-probabilities of prompts")
    found = []
    for token, logprob, at in zip(made.ids, made.logprobs, scored, strict=True):
        expected = (at or {}).get(token)
        if expected is None:
            raise NotOffered("the server gives no log-probability of a prompt's token")
        highest = lowest = expected
        if temperature not in (0.0, 1.0):
            if at is None or len(at) < LIKELIEST // 2:
                raise NotOffered("the server names no likeliest tokens of a prompt")
            named = sum(exp(each / temperature) for each in at.values())
            # The others are none of them likelier than the least likely one that is named.
            others = max(1 - sum(map(exp, at.values())), 0) * exp(min(at.values()) * (1 / temperature - 1))
            highest, lowest = (expected / temperature - log(total) for total in (named, named + others))
        found.append(max(logprob - highest, lowest - logprob, 0.0))
    return found


def _logprobs_at(*temperatures: float) -> "_Check":
    async def check(server: ProbedServer) -> str:
        saw = []
        for temperature in temperatures:
            distances = await _distances(server, temperature)
            mean, largest = fmean(distances), max(distances)
            seen = f"at temperature {temperature:g} {mean:.3f} nats from the server's own scores, {largest:.2f} at most"
            _demand(mean <= _MEAN_DIFFERENCE and largest <= _LARGEST_DIFFERENCE, seen)
            saw.append(seen)
        return "; ".join(saw)

    return check


async def _stop_reasons(server: ProbedServer) -> str:
    whole = await server.generate(ignore_eos=False)
    if len(whole.ids) < TOKENS:
        raise NotOffered(f"the model ends its answer to {len(PROMPT)} unusual ids after {len(whole.ids)} by itself")
    _demand(whole.finish_reason == "length", f"{whole.finish_reason!r} after as many tokens as were asked for")
    firsts = [place for place, token in enumerate(whole.ids) if place and whole.ids.index(token) == place]
    if not firsts:
        raise NotOffered("the model repeats one token")
    before = firsts[len(firsts) // 2]
    ended = await server.generate(stop=[whole.ids[before]], ignore_eos=False)
    _demand(ended.finish_reason == "stop", f"{ended.finish_reason!r} at a stop token")
    expected = whole.ids[: before + 1]
    _demand(ended.ids in (expected, expected[:-1]), f"{len(ended.ids)} ids where the stop token is the {before + 1}th")
    return f"length after {TOKENS} tokens, stop at a stop token"


async def _versioned(server: ProbedServer) -> ProbedGeneration:
    made = await server.generate()
    if not made.versions:
        raise NotOffered("answers name no versions of the weights")
    return made


def _covers(made: ProbedGeneration) -> bool:
    """Whether each token has one version."""
    starts, ends = ([span[place] for span in made.versions] for place in (1, 2))
    return [*starts, len(made.ids)] == [0, *ends]


async def _versions(server: ProbedServer) -> str:
    made = await _versioned(server)
    _demand(_covers(made), f"its versions {made.versions} are not those of its {len(made.ids)} tokens")
    return f"{made.versions[0][0]} at the start and {made.versions[-1][0]} at the end, of each token"


async def _current(server: ProbedServer) -> int:
    version = (await _versioned(server)).versions[-1][0]
    if not version.isdecimal():
        raise NotOffered(f"versions are no numbers: {version}")
    return int(version)


def _constrained(field: str) -> "_Check":
    async def check(server: ProbedServer) -> str:
        current = await _current(server)
        try:
            made = await server.generate(weight_version={field: current})
        except Refused as refused:
            raise NotOffered(f"weight_version.{field} is not known: {refused}") from refused
        names = {name for name, _, _ in made.versions}
        _demand(names == {str(current)}, f"versions {sorted(names)} where {current} was demanded")
        try:
            older = await server.generate(weight_version={field: current + _FAR})
        except Refused as refused:
            _demand(refused.status in _RETRYABLE, f"a refusal that is not retryable: {refused}")
            return f"version {current} answers; {refused.status} for one that is not there"
        raise _Violated(f"version {older.versions[-1][0] if older.versions else current} answered for a newer one")

    return check


async def _failures(server: ProbedServer) -> str:
    seen, wrong = [], {"no token's id": [-1]}
    if server.longest is not None:
        wrong["a prompt without room"] = [PROMPT[0]] * (server.longest + 1)
    for what, prompt in wrong.items():
        try:
            made = await server.generate(prompt)
        except Refused as refused:
            _demand(400 <= refused.status < 500, f"{what}: {refused}")
            seen.append(f"{refused.status} for {what}")
        else:
            raise _Violated(f"{what} is answered with {len(made.ids)} tokens and {made.finish_reason!r}")
    return ", ".join(seen)


async def _idempotency(server: ProbedServer) -> str:
    tasks = (await server.get("/v1/tasks"))["tasks"]
    if not tasks:
        raise NotOffered("the server has no tasks to play")
    body: dict[str, Any] = {"samples": [tasks[0]["example"]], "num_generations": 2}
    body["sampling"] = {"temperature": 1.0, "max_new_tokens": TOKENS}
    key = uuid4().hex
    played = [(await server.post("/v1/rollout", body, **{"Idempotency-Key": key}))["samples"] for _ in range(2)]
    failed = [sample["error"] for sample in played[0] if sample["status"] == "error"]
    _demand(not failed, f"a rollout failed: {failed[:1]}")
    first, again = ([_ids_of(sample) for sample in samples] for samples in played)
    _demand(all(generated for generated, _ in first), "a rollout without a generated token")
    _demand(first == again, "the same key made other tokens")
    return f"{len(first)} rollouts once, and the same tokens again"


def _ids_of(sample: Any) -> tuple[int, list[list[int]]]:
    """How many tokens were generated, and the ids of all messages."""
    log = sample["message_log"]
    generated = sum(len(message["token_ids"]) for message in log if message.get("generation_logprobs"))
    return generated, [message["token_ids"] for message in log]


async def _cancellation(server: ProbedServer) -> str:
    if (running := await server.running()) != 0:
        raise NotOffered(f"{running} generations of others run; try again when the server is idle")
    clock = asyncio.get_running_loop().time
    began = clock()
    await _long(server)
    whole_s = clock() - began
    if whole_s < CLEARLY_LONG_S:
        raise NotOffered(f"the longest generation takes {whole_s:.1f} s, too little to see it freed")
    generation = asyncio.create_task(_long(server))
    is_seen = await _until(server.running, lambda running: running > 0, whole_s / 2)
    generation.cancel()
    began = clock()
    with suppress(asyncio.CancelledError):
        await generation
    if not is_seen:
        raise NotOffered("the server did not say that it runs")
    freed = await _until(server.running, lambda running: running == 0, whole_s / 2)
    freed_s = clock() - began
    _demand(freed, f"it still ran {freed_s:.1f} s after its caller had gone; a whole one takes {whole_s:.1f} s")
    return f"free {freed_s:.1f} s after its caller had gone; a whole one takes {whole_s:.1f} s"


async def _long(server: ProbedServer) -> ProbedGeneration:
    most = min(_LONG, (server.longest or _LONG_BY_DEFAULT) - len(PROMPT))
    return await server.generate(tokens=most, temperature=1.0)


async def _until(ask: Callable[[], Awaitable[Sent]], is_so: Callable[[Sent], bool], within_s: float) -> bool:
    """Whether it was so within the time."""
    clock = asyncio.get_running_loop().time
    end = clock() + within_s
    while not is_so(await ask()):
        if clock() > end:
            return False
        await asyncio.sleep(0.05)
    return True


async def _in_flight(server: ProbedServer) -> str:
    prompts = [(*PROMPT, 20 + number % (IN_FLIGHT // 2)) for number in range(IN_FLIGHT)]
    lengths = [1 + number % 8 for number in range(IN_FLIGHT)]
    try:
        made = await asyncio.gather(*map(server.generate, prompts, lengths))
    except Refused as refused:
        if refused.status != HTTPStatus.TOO_MANY_REQUESTS:
            raise
        raise NotOffered(f"the server takes fewer than {IN_FLIGHT} at once") from refused
    for number, (generated, length) in enumerate(zip(made, lengths, strict=True)):
        saw = f"answer {number} has {len(generated.ids)} tokens where it asked for {length}"
        _demand(len(generated.ids) == length, saw)
    for number, (one, other) in enumerate(zip(made, made[IN_FLIGHT // 2 :], strict=False)):
        if (difference := _first_difference(one, other)) is not None:
            raise _Violated(f"answers {number} and {number + IN_FLIGHT // 2} of one prompt: {difference}")
    return f"{IN_FLIGHT} at once, each with its own length, and equal ones for equal prompts"


def _mixed(checkpoint: str | None) -> "_Check":
    async def check(server: ProbedServer) -> str:
        if checkpoint is None:
            raise NotOffered("name a checkpoint that the server can read: --checkpoint")
        before = await _current(server)
        generation = asyncio.create_task(_long(server))
        await asyncio.sleep(BEGUN_AFTER_S)
        try:
            await server.post("/update_weights", {"weight_dir": checkpoint})
            is_whole = generation.done()
        except Refused as refused:
            if refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            raise NotOffered(f"the server does not take the checkpoint: {refused}") from refused
        finally:
            made = await generation
        if is_whole:
            raise NotOffered("the longest generation ended before the weights had changed")
        after = await _current(server)
        _demand(after != before, f"the version is {after} before and after")
        _demand(_covers(made), f"its versions {made.versions} are not those of its {len(made.ids)} tokens")
        names = [name for name, _, _ in made.versions]
        said = f"a generation across the change says {' then '.join(names)}"
        _demand(names[-1] == str(after) and all(one != other for one, other in pairwise(names)), said)
        return said

    return check


_Check = Callable[[ProbedServer], Awaitable[str]]


def _checks(checkpoint: str | None) -> dict[str, tuple[_Check, str]]:
    """By its name, each check and who demands it."""
    return {
        "tokens in, tokens out": (_tokens, _TRL),
        "log-probabilities, greedy": (_logprobs_at(0.0), _TRL),
        "log-probabilities, sampled": (_logprobs_at(1.0, _TEMPERATURE), _TRL),
        "stop reasons": (_stop_reasons, _SKYRL),
        "versions at start and end": (_versions, _MILES),
        "minimum version": (_constrained("min_version"), _MILES),
        "exact version": (_constrained("exact_version"), _MILES),
        "no mixture unsaid": (_mixed(checkpoint), _MILES),
        "failure is no answer": (_failures, _NEMO_RL),
        "idempotency": (_idempotency, _MILES),
        "cancellation frees the engine": (_cancellation, "slime at 624b824a, rollout/sglang_rollout.py"),
        "order and completeness": (_in_flight, _SKYRL),
    }


async def findings(
    http: httpx.AsyncClient,
    checkpoint: str | None = None,
    only: str | None = None,
    on_begin: Callable[[str], None] = lambda _: None,
) -> list[CheckResult]:
    """Makes each check, or only one, of the server that `http` has as its base.

    Args:
        checkpoint: a folder that the server may read.
        on_begin: called with the name of each check before it is made.

    Raises:
        ValueError: it has none of the APIs.
        httpx.HTTPError: it cannot be reached.
    """
    server, found = ProbedServer(http), list[CheckResult]()
    await server.meet()
    for name, (check, source) in _checks(checkpoint).items():
        if only not in (None, name):
            continue
        result: Result = "pass"
        on_begin(name)
        try:
            saw = await check(server)
        except NotOffered as missing:
            result, saw = "not offered", str(missing)
        except (_Violated, httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as violated:
            result, saw = "fail", str(violated) if isinstance(violated, _Violated) else repr(violated)
        found.append(CheckResult(name, result, saw, source))
    return found
