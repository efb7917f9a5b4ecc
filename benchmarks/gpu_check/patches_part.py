"""Deltas applied to the weights in the card's memory (`engine.patch_deltas`)."""

from benchmarks.gpu_check import weights_part
from benchmarks.gpu_check.configs import Machine
from benchmarks.gpu_check.findings import Findings


def check(machine: Machine, findings: Findings) -> None:
    if machine.device == "cpu":
        findings.add("patch_deltas", None, note="needs a card: vLLM's build for processors packs its weights")
        return
    weights_part.check(machine, findings, patches=True)
