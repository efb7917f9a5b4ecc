"""Runs tests of the model's code, each in a process of its own, and prints a line of JSON for each as it ends.

A line is the token from stdin, the number of the test, and what it gave: `{"value": ...}` or `{"error": ...}`. What the
tests expect is not here: the service compares.

It is started for each reply, so it imports little: the module json would take a third of the time of a small program.
"""

import os
import sys
from _json import encode_basestring_ascii

LONGEST_ERROR = 400
SIGXCPU = 24


def main() -> None:
    # Before any code of the model runs, so that it cannot print results of its own making.
    token = sys.stdin.readline().strip()
    with open("tests.literal", encoding="utf-8") as file:
        spec = eval(file.read())
    for number, test in enumerate(spec["tests"]):
        print(token, number, _result_of(spec["code"], test), flush=True)


def _result_of(code: str, test: dict[str, str]) -> str:
    """The result of one test as JSON. The test may do what it likes to its own process.

    One that is ended for its processor time ends the run as if it were the run: its time is that of all tests together.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _silence()
        with open(writing, "w", encoding="utf-8") as result:
            result.write(_outcome_of(code, test))
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as result:
        text = result.readline()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGXCPU:
        os._exit(128 + SIGXCPU)
    return text.strip() or _as_json({"error": "its process ended before it did"})


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)


def _outcome_of(code: str, test: dict[str, str]) -> str:
    names = {"__name__": "solution"}
    try:
        exec(compile(code, "solution.py", "exec"), names)
        if "call" in test:
            return _as_json({"value": eval(test["call"], names)})
        exec(compile(test["code"], "test.py", "exec"), names)
    except BaseException as error:
        try:
            text = str(error)[:LONGEST_ERROR]
        except BaseException:
            text = "(it cannot be shown)"
        return _as_json({"error": f"{type(error).__name__}: {text}".rstrip(": ")})
    return _as_json({"value": None})


def _as_json(value: object) -> str:
    """JSON in one line. Raises TypeError for what JSON does not have; of a class of the model's no method is called."""
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]  # type: ignore[index]
    if kind is int:
        return repr(value)
    if kind is float:
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(value), repr(value))
    if kind is str:
        return encode_basestring_ascii(value)  # type: ignore[arg-type]
    if kind is list or kind is tuple:
        return f"[{', '.join(map(_as_json, value))}]"  # type: ignore[call-overload]
    if kind is dict:
        items = [f"{_as_json(key if type(key) is str else str(key))}: {_as_json(item)}" for key, item in value.items()]  # type: ignore[attr-defined]
        return f"{{{', '.join(items)}}}"
    raise TypeError(f"a value of type {kind.__name__} is not JSON")


main()
