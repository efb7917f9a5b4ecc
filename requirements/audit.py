"""Looks for known vulnerabilities of the locked packages: `.github/workflows/audit.yml` runs it each week.

Where the database is not within reach it says so, and nothing is wrong. Otherwise each vulnerability is a line, and the
exit code is 1, unless `ACCEPTED` says why it does not matter here.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LOCKS = [Path(__file__).with_name(name) for name in ("cpu.lock", "gpu.lock")]
PROBE = "pip==24.0"
"""A release with known vulnerabilities: a database that knows of none is none."""
ACCEPTED: Mapping[str, str] = {}
"""By id of a vulnerability, why the service is not affected."""


def main(pip_audit: str) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as probe:
        probe.write(PROBE)
        probe.flush()
        if not list(vulnerabilities(pip_audit, Path(probe.name))):
            sys.stdout.write("  the database of vulnerabilities is not within reach: nothing was audited\n")
            return 0
    every = (each for lock in LOCKS for each in vulnerabilities(pip_audit, lock))
    # Most packages are in both locks.
    found = dict.fromkeys(line for id_, line in every if id_ not in ACCEPTED)
    sys.stdout.writelines(f"  {line}\n" for line in found)
    return 1 if found else 0


def vulnerabilities(pip_audit: str, requirements: Path) -> Iterator[tuple[str, str]]:
    """The id and a line for each; none if the database does not answer."""
    command = [pip_audit, "--requirement", str(requirements), "--no-deps", "--disable-pip", "--format", "json"]
    answer = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(answer.stdout)["dependencies"]
    except json.JSONDecodeError:
        return
    for package in packages:
        for each in package.get("vulns", ()):
            fixed = ", ".join(each["fix_versions"]) or "no release yet"
            yield each["id"], f"{package['name']} {package['version']}: {each['id']}, mended in {fixed}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
