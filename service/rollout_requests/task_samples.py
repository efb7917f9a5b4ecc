"""Samples that a caller need not send: those of a task's data, or else those that its environment makes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pydantic_core import to_json

from deployments.data.rows import DataReader, DataRefused, within_bytes
from deployments.protocols.environments import TaskDescription
from deployments.protocols.generation import Environment, derived_seed
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.info import TaskInfo
from rollout_client.contract.rollouts import RolloutRequest, SampleInput
from rollout_client.contract.selection import SampleRange
from service.problems import invalid_request, unknown_task
from service.rollout_requests.body_parser import BodyParser
from service.rollout_requests.parsing import rollouts_problem
from service.rollout_requests.sample_ranges import drawn_ranges, pieces_of
from service.rollout_requests.validation import keep_problems
from service.settings import RequestLimits

BEGIN = b'{"samples":['
"""A document of samples begins with it."""


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """Reads the samples of each task from its data, or has its environment make them."""

    environments: Mapping[str, Environment]
    data: DataReader | None = None
    tasks_with_data: Set[str] = frozenset()
    """The tasks of `data`."""

    async def sizes(self) -> dict[str, dict[str, int]]:
        """Rows by split, by task that has data. Raises `DataLost`."""
        return {} if self.data is None else await self.data.sizes()

    async def listed(self) -> list[TaskInfo]:
        """All tasks. Raises `EnvironmentLost` or `DataLost` if an environment or the data do not answer."""
        sizes = await self.sizes()
        descriptions = await asyncio.gather(*(environment.describe() for environment in self.environments.values()))
        return [
            TaskInfo(
                task_name=description.task_name,
                description=description.description,
                fields=description.fields,
                tools=description.tools,
                example=SampleInput.model_validate(description.example),
                **_further(description, sizes.get(task_name)),
            )
            for task_name, description in zip(self.environments, descriptions, strict=True)
        ]

    async def page(self, wanted: SampleRange, most_bytes: int) -> bytearray:
        """The JSON of a page of a task that exists: `samples`, `next_start`, and `sample_count` where there is one.

        Raises:
            RequestProblem: 422, there is no such split, or a row of the data is not a sample.
            RolloutFailure: the data or the environment do not answer.
        """
        page = bytearray(BEGIN)
        count = await self._add(page, self._lines(wanted, most_bytes), "query")
        fields = {"next_start": wanted.start + count}
        if wanted.task_name not in self.tasks_with_data:
            description = await self.environments[wanted.task_name].known_description()
            if description.sample_count is not None:
                fields["sample_count"] = description.sample_count
        return _document(page, fields)

    async def with_revisions(self, ranges: Sequence[SampleRange]) -> list[SampleRange]:
        """The ranges with the revisions of their data. Those of a task without data have none.

        Raises:
            RequestProblem: 422, a range names another revision, or there is no such split.
            DataLost: the data do not answer.
        """
        return [await self._with_revision(drawn, f"samples_from[{place}]") for place, drawn in enumerate(ranges)]

    async def _with_revision(self, drawn: SampleRange, field: str) -> SampleRange:
        revision = None
        if self.data is not None and drawn.task_name in self.tasks_with_data:
            with _refusals(field):
                revision = await self.data.revision(drawn)
        if drawn.revision is not None and drawn.revision != revision:
            message = (
                f"the data of task {drawn.task_name!r}, or their settings, are not those that this range was made for, "
                "so its places may have other samples; bring those data back, or send a range without a revision, "
                "which may play samples again and leave some out"
            )
            raise invalid_request(FieldProblem(field=f"{field}.revision", message=message, value=drawn.revision))
        return drawn if revision is None else drawn.model_copy(update={"revision": revision})

    async def fill(
        self, request: RolloutRequest, parser: BodyParser, limits: RequestLimits, hold: Callable[[int], None]
    ) -> int:
        """Puts the samples of `samples_from` into the request. Returns how many bytes of JSON they took.

        Args:
            hold: called with the bytes so far, before more are read.

        Raises:
            RequestProblem: 422, a range or its samples are not valid, or `hold` raises it.
            RolloutFailure: the data or an environment do not answer.
        """
        self._refuse_invalid(request, limits)
        if any(drawn.revision is not None for drawn in request.samples_from):
            await self.with_revisions(request.samples_from)
        body = bytearray(BEGIN)
        for field, wanted in self._wanted(request):
            lines = self._lines(wanted, limits.max_body_bytes - len(body), needs_all=True)
            if await self._add(body, lines, field, hold) < wanted.size:
                message = f"the samples take more than {limits.max_body_bytes} bytes; ask for fewer"
                raise invalid_request(FieldProblem(field=f"{field}.count", message=message, value=wanted.count))
        size = len(body)
        request.samples = (await parser.parse(_document(body, {}))).samples
        return size

    def _wanted(self, request: RolloutRequest) -> Iterator[tuple[str, SampleRange]]:
        """The ranges that are read, with their fields. With `keep.where` those that follow them as well."""
        given = request.samples_from
        wanted: Iterable[SampleRange] = given
        if request.keep.where is not None:
            wanted = drawn_ranges(given, request.sample_count)
        for place, drawn in enumerate(wanted):
            yield f"samples_from[{place % len(given)}]", drawn

    def _refuse_invalid(self, request: RolloutRequest, limits: RequestLimits) -> None:
        problems = [
            unknown_task(f"samples_from[{place}].task_name", wanted.task_name, self.environments)
            for place, wanted in enumerate(request.samples_from)
            if wanted.task_name not in self.environments
        ]
        most = limits.max_rollouts_per_request
        if request.keep.where is not None:
            problems += keep_problems(request)
        if too_many := rollouts_problem(request.sample_count, request.num_generations, most):
            at = "samples_from" if request.keep.where is None else "keep.draw_at_most"
            problems.append(too_many.model_copy(update={"field": at}))
        if problems:
            raise invalid_request(*problems)

    async def _add(
        self,
        document: bytearray,
        lines: AsyncGenerator[bytes, None],
        field: str,
        hold: Callable[[int], None] = lambda _size: None,
    ) -> int:
        """Adds samples to the document, whose JSON is not parsed. Returns how many."""
        count = 0
        with _refusals(field):
            async with aclosing(lines) as parts:
                async for part in parts:
                    hold(len(document) + len(part))
                    count += part.count(b"\n")
                    # A newline is nowhere else in JSON: texts escape it.
                    document += part.replace(b"\n", b",")
        return count

    def _lines(self, wanted: SampleRange, most_bytes: int, needs_all: bool = False) -> AsyncGenerator[bytes, None]:
        """Parts of JSON lines, fewer than wanted if they would take more than `most_bytes`.

        Args:
            needs_all: an environment that makes fewer than wanted raises `DataRefused`.
        """
        if self.data is not None and wanted.task_name in self.tasks_with_data:
            return _lines_of_data(self.data, wanted, most_bytes)
        return self._lines_of_environment(wanted, most_bytes, needs_all)

    async def _lines_of_environment(
        self, wanted: SampleRange, most_bytes: int, needs_all: bool
    ) -> AsyncGenerator[bytes, None]:
        """The samples that the environment makes from this start on: another start has other samples."""
        if wanted.split is not None:
            raise DataRefused(f"task {wanted.task_name!r} has no data, so it has no splits", "split", wanted.split)
        seed = wanted.seed or 0
        seed = derived_seed(seed, wanted.start) if wanted.start else seed
        made = await self.environments[wanted.task_name].example_samples(wanted.count, seed)
        if needs_all and len(made) < wanted.count:
            message = f"the environment of task {wanted.task_name!r} makes only {len(made)} samples; ask for fewer"
            raise DataRefused(message, "count", wanted.count)
        chosen = (made[piece.start - wanted.start : piece.end - wanted.start] for piece in pieces_of(wanted))
        samples = within_bytes(map(to_json, chain.from_iterable(chosen)), most_bytes)
        yield await asyncio.to_thread(lambda: b"".join(sample + b"\n" for sample in samples))


@contextmanager
def _refusals(field: str) -> Iterator[None]:
    """Raises `RequestProblem` (422) for `DataRefused` in the block; `field` is that of the range."""
    try:
        yield
    except DataRefused as error:
        path = f"{field}.{error.field}".removesuffix(".")
        raise invalid_request(FieldProblem(field=path, message=str(error), value=error.value)) from error


async def _lines_of_data(data: DataReader, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
    """The lines piece by piece; the last piece may be cut off."""
    left_bytes = most_bytes
    for piece in pieces_of(wanted):
        places = {"start": piece.start, "count": piece.count, "without": []}
        count = 0
        async with aclosing(data.samples(wanted.model_copy(update=places), left_bytes)) as parts:
            async for part in parts:
                count += part.count(b"\n")
                left_bytes -= len(part)
                yield part
        if count < piece.count:
            return


def _document(samples: bytearray, further_fields: Mapping[str, int]) -> bytearray:
    """Ends the document of the samples, with these fields behind them."""
    if samples.endswith(b","):
        del samples[-1:]
    samples += b"]"
    for name, value in further_fields.items():
        samples += f',"{name}":{value}'.encode()
    samples += b"}"
    return samples


def _further(description: TaskDescription, sizes: dict[str, int] | None) -> dict[str, Any]:
    """The fields of `TaskInfo` that only some tasks have."""
    given = {"splits": sizes, "certificate": description.certificate}
    return {name: value for name, value in given.items() if value is not None}
