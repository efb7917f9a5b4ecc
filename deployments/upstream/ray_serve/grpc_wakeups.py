"""Takes in at once what gRPC has for an event loop.

gRPC's thread writes a byte into a socket pair for each event of a call, and its asyncio layer reads one byte in each
iteration of the event loop. When the loop is busy for a while, the bytes that nobody has read fill the socket pair
(about 280 of them do), and the thread waits: from then on each iteration brings one event, of which every call has
several. A loop with long iterations gets ten events in a second, and the replicas that it calls seem to hang.
"""

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

from grpc import aio
from grpc._cython import cygrpc

MOST_WAKEUPS = 2**16
"""More than a socket pair holds."""
_one_loop_at_a_time = threading.Lock()
"""Two that read at once could leave no byte for either, and the events to nobody."""
logger = logging.getLogger("rollout_service.rpc")


def read_all_wakeups() -> None:
    """For the running event loop and the calls that it makes and serves, for the rest of its life."""
    aio.init_grpc_aio()
    loop = asyncio.get_running_loop()
    found = list(_wakeups_of(loop))
    if not found:
        logger.warning("gRPC has no completion queue of the known form: its events may come late under load.")
    for wakeups, handle_events in found:
        loop.remove_reader(wakeups)
        loop.add_reader(wakeups, partial(_handle_all, wakeups, partial(handle_events, loop)))


def _wakeups_of(
    loop: asyncio.AbstractEventLoop,
) -> Iterator[tuple[socket.socket, Callable[[asyncio.AbstractEventLoop], None]]]:
    """Where the loop is woken, and what takes the events. gRPC has no public name for either."""
    for queue in gc.get_objects():
        if type(queue) is cygrpc.PollerCompletionQueue:
            for loops in gc.get_referents(queue):
                if isinstance(loops, dict) and isinstance(
                    read := getattr(loops.get(loop), "read_socket", None), socket.socket
                ):
                    yield read, queue._handle_events


def _handle_all(wakeups: socket.socket, handle_events: Callable[[], None]) -> None:
    """Leaves one byte to `handle_events`, which reads it and takes all events that there are.

    All event loops of a process share the bytes. One that finds none has got its events from the loop that read them.
    """
    with _one_loop_at_a_time:
        try:
            waiting = len(wakeups.recv(MOST_WAKEUPS, socket.MSG_PEEK))
        except BlockingIOError:
            return
        if waiting > 1:
            wakeups.recv(waiting - 1)
        handle_events()
