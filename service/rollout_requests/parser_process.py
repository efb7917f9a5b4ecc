"""The process that parses the bodies of large requests. Parent's half: `service/rollout_requests/body_parser.py`.

Its argument is the file descriptor of a connection (`multiprocessing.connection`). For each body the parent sends a
pickled `PartsOf`, and the body. The answer is a sequence of pickles, then an empty message: either the parts, or a
`RequestProblem` alone, which is raised before the first part. The process ends with its parent, when the connection
ends.
"""

import gc
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from service.problems import RequestProblem


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
            parts_of = pickle.loads(connection.recv_bytes())
            body = connection.recv_bytes()
            try:
                for part in parts_of(body):
                    connection.send_bytes(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
            except RequestProblem as problem:
                connection.send_bytes(pickle.dumps(problem))
            del body
            connection.send_bytes(b"")
            gc.collect()
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
