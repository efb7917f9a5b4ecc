"""How long one call of a large session keeps the event loop of the session store: `python -m benchmarks.session_store`.

A session of so many calls, each with half of its tokens in a message of the program and half in the response, on one
conversation that grows. Milliseconds of processor time of the last call, which is the longest. The last line is JSON.
"""

import json
import random
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from deployments.protocols.generation import WeightSpan, packed_ids, packed_logprobs
from deployments.sessions.codec import OPENED, call_entry, session_of, written
from deployments.sessions.records import (
    ChatContext,
    EngineCall,
    GeneratedMessage,
    OpenSession,
    Plan,
    RenderedMessage,
)
from deployments.sessions.samples import samples_of
from deployments.sessions.session_record import SessionRecord
from deployments.storage.storage import EntryName
from rollout_client.contract.sessions import SessionRequest

CHARACTERS_PER_TOKEN = 4
PLAIN = ChatContext()
random_numbers = random.Random(0)
Result = TypeVar("Result")


def main(
    calls: Annotated[int, typer.Option(min=1)] = 30,
    tokens: Annotated[int, typer.Option(min=2, help="Of each call, prompt and response together.")] = 8192,
) -> None:
    record, messages, took_ms = SessionRecord(), list[dict[str, Any]](), dict[str, float]()
    entries = {OPENED: written(OpenSession("s", "", "", "http://service", SessionRequest()))}

    def timed(name: str, work: Callable[[], Result]) -> Result:
        began = time.thread_time()
        result = work()
        took_ms[name] = round((time.thread_time() - began) * 1000, 1)
        return result

    for number in range(calls):
        messages.append({"role": "user", "content": text_of(tokens // 2)})
        plan = timed("plan", lambda: record.plan(messages, PLAIN))
        call = call_of(number, plan, messages[-1], tokens // 2)
        entries[EntryName("call", number)] = timed("entry", lambda call=call: call_entry(call))  # type: ignore[misc]
        timed("add", lambda call=call: record.add(call))  # type: ignore[misc]
        messages.append(dict(call.generated[0].message))
    timed("samples", lambda: samples_of("s", record))
    # After a start of the store, once, in a thread.
    timed("read_again", lambda: session_of(entries))
    typer.echo(
        json.dumps({"calls": calls, "tokens": record.total_tokens} | {f"{n}_ms": ms for n, ms in took_ms.items()})
    )


def call_of(number: int, plan: Plan, message: dict[str, Any], tokens: int) -> EngineCall:
    reply, ids = {"role": "assistant", "content": text_of(tokens)}, ids_of(tokens)
    spans = (WeightSpan("1", 0, tokens),)
    generated = GeneratedMessage(
        f"g{number}", reply, reply["content"], ids, packed_logprobs([-0.5] * tokens), "stop", spans
    )
    rendered = [RenderedMessage(message, ids_of(tokens))]
    return EngineCall(f"c{number}", PLAIN, plan, rendered, packed_ids([1, 2]), [generated])


def ids_of(count: int) -> Any:
    return packed_ids(random_numbers.choices(range(32_000), k=count))


def text_of(tokens: int) -> str:
    return "".join(random_numbers.choices("abcdefghijklmnopqrstuvwxyz   \n", k=tokens * CHARACTERS_PER_TOKEN))


if __name__ == "__main__":
    typer.run(main)
