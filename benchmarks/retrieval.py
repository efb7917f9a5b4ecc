"""How many searches over 10,000 documents the task `retrieval` answers in a second: `make bench-retrieval`.

The environment is stepped as its replica steps it, with calls read out of text, JSON schema and validation on both
sides: one search after the other, and 64 at once. Documents have 100 words of a vocabulary whose frequencies fall as in
a natural language (Zipf's law), queries have 6. The last line is JSON.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from deployments.environments.step_runner import StepRunner
from deployments.protocols.environments import StepRequest
from deployments.tasks.retrieval import RetrievalEnvironment
from rollout_env import StepOutcome

WORDS, WORDS_OF_DOCUMENT, WORDS_OF_QUERY = 20_000, 100, 6
AT_ONCE = 64


def texts(count: int, words: int, draw: random.Random) -> list[str]:
    vocabulary = [f"w{number}" for number in range(WORDS)]
    frequencies = [1 / (rank + 1) for rank in range(WORDS)]
    return [" ".join(draw.choices(vocabulary, frequencies, k=words)) for _ in range(count)]


def request(number: int, query: str) -> StepRequest:
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    message_log = [
        {"role": "user", "content": "Question"},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
    ]
    return StepRequest(message_log, {"answers": ["x"]}, step_id=str(number))  # type: ignore[arg-type]


async def searches_per_s(runner: StepRunner, queries: list[str], at_once: int) -> float:
    """Raises `AssertionError` if a search finds nothing."""
    slots = asyncio.Semaphore(at_once)

    async def step(number: int, query: str) -> None:
        async with slots:
            outcome = await runner.start(request(number, query), set())
        assert isinstance(outcome, StepOutcome)
        assert outcome.observations[0]["content"].startswith("[")

    await step(-1, queries[0])
    started = time.monotonic()
    await asyncio.gather(*(step(number, query) for number, query in enumerate(queries)))
    return len(queries) / (time.monotonic() - started)


def main(
    documents: Annotated[int, typer.Option(help="In the corpus.")] = 10_000,
    searches: Annotated[int, typer.Option(help="Of each measurement.")] = 2_000,
) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.jsonl")
        lines = (json.dumps({"text": text}) for text in texts(documents, WORDS_OF_DOCUMENT, draw))
        path.write_text("\n".join(lines))
        started = time.monotonic()
        environment = RetrievalEnvironment(corpus=path)
        index_s = time.monotonic() - started
    queries = texts(searches, WORDS_OF_QUERY, draw)

    async def measured(at_once: int) -> float:
        return await searches_per_s(StepRunner(environment, "retrieval", step_timeout_s=120), queries, at_once)

    found = {f"at_once_{at_once}": round(asyncio.run(measured(at_once)), 1) for at_once in (1, AT_ONCE)}
    result = {
        "searches_per_s": found,
        "documents": documents,
        "index_s": round(index_s, 2),
        "cores": os.cpu_count() or 1,
    }
    typer.echo(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
