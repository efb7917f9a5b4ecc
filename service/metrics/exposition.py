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
        for name, line in lines_by_metric(exposition):
            if not name.startswith(tuple(prefixes)):
                continue
            if line.startswith("#"):
                known = heads.setdefault(name, [])
                if line.split(maxsplit=3)[:3] not in [each.split(maxsplit=3)[:3] for each in known]:
                    known.append(line)
            else:
                samples.setdefault(name, []).append(line)
    lines = [line for name in sorted(samples) for line in (*heads.get(name, ()), *samples[name])]
    return "".join(f"{line}\n" for line in lines)


def lines_by_metric(exposition: str) -> Iterator[tuple[str, str]]:
    """Each line with the name of its metric: that of the heading before, if the line is a part of its histogram."""
    heading = ""
    for line in exposition.splitlines():
        if line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) > 2 and words[1] in ("HELP", "TYPE"):
                heading = words[2]
                yield heading, line
        elif line.strip():
            name = line.split("{", 1)[0].split(" ", 1)[0]
            is_part = name in (heading, *(heading + part for part in PARTS_OF_HISTOGRAM))
            yield heading if is_part else name, line
