"""Writes the reward of the verifier to stdout."""

import json
import subprocess
import sys

CASES = {(1,): 1, (3, 1, 2): 2, (4, 1, 3, 2): 2.5, (5, 1): 3}
PROGRAM = "import sys; from statistics_of import median; sys.exit(median({numbers}) != {expected})"


def passes(numbers: tuple[float, ...], expected: float) -> bool:
    program = PROGRAM.format(numbers=list(numbers), expected=expected)
    return subprocess.run([sys.executable, "-c", program], check=False, cwd="/app", capture_output=True).returncode == 0


passed = [passes(numbers, expected) for numbers, expected in CASES.items()]
json.dump({"reward": float(all(passed)), "passed": sum(passed)}, sys.stdout)
