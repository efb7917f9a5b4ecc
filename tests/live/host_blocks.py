"""vLLM's offloading of the KV cache to host memory on processors: its own scheduler's half, and copies by torch.

vLLM's worker for it needs a GPU. This one reads and writes a block at the end of a transfer, the latest that streams of
a GPU may, and a transfer takes `SECONDS`: whatever relies on one that has ended has time to be wrong.
"""

import os
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

SECONDS = "SECONDS_OF_A_TRANSFER"
"""The environment variable with them."""


def on_processors(gigabytes: float) -> dict[str, Any]:
    """`kv_transfer_config` in place of `kv_offloading_size`."""
    extra = {"spec_name": "HostBlocks", "spec_module_path": __name__, "cpu_bytes_to_use": int(gigabytes * 2**30)}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class HostBlocks(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _Copies(kv_caches, self.num_chunks)


class _Copies(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._engine = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._host = [torch.zeros(chunks, each.page_size_bytes, dtype=torch.int8) for each in kv_caches.tensors]
        self._under_way: dict[int, tuple[float, bool, Any, Any]] = {}
        self._ended: list[TransferResult] = []
        self._seconds = float(os.environ.get(SECONDS, 0))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, False, src_spec, dst_spec)

    def _submit(self, job_id: int, is_store: bool, source: Any, target: Any) -> bool:
        read, written = (torch.from_numpy(spec.block_ids).long() for spec in (source, target))
        self._under_way[job_id] = (time.monotonic() + self._seconds, is_store, read, written)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._end({job for job, (ends_at, *_) in self._under_way.items() if ends_at <= time.monotonic()})
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Until then vLLM does not write what is read."""
        self._end(job_ids & self._under_way.keys())

    def _end(self, job_ids: set[int]) -> None:
        for job in sorted(job_ids):
            _, is_store, source, target = self._under_way.pop(job)
            for engine, host in zip(self._engine, self._host, strict=True):
                read, written = (engine, host) if is_store else (host, engine)
                written[target] = read[source]
            size = len(source) * sum(host.shape[1] for host in self._host)
            self._ended.append(TransferResult(job, True, size, self._seconds))
