"""Several dumps of one process under names of one series are moments in the order of the names.

`round2/` and `sample_2` say so themselves; `t1/`, `snap2/` and time stamps are told by this.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from shakedown.core.ranges import natural
from shakedown.diagnosis.read.names import template
from shakedown.diagnosis.records import Record, Stack

_Series = tuple[str, int, str, str]  # host, process, tool, name without its numbers


def order_moments(records: Sequence[Record]) -> list[Record]:
    """The records with a sample number on every stack of a series of two files or more.

    Only a process id proves that two files speak of one process; names that differ in more than
    numbers may be two views of one moment (with and without native frames).
    """
    series: dict[_Series, set[str]] = defaultdict(set)
    for record in records:
        if (key := _series(record)) is not None:
            series[key].add(record.place.path)
    numbers = {
        key: {path: n for n, path in enumerate(sorted(paths, key=natural), start=1)}
        for key, paths in series.items()
        if len(paths) > 1
    }
    return [
        replace(record, sample=numbers[key][record.place.path])
        if isinstance(record, Stack) and (key := _series(record)) in numbers and key
        else record
        for record in records
    ]


def _series(record: Record) -> _Series | None:
    if not isinstance(record, Stack) or record.sample or record.who.pid is None:
        return None
    return record.who.host, record.who.pid, record.tool, template(record.place.path)
