"""Runs tests of the model's code, each in a process of its own, and prints a line of JSON for each as it ends.

A line is the token from stdin, the number of the test, and what it gave: `{"value": ...}` or `{"error": ...}`. What the
tests expect is not here: the service compares.
"""

import contextlib
import json
import os
import sys

LONGEST_ERROR = 400


def main() -> None:
    # Before any code of the model runs, so that it cannot print results of its own making.
    token = sys.stdin.readline().strip()
    with open("tests.json", encoding="utf-8") as file:
        spec = json.load(file)
    for number, test in enumerate(spec["tests"]):
        print(token, number, result_of(spec["code"], test), flush=True)


def result_of(code: str, test: dict[str, str]) -> str:
    """The result of one test as JSON. The test may do what it likes to its own process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        silence()
        with open(writing, "w", encoding="utf-8") as result:
            result.write(outcome_of(code, test))
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as result:
        text = result.readline()
    os.waitpid(child, 0)
    return text.strip() or json.dumps({"error": "its process ended before it did"})


def silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)


def outcome_of(code: str, test: dict[str, str]) -> str:
    names = {"__name__": "solution"}
    try:
        exec(compile(code, "solution.py", "exec"), names)
        if "call" in test:
            return json.dumps({"value": eval(test["call"], names)})
        exec(compile(test["code"], "test.py", "exec"), names)
    except BaseException as error:
        text = ""
        # The model's own exceptions may fail to describe themselves.
        with contextlib.suppress(BaseException):
            text = str(error)[:LONGEST_ERROR]
        return json.dumps({"error": f"{type(error).__name__}: {text}".rstrip(": ")})
    return json.dumps({"value": None})


main()
