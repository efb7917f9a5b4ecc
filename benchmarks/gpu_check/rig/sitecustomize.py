"""vLLM's GPU runner on processors: a folder for PYTHONPATH, whose module Python imports when it starts.

On a GPU vLLM takes Model Runner V2, schedules ahead of the worker's answers, and with one device runs the worker in the
process of EngineCore. Its build for processors takes V1, synchronous, with a worker in a process of its own. With
`GPU_RUNNER_RIG=1` it runs as on a GPU: Triton's kernels in Triton's interpreter, and slowly.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

IS_ON = os.environ.get("GPU_RUNNER_RIG") == "1"


def offer_a_backend(backends: Any) -> None:
    """Triton looks for one that is active, and has none for processors."""
    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def schedule_as_on_a_gpu(platform: Any) -> None:
    """Takes back what vLLM changes for processors: the scheduler, and where the worker runs."""
    check = platform.CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: Any, vllm_config: Any) -> None:
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        asked = scheduler.async_scheduling, parallel.distributed_executor_backend
        check(cls, vllm_config)
        scheduler.async_scheduling, parallel.distributed_executor_backend = asked[0] is not False, asked[1]

    platform.CpuPlatform.check_and_update_config = classmethod(check_and_keep)


def sample_without_triton(sampler: Any) -> None:
    """One kernel of the sampler is beyond the interpreter; torch's own form of it does the same."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    def apply(logits: Any, k: Any, p: Any) -> Any:
        return logits if k is None and p is None else apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    sampler.apply_top_k_top_p = apply


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "triton.backends": offer_a_backend,
    "vllm.platforms.cpu": schedule_as_on_a_gpu,
    "vllm.v1.worker.gpu.sample.sampler": sample_without_triton,
    "vllm.v1.worker.gpu.sample.states": sample_without_triton,
}


class ChangedModules(importlib.abc.MetaPathFinder):
    """Changes the modules of `CHANGES` once each has run."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            CHANGES[name](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


if IS_ON:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    sys.meta_path.insert(0, ChangedModules())
