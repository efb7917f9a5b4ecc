"""What a check of a GPU writes: findings as they are made, and a report of them."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.gpu_check.__main__ import app, run_batch
from benchmarks.gpu_check.findings import Findings, GpuFinding, read_findings
from benchmarks.gpu_check.report import markdown, write_report
from tests.paths import REPOSITORY


def test_what_is_raised_in_an_attempt_is_a_finding_and_the_part_goes_on(tmp_path: Path) -> None:
    findings = Findings("engine", tmp_path / "engine.jsonl")
    with findings.attempt("seeds"):
        int("no card")
    findings.add("scores", True, largest=0.0)
    first, second = read_findings(tmp_path / "engine.jsonl")
    assert (first.subject, first.held, first.figures["error"]) == (
        "seeds",
        False,
        "ValueError: invalid literal for int() with base 10: 'no card'",
    )
    assert (second.subject, second.held, second.figures["largest"]) == ("scores", True, 0.0)


def test_a_part_that_wrote_nothing_has_no_findings(tmp_path: Path) -> None:
    assert read_findings(tmp_path / "fp8.jsonl") == []


def test_the_report_counts_what_held_and_shows_each_part_with_its_end(tmp_path: Path) -> None:
    found = [
        GpuFinding("engine", "seeds", True, {"distinct": 8}),
        GpuFinding("engine", "scores", False, {"error": "a | b\nc"}),
        GpuFinding("fp8", "start", None, {}),
    ]
    ends = {"engine": "complete", "fp8": "was stopped after 9 s"}
    assert markdown(ends, found).splitlines() == [
        "# Check of a GPU",
        "",
        "1 held, 1 did not.",
        "",
        "## engine: complete",
        "",
        "| what | | figures |",
        "| --- | --- | --- |",
        "| seeds | held | distinct 8 |",
        "| scores | **did not hold** | error a \\| b c |",
        "",
        "## fp8: was stopped after 9 s",
        "",
        "| what | | figures |",
        "| --- | --- | --- |",
        "| start |  |  |",
    ]
    write_report(tmp_path, ends, found)
    assert json.loads((tmp_path / "report.json").read_text())["parts"] == ends


@pytest.mark.slow
def test_the_part_machine_runs_in_a_process_of_its_own_and_is_reported(tmp_path: Path) -> None:
    # The check ends all that its process has started, which here would be what other tests use.
    program = [sys.executable, "-m", "benchmarks.gpu_check", "machine", "--device", "cpu", "--output", str(tmp_path)]
    assert subprocess.run(program, cwd=REPOSITORY, stderr=subprocess.DEVNULL, check=False).returncode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parts"] == {"machine": "complete"}
    assert "versions" in {finding["subject"] for finding in report["findings"]}


@pytest.mark.slow
def test_a_part_beyond_its_limit_is_stopped_with_all_that_it_has_started(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert run_batch(["service"], "cpu", tmp_path, limit_s=6) == {"service": "was stopped after 6 s"}
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1000)
def test_the_engine_does_all_of_its_part_on_vllms_gpu_runner(tmp_path: Path) -> None:
    """Under Triton's interpreter: seeds, streams, scores, swaps in each mode, adapters, samplers, interruptions."""
    assert run_batch(["engine"], "rig", tmp_path, limit_s=900) == {"engine": "complete"}
    found = {finding.subject: finding for finding in read_findings(tmp_path / "engine.jsonl")}
    runner = found["runner and settings"].figures
    assert (runner["runner"], runner["async_scheduling"], runner["executor"]) == (
        "vllm.v1.worker.cpu.model_runner",
        True,
        "uni",
    )
    assert [subject for subject, finding in found.items() if finding.held is False] == []
    assert len(found) == 10


def test_an_unknown_part_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["engines", "--output", str(tmp_path)], env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert "There is no part engines; there are machine, engine, service," in ended.output
