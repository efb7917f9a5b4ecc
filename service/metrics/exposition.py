"""Prometheus' text format: several expositions as one, with some of their metrics. No I/O.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. All lines of one metric must
stand together.
"""

from collections.abc import Iterable, Iterator, Sequence

PARTS_OF_HISTOGRAM = ("_bucket", "_sum", "_count")


def merged(expositions: Iterable[str], prefixes: Sequence[str]) -> str:
    """The metrics whose names begin with one of `prefixes`, those of one name together, in the order of names."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for exposition in expositions:
        for name, line in lines_by_metric(exposition, tuple(prefixes)):
            if line.startswith("#"):
                known = heads.setdefault(name, [])
                if line.split(maxsplit=3)[:3] not in [each.split(maxsplit=3)[:3] for each in known]:
                    known.append(line)
            else:
                samples.setdefault(name, []).append(line)
    lines = [line for name in sorted(samples) for line in (*heads.get(name, ()), *samples[name])]
    return "".join(f"{line}\n" for line in lines)


def lines_by_metric(exposition: str, prefixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The lines of metrics with these prefixes, each with the name of its metric.

    That is the name in the heading before, if the line is a part of its histogram.
    """
    heading, parts = "", frozenset[str]()
    for line in exposition.split("\n"):
        if line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) > 2 and words[1] in ("HELP", "TYPE"):
                heading = words[2]
                parts = frozenset(heading + part for part in PARTS_OF_HISTOGRAM)
                if heading.startswith(prefixes):
                    yield heading, line
        elif line.startswith(prefixes):
            name = line.split("{", 1)[0].split(" ", 1)[0]
            yield heading if name in parts else name, line
