"""Mixed into vLLM's workers (`worker_extension_cls`): weights that wait beside the model until they are swapped in.

Workers run these between two steps of the engine, so each does little: files are read ahead in a thread, and a digest
of the weights is made a slice at a time.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import torch
from safetensors import safe_open

logger = logging.getLogger(__name__)
READ_AHEAD_BYTES = 16 * 2**20
PAGE_BYTES = 4096
DIGEST_SLICE_BYTES = 4 * 2**20
PROBE_ROWS = 128


class WeightsWorkerExtension:
    """What `collective_rpc` can ask of a worker, beside vLLM's own."""

    model_runner: Any
    reload_weights: Any
    execute_model: Any
    _staging: "Staging | None" = None
    _digest: "Digest | None" = None

    def begin_staging(self, path: str) -> None:
        """Starts to read the safetensors file at `path`; what was staged before is dropped."""
        self._staging = Staging(path)

    def staged(self) -> tuple[bool, str | None]:
        """Whether all is read, and what went wrong: vLLM keeps the answers of its workers apart only if none raises."""
        return (False, "nothing is staged") if self._staging is None else self._staging.state()

    def swap_staged(self) -> tuple[float, str | None]:
        """Puts the staged weights in place of the model's; returns the seconds that took, and what went wrong.

        If anything did, this worker generates no token any more: its weights are those of no version.
        """
        began = time.perf_counter()
        try:
            self._swap()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the engine is told
            error = sentence_of(failure)
            for generates in (self, self.model_runner):
                generates.execute_model = partial(end_rather_than_generate, error)
            return 0.0, error
        return time.perf_counter() - began, None

    def _swap(self) -> None:
        if self._staging is None:
            raise RuntimeError("no weights are staged")
        self.reload_weights(weights_iterator=iter(self._staging.tensors().items()))
        self._staging = self._digest = None

    def digest_weights(self, budget_s: float) -> str | None:
        """Sha-256 over the weights as they lie in this worker; `None` while more calls of `budget_s` are needed."""
        if self._digest is None:
            self._digest = Digest(self.model_runner.get_model())
        return self._digest.go_on(budget_s)

    def forget_digest(self) -> None:
        """The weights have changed by another way than `swap_staged`."""
        self._digest = None


def end_rather_than_generate(error: str, *_: object, **__: object) -> NoReturn:
    """The engine ends with this worker, and the replica with the engine."""
    logger.error("The weights were left half swapped (%s): this worker ends.", error)
    os._exit(1)


def sentence_of(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


class Staging:
    """Maps a file into memory and reads it once: its pages are shared by the workers of one node, and none is missing
    when the swap comes to it."""

    def __init__(self, path: str) -> None:
        thread = ThreadPoolExecutor(1)
        self._reading = thread.submit(mapped, path)
        thread.shutdown(wait=False)

    def state(self) -> tuple[bool, str | None]:
        """Whether it has come to its end, and what broke it."""
        if not self._reading.done():
            return False, None
        failure = self._reading.exception()
        return (True, None) if failure is None else (False, sentence_of(failure))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Raises what broke the reading, `TimeoutError` if it has not ended."""
        return self._reading.result(timeout=0)


def mapped(path: str) -> dict[str, torch.Tensor]:
    piece = bytearray(READ_AHEAD_BYTES)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a thread of a worker: nothing but the read
        while file.readinto(piece):
            pass
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for tensor in tensors.values():
        # By numpy: torch would start threads of its own for this one.
        tensor.reshape(-1).view(torch.uint8).numpy()[::PAGE_BYTES].max(initial=0)
    return tensors


class Digest:
    """A sha-256 over all weights in order of name, each as `name dtype shape sha256-of-its-bytes`, step by step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._whole = hashlib.sha256()
        self._steps = self._digest_all(model)
        self._result: str | None = None

    def go_on(self, budget_s: float) -> str | None:
        until = time.perf_counter() + budget_s
        while self._result is None and time.perf_counter() < until:
            if next(self._steps, self) is self:
                self._result = self._whole.hexdigest()
        return self._result

    def _digest_all(self, model: torch.nn.Module) -> Iterator[None]:
        for name, parameter in sorted(model.named_parameters()):
            module = model.get_submodule(name.rpartition(".")[0])
            weight = hashlib.sha256()
            for piece in weight_pieces(module, parameter):
                weight.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)
                yield
            line = f"{name} {parameter.dtype} {json.dumps(list(parameter.shape))} {weight.hexdigest()}\n"
            self._whole.update(line.encode())


def weight_pieces(module: Any, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of one weight, piece by piece.

    On processors vLLM packs a linear layer's weight for its kernel and empties the parameter: then the kernel itself is
    asked, with rows of the identity, which gives back each value exactly.
    """
    if parameter.numel():
        flat = parameter.detach().reshape(-1)
        values = max(DIGEST_SLICE_BYTES // flat.element_size(), 1)
        yield from (flat[first : first + values] for first in range(0, flat.numel(), values))
    elif (kernel := getattr(module, "cpu_linear", None)) is not None:
        width = module.input_size_per_partition
        for first in range(0, width, PROBE_ROWS):
            rows = torch.eye(min(PROBE_ROWS, width - first), width - first, dtype=parameter.dtype)
            yield kernel(torch.nn.functional.pad(rows, (first, 0)), parameter, None)
