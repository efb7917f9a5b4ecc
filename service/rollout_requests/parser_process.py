"""The process that parses the bodies of large requests. Parent's half: `service/rollout_requests/body_parser.py`.

Its argument is the file descriptor of a connection (`multiprocessing.connection`). For each body the parent sends a
pickled (media type, `BodyBounds`), and the body; `ScoreBounds` say that it is a body of `POST /score`. The answer is a
sequence of pickles, then an empty message: either the parts of `split_fields` or `split_score_request`, or a
`RequestProblem` alone. The process ends with its parent, when the connection ends.
"""

import gc
import pickle
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from service.problems import RequestProblem
from service.rollout_requests.parsing import BodyBounds, checked_fields
from service.scoring.parsing import ScoreBounds, parsed_score_request, split_score_request


def main() -> None:
    # Ctrl-C in a terminal is for the parent, whose end ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Millions of new objects would trigger it again and again, to find nothing.
    gc.disable()
    # Imported modules stay. Collecting them after each body takes 20 ms; parsing 100 KB takes half a millisecond.
    gc.collect()
    gc.freeze()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        while True:
            media_type, bounds = pickle.loads(connection.recv_bytes())
            for part in _parts(connection.recv_bytes(), media_type, bounds):
                connection.send_bytes(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
            connection.send_bytes(b"")
            gc.collect()
    except (EOFError, ConnectionError):
        return


def _parts(body: bytes, media_type: str, bounds: BodyBounds | ScoreBounds) -> Iterator[Any]:
    try:
        if isinstance(bounds, ScoreBounds):
            parts = split_score_request(parsed_score_request(body, bounds))
        else:
            parts = split_fields(checked_fields(body, media_type, bounds))
    except RequestProblem as problem:
        yield problem
        return
    yield from parts


def split_fields(fields: dict[str, Any]) -> Iterator[Any]:
    """`fields` in parts, each of which is pickled alone: those other than the samples, then each sample."""
    yield {name: value for name, value in fields.items() if name != "samples"}
    yield from fields.get("samples", ())


if __name__ == "__main__":
    main()
