"""Runs the model's blocks of code one after the other as an interpreter does, and shows the output of the last one."""

import ast
import contextlib
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    with open("cells.json", encoding="utf-8") as file:
        cells = json.load(file)
    names: dict[str, Any] = {"__name__": "__main__"}
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for cell in cells[:-1]:
            _run(cell, names)
    _run(cells[-1], names)


def _run(cell: str, names: dict[str, Any]) -> None:
    """Runs the code; if its last line is an expression, shows the value. Shows an exception without these frames."""
    try:
        tree = ast.parse(cell, "cell.py")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell.py", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        return
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames, file=sys.stdout)


main()
