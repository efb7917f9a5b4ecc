"""The process that parses the bodies of large requests. Parent's half: `service/rollout_requests/body_parser.py`.

For each body the parent writes a header (`HEADER`), a pickled (media type, `BodyBounds`) and the body to the standard
input; `ScoreBounds` in their place say that it is a body of `POST /score`. The answer on the standard output is a
sequence of frames, each a length (`LENGTH`) and a pickle, then an empty frame: either the slices of `split_fields` or
`split_score_request`, or one frame with a `RequestProblem`. The process ends with its parent, when its standard input
ends.
"""

import gc
import pickle
import signal
import struct
import sys
from collections.abc import Iterator
from typing import IO

from service.problems import RequestProblem
from service.rollout_requests.parsing import BodyBounds, checked_fields, split_fields
from service.scoring.parsing import ScoreBounds, parsed_score_request, split_score_request

HEADER = struct.Struct("<QQ")
"""Length of the pickled parameters, and of the body."""
LENGTH = struct.Struct("<Q")
SLICE_BYTES = 2**18
"""Size of the slices that the parent reads in one step: about 2 ms of its interpreter's time."""


def main() -> None:
    # Ctrl-C in a terminal is for the parent, whose end ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # Prints of libraries must not get between the frames.
    sys.stdout = sys.stderr
    # Millions of new objects would trigger it again and again, to find nothing.
    gc.disable()
    # Imported modules stay. Collecting them after each body takes 20 ms; parsing 100 KB takes half a millisecond.
    gc.collect()
    gc.freeze()
    serve(source, sink)


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    while header := source.read(HEADER.size):
        parameters, length = HEADER.unpack(header)
        media_type, bounds = pickle.loads(source.read(parameters))
        for frame in answer(source.read(length), media_type, bounds):
            sink.write(LENGTH.pack(len(frame)) + frame)
        sink.write(LENGTH.pack(0))
        sink.flush()
        gc.collect()


def answer(body: bytes, media_type: str, bounds: BodyBounds | ScoreBounds) -> Iterator[bytes]:
    try:
        if isinstance(bounds, ScoreBounds):
            frames = split_score_request(parsed_score_request(body, bounds))
        else:
            frames = split_fields(checked_fields(body, media_type, bounds), SLICE_BYTES)
    except RequestProblem as error:
        yield pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        return
    yield from frames


if __name__ == "__main__":
    main()
