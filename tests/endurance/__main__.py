"""All programs that try a running service for minutes or hours, by name: `python -m tests.endurance`."""

import sys

from benchmarks.programs import Program, run_program

PROGRAMS = {
    "chaos": Program("tests.endurance.chaos", "kills parts of a service during 256 games, again and again"),
    "fuzz": Program("tests.endurance.fuzz", "malformed, hostile and slow requests to every route"),
    "soak": Program(
        "tests.endurance.soak.mixed", "every kind of request, kills and pushes: nothing grows (15 minutes)"
    ),
}

if __name__ == "__main__":
    sys.exit(run_program("tests.endurance", PROGRAMS, sys.argv[1:]))
