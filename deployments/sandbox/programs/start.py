"""Runs `main.py` as the interpreter would, with what the module `site` adds to the builtins: `exit`, `quit`, `help`.

The interpreter itself runs `site` only together with the search for installed packages, which takes three times as long
as its whole start without.
"""


def _start() -> None:
    import os
    import site
    import sys

    here = _start.__code__.co_filename

    def show_from_the_program_on(kind, error, trace):  # type: ignore[no-untyped-def]
        while trace is not None and trace.tb_frame.f_code.co_filename == here:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    site.setquit()
    site.setcopyright()
    site.sethelper()
    del sys.argv[0]
    sys.path[0] = os.getcwd()
    sys.excepthook = show_from_the_program_on
    path = os.path.join(sys.path[0], sys.argv[0])
    names = globals()
    del names["_start"]
    names.update(__file__=path, __doc__=None, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


_start()
