"""The report of a check: JSON for programs, Markdown for readers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_check.findings import GpuFinding

MARKS = {True: "held", False: "**did not hold**", None: ""}


def write_report(folder: Path, parts: Mapping[str, str], findings: list[GpuFinding]) -> None:
    """`parts` has how each part ended."""
    report = {"parts": dict(parts), "findings": [asdict(finding) for finding in findings]}
    (folder / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    (folder / "report.md").write_text(markdown(parts, findings))


def markdown(parts: Mapping[str, str], findings: list[GpuFinding]) -> str:
    failed = [finding for finding in findings if finding.held is False]
    held = sum(finding.held is True for finding in findings)
    lines = ["# Check of a GPU", "", f"{held} held, {len(failed)} did not."]
    for part, end in parts.items():
        lines += ["", f"## {part}: {end}", "", "| what | | figures |", "| --- | --- | --- |"]
        for finding in findings:
            if finding.part == part:
                figures = "; ".join(f"{name} {value}" for name, value in finding.figures.items())
                lines.append(f"| {finding.subject} | {MARKS[finding.held]} | {cell(figures)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
