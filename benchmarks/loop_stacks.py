"""What the event loop's thread executes: `python -m benchmarks.loop_gap --stacks` shows it for the longest gaps.

A thread looks every 2 ms. It sees nothing while the event loop's thread holds the interpreter's lock without a break:
then the processor time between two looks is long, and is counted for the later one.
"""

import gc
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

LOOK_EVERY_S = 0.002
FRAMES = 6


class LoopStacks:
    """Must be made in the event loop's thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._seen: defaultdict[str, float] = defaultdict(float)
        """Milliseconds of the event loop's processor time by stack."""
        self._looked_at = self._collected_from = time.thread_time()
        gc.callbacks.append(self._count_collection)
        threading.Thread(target=self._look, daemon=True).start()

    def take(self) -> dict[str, float]:
        """What was seen since the last call."""
        seen, self._seen = self._seen, defaultdict(float)
        self._looked_at = time.thread_time()
        return dict(seen)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            now = time.clock_gettime(self._clock)
            frame = sys._current_frames().get(self._thread)
            self._seen[" < ".join(islice(names(frame), FRAMES))] += 1000 * (now - self._looked_at)
            self._looked_at = now

    def _count_collection(self, phase: str, info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        now = time.thread_time()
        if phase == "start":
            self._collected_from = now
        else:
            self._seen[f"(in these: collections of generation {info['generation']})"] += 1000 * (
                now - self._collected_from
            )


def names(frame: FrameType | None) -> Iterator[str]:
    """The functions of a stack, the innermost first."""
    while frame is not None:
        code = frame.f_code
        yield f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_qualname}"
        frame = frame.f_back
