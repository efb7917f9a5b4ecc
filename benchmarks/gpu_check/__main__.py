"""Checks the service on a machine with a GPU: `make gpu-check`.

Each part runs in a process of its own, with a limit, and writes what it finds as it finds it: a part that dies leaves
what it knew, and the others go on. `report.md` and `report.json` are written after each part. On a machine with many
cores the parts that measure no speed run at once. With `--device cpu` the same parts run on small models without a
card, and with `--device rig` so that vLLM runs as on a GPU, under Triton's interpreter.
"""

import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.gpu_check.configs import Machine
from benchmarks.gpu_check.findings import Findings, GpuFinding, console, read_findings
from benchmarks.gpu_check.report import write_report
from benchmarks.process_group import no_process_left
from service.startup.config import REPOSITORY

TOGETHER = ("machine", "engine", "service", "weights", "columns", "fp8", "replicas", "offloading")
ALONE = ("throughput",)
PARTS = (*TOGETHER, *ALONE)
CORES_FOR_ALL = 12
RIG = Path(__file__).parent / "rig"
ON_THE_RIG = {
    "GPU_RUNNER_RIG": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(RIG), os.environ.get("PYTHONPATH")])),
}
app = typer.Typer(add_completion=False)


@app.command()
def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}; by default all.")] = None,
    device: Annotated[
        str, typer.Option(help="gpu; cpu for a dry run; rig for one with vLLM's GPU runner on processors.")
    ] = "gpu",
    output: Annotated[Path, typer.Option(help="The folder of the report.")] = Path("gpu-check"),
    limit_s: Annotated[float, typer.Option(help="Seconds of the longest part.")] = 900.0,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if part is not None:
        run_part(part, "gpu" if device == "gpu" else "cpu", output)
        return
    chosen = parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"There is no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    for old in output.glob("*.jsonl"):
        old.unlink()
    ends: dict[str, str] = {}
    together = [name for name in chosen if name in TOGETHER]
    many = (os.cpu_count() or 1) >= CORES_FOR_ALL
    batches = [together] if many else [[name] for name in together]
    with no_process_left():
        for batch in [*batches, *([name] for name in chosen if name in ALONE)]:
            ends |= run_batch(batch, device, output, limit_s)
            write_report(output, ends, all_findings(chosen, output))
    failed = [finding for finding in all_findings(chosen, output) if finding.held is False]
    broken = [name for name, end in ends.items() if end != "complete"]
    console.print(f"{output / 'report.md'}: {len(failed)} did not hold; not complete: {', '.join(broken) or 'none'}")
    raise typer.Exit(1 if failed or broken else 0)


def run_part(name: str, device: Literal["gpu", "cpu"], output: Path) -> None:
    # vLLM would fork its engine from this process: after a computation of torch's with several threads, the fork hangs.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    findings = Findings(name, output / f"{name}.jsonl")
    with (
        no_process_left(),
        tempfile.TemporaryDirectory(prefix=f"gpu-check-{name}-") as folder,
        findings.attempt(f"the part {name}"),
    ):
        import_module(f"benchmarks.gpu_check.{name}_part").check(Machine(device, Path(folder)), findings)


def run_batch(batch: list[str], device: str, output: Path, limit_s: float) -> dict[str, str]:
    """Returns how each part ended."""
    until = time.monotonic() + limit_s
    environment = os.environ | (ON_THE_RIG if device == "rig" else {})
    running = {}
    for name in batch:
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name]
        command += ["--device", device, "--output", str(output)]
        with (output / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
    ends = {}
    for name, process in running.items():
        try:
            status = process.wait(max(until - time.monotonic(), 1))
            ends[name] = "complete" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            ends[name] = f"was stopped after {limit_s:g} s"
        shown = [
            line for line in (output / f"{name}.log").read_text(errors="replace").splitlines() if f"{name}: " in line
        ]
        for line in shown:
            console.print(line, markup=False, soft_wrap=True)
        console.print(f"{name}: {ends[name]}")
    return ends


def all_findings(parts: list[str], output: Path) -> list[GpuFinding]:
    return [finding for name in parts for finding in read_findings(output / f"{name}.jsonl")]


if __name__ == "__main__":
    app()
