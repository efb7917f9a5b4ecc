"""Runs `certify` in a process of its own."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import Any

from rollout_env.certificate import Certificate
from rollout_env.certify import certify
from rollout_env.play import run
from rollout_env.worth import NotCertified


async def certified_apart(*work: Any) -> Certificate:
    """`certify` in a process of its own, which the environment can block or end. Cancelling the call ends that.

    Raises:
        NotCertified: the process has ended without a certificate, or the work cannot be sent to it.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_certified_to, args=(theirs, work))
    try:
        process.start()
        theirs.close()
        await asyncio.to_thread(ours.poll, None)
        document = ours.recv()
    except (EOFError, TypeError, AttributeError, PicklingError) as error:
        raise NotCertified(f"The environment was not certified in a process of its own: {error!r}.") from error
    finally:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if isinstance(document, str):
        raise NotCertified(document)
    return Certificate.of(document)


def _certified_to(pipe: Connection, work: Sequence[Any]) -> None:
    os.setpgid(0, 0)
    try:
        pipe.send(run(certify(*work)).document())
    except NotCertified as error:
        pipe.send(str(error))
