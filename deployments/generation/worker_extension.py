"""The workers' half of `deployments/generation/weight_updater.py`: vLLM mixes it into its workers.

A worker runs these methods between two steps of the engine, so each returns quickly: threads read files and connect to
trainers, and a checksum is computed in steps.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from deployments.generation.trainer_transfer import TrainerRendezvous, TrainerWatch, TransferFile, Written
from deployments.policy.commands import DRAFT
from deployments.upstream.vllm.cpu_build import pack_shared_weights_again, packed_weight_slices
from deployments.upstream.vllm.weight_transfer import end_broken_reload, forget_weight_update, unplaced_matrices

_NO_ADAPTERS = "the engine takes no adapters: set enable_lora: true under engine in the service's config"
_Tensors = dict[str, torch.Tensor]
Result = TypeVar("Result")
_READ_BYTES = 16 * 2**20
_PAGE_BYTES = 4096
_CHECKSUM_SLICE_BYTES = 2**20
"""Hashed in 2 ms: with one device the worker runs in the process that schedules, and no token is made meanwhile."""
_EARLIER = "an earlier rendezvous, which was given up, has not ended: the trainer has to end, or to try again later"
_NO_BACKEND = "the engine has no weight transfer backend: set engine.weight_transfer_config in the service's config"


def _with_error(method: Callable[..., Result]) -> Callable[..., tuple[Result | None, str | None]]:
    """Lets the method return its result and no error, or no result and its error as a sentence.

    When a worker raises, vLLM drops the results of the others.
    """

    @wraps(method)
    def returning_errors(*arguments: Any) -> tuple[Result | None, str | None]:
        try:
            return method(*arguments), None
        except Exception as failure:  # noqa: BLE001 - returned to the engine
            return None, f"{type(failure).__name__}: {failure}"

    return returning_errors


class WeightsWorkerExtension:
    """The methods that `collective_rpc` can call besides vLLM's own."""

    model_runner: Any
    reload_weights: Any
    vllm_config: Any
    device: Any
    weight_transfer_engine: Any
    shutdown_weight_transfer_engine: Any
    update_weights: Any
    rank: int
    _staging: "Future[_Tensors] | None" = None
    _checksum: "_EngineChecksum | None" = None
    _rendezvous: TrainerRendezvous | None = None
    _arriving: TransferFile | None = None

    def begin_staging(self, path: str) -> None:
        """Starts to read the safetensors file at `path`; what was staged before is dropped."""
        thread = ThreadPoolExecutor(1)
        self._staging = thread.submit(_map_file, path)
        thread.shutdown(wait=False)

    @_with_error
    def staged(self) -> bool:
        """Whether the file has been read. Raises what its thread raises."""
        if self._staging is None:
            raise RuntimeError("nothing is staged")
        return self._staging.done() and self._staging.result() is not None

    @_with_error
    def swap_staged(self) -> float:
        """Replaces the model's weights by the staged ones; returns the seconds that this took.

        After an error the weights may be a mixture of two versions: the engine must not resume.
        """
        began = time.perf_counter()
        if self._staging is None:
            raise RuntimeError("no weights are staged")
        tensors = self._staging.result(timeout=0)
        drafting = self.vllm_config.speculative_config is not None
        drafts = {name: tensors.pop(name) for name in list(tensors) if drafting and name.startswith(DRAFT)}
        self.reload_weights(weights_iterator=iter(tensors.items()))
        pack_shared_weights_again(self.model_runner.get_model())
        if drafts:
            self._swap_drafting_model(drafts)
        self._staging = self._checksum = None
        return time.perf_counter() - began

    def _swap_drafting_model(self, tensors: _Tensors) -> None:
        if (model := self.model_runner.get_draft_model()) is None:
            return  # Only the last stage of a pipeline drafts.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights((name.removeprefix(DRAFT), tensor) for name, tensor in tensors.items())
            config = self.vllm_config.speculative_config.draft_model_config
            finalize_layerwise_reload(model, config)  # type: ignore[no-untyped-call]
        pack_shared_weights_again(model)

    @_with_error
    def unplaced_matrices(self, names: list[str]) -> list[str]:
        """Those of an adapter's tensors that change no module of this worker's part of the model.

        vLLM reads such tensors, and generates as if they were not there.
        """
        if not hasattr(self.model_runner, "lora_manager"):
            raise ValueError(_NO_ADAPTERS)
        return unplaced_matrices(names, self.model_runner.lora_manager)

    def checksum_weights(self, budget_s: float) -> str | None:
        """Computes for `budget_s` seconds; returns the sha-256 of this worker's weights when it is complete."""
        if self._checksum is None:
            self._checksum = _EngineChecksum(self.model_runner.get_model())
        return self._checksum.compute(budget_s)

    @_with_error
    def begin_rendezvous(self, init_info: dict[str, Any]) -> None:
        """Lets go of the trainer that is connected, and starts to connect to the one of `init_info`."""
        if self.weight_transfer_engine is None:
            raise ValueError(_NO_BACKEND)
        earlier = self._rendezvous
        if earlier is not None and earlier.has_begun and not earlier.has_ended:
            raise RuntimeError(_EARLIER)
        # One of its own for each rendezvous: what is given up must not change the one that is used.
        with set_current_vllm_config(self.vllm_config):
            engine = WeightTransferEngineFactory.create_engine(
                self.vllm_config.weight_transfer_config, self.vllm_config, self.device, self.model_runner.get_model()
            )
        typed_info = engine.parse_init_info(init_info)
        self.shutdown_weight_transfer_engine()
        self._rendezvous = TrainerRendezvous(engine, typed_info)

    def rendezvous_state(self) -> tuple[bool, str | None]:
        """Whether the rendezvous has ended, and the error, if any."""
        rendezvous = self._rendezvous
        return (False, "no rendezvous was begun") if rendezvous is None else (rendezvous.has_ended, rendezvous.error)

    def end_rendezvous(self, is_met: bool) -> str | None:
        """Takes the connection, or gives the rendezvous up.

        Returns:
            What the rendezvous was waiting for, if it is given up.
        """
        if self._rendezvous is None:
            return None
        if is_met:
            self.weight_transfer_engine, self._rendezvous = self._rendezvous.engine, None
            return None
        self._rendezvous.give_up()
        return self._rendezvous.waits_for

    def begin_saving(self, path: str, header: bytes | None) -> None:
        """Writes what the next transfer brings to a file; without a `header` nothing. Only one worker does it."""
        self._discard_arriving()
        if header is not None and self.rank == 0:
            self._arriving = TransferFile(Path(path), header, self.model_runner.model_config.dtype)

    def saved_weights(self) -> tuple[Written | None, str | None] | None:
        """The weights once all are written, and the error, if any; `None` from the workers that do not write."""
        return None if self._arriving is None else self._arriving.written()

    @_with_error
    def receive_transfer(self, update_info: Any, silence_s: float) -> None:
        """Receives what the trainer sends. Raises if nothing arrives for `silence_s` seconds."""
        engine = self.weight_transfer_engine
        with TrainerWatch(silence_s, engine.shutdown) as watch:
            try:
                with watch.noting_weights_of(engine.model, self._save):
                    self.update_weights(_with_packing_told(engine, update_info))
            finally:
                # A connection that was closed meanwhile may make vLLM fail, or go on without it.
                if watch.has_hung_up:
                    raise TimeoutError(f"the trainer sent nothing for {silence_s:g} s")

    def _discard_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.discard()
            self._arriving = None

    def _save(self, arrived: tuple[str, torch.Tensor]) -> None:
        if self._arriving is not None:
            self._arriving.add(*arrived)

    @_with_error
    def abandon_transfer(self) -> None:
        """Lets go of the trainer.

        The weights may be of two versions, and a part of them may be missing, until full weights were swapped in.
        """
        self._discard_arriving()
        forget_weight_update(self)
        self.shutdown_weight_transfer_engine()
        end_broken_reload(self.model_runner.get_model())

    def end_transfer(self) -> None:
        """Has to be called when the weights have been changed by a transfer."""
        pack_shared_weights_again(self.model_runner.get_model())
        self._checksum = None


_PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")


def _with_packing_told(engine: Any, update_info: Any) -> Any:
    """`update_info` without how its tensors are packed, which vLLM's engine is told.

    Until vLLM 0.26 each update said it, now the connection: trainers of before say nothing when they connect.
    """
    if isinstance(update_info, list):
        return [_with_packing_told(engine, each) for each in update_info]
    for name in _PACKING:
        if name in update_info and hasattr(engine, name):
            setattr(engine, name, update_info[name])
    return {name: value for name, value in update_info.items() if name not in _PACKING or not hasattr(engine, name)}


def _map_file(path: str) -> _Tensors:
    """The tensors of a safetensors file by name, backed by pages that are in memory, so that the swap finds them there.

    The workers of one node share the pages.
    """
    buffer = bytearray(_READ_BYTES)
    with Path(path).open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for tensor in tensors.values():
        # Touches each page. With numpy, because torch would start threads of its own in this thread.
        tensor.reshape(-1).view(torch.uint8).numpy()[::_PAGE_BYTES].max(initial=0)
    return tensors


class _EngineChecksum:
    """A sha-256 over all weights, sorted by name, each as `name dtype shape sha256-of-its-bytes`; computed in steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._whole = hashlib.sha256()
        self._steps = self._hash_all(model)

    def compute(self, budget_s: float) -> str | None:
        """Goes on for about `budget_s` seconds; returns the hexadecimal checksum when it is complete."""
        until = time.perf_counter() + budget_s
        for _ in self._steps:
            if time.perf_counter() >= until:
                return None
        return self._whole.hexdigest()

    def _hash_all(self, model: torch.nn.Module) -> Iterator[None]:
        for name, parameter in sorted(model.named_parameters()):
            module = model.get_submodule(name.rpartition(".")[0])
            weight = hashlib.sha256()
            for values in _weight_slices(module, parameter):
                weight.update(values.detach().cpu().contiguous().view(torch.uint8).numpy().data)
                yield
            line = f"{name} {parameter.dtype} {json.dumps(list(parameter.shape))} {weight.hexdigest()}\n"
            self._whole.update(line.encode())


def _weight_slices(module: Any, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of one weight, in slices."""
    if not parameter.numel():
        yield from packed_weight_slices(module, parameter)
        return
    flat = parameter.detach().reshape(-1)
    step = max(_CHECKSUM_SLICE_BYTES // flat.element_size(), 1)
    yield from (flat[first : first + step] for first in range(0, flat.numel(), step))
