"""Slurm's view: `scontrol show node`, `scontrol show job`, `sacct`, `sinfo`."""

import re

from shakedown.hang.parse.source import Source
from shakedown.hang.records import NodeState, Record, clean

_NODE = re.compile(r"(?:^|\s)NodeName=(\S{1,80})")
_STATE = re.compile(r"(?:^|\s)State=(\S{1,120})")
_JOB = re.compile(r"(?:^|\s)JobState=(NODE_FAIL)\b")
_LIST = re.compile(r"(?:^|\s)NodeList=(\S{1,200})")
_SACCT = re.compile(r"\bNODE_FAIL\b")
_SACCT_HEAD = re.compile(r"^\s*JobI[dD]\b.*\bState\b")
_DOWN = re.compile(r"DOWN|FAIL|NOT_RESPONDING|NO_RESPOND|\*")


def parse(source: Source) -> list[Record]:
    """Node states; a job's NODE_FAIL is reported for its whole node list."""
    records: list[Record] = []
    node, is_sacct, columns = "", False, list[str]()
    for number, line in enumerate(source.lines, start=1):
        if match := _NODE.search(line):
            node = clean(match[1], 80)
        if node and (match := _STATE.search(line)):
            down = _DOWN.search(match[1]) is not None
            place = source.place(number, line)
            records.append(NodeState(node, clean(match[1], 80), down, place))
            node = ""
        if _SACCT_HEAD.match(line):
            is_sacct, columns = True, _columns(line)
        elif is_sacct and _SACCT.search(line):
            records.append(_job_failed(source, number, line, columns))
        elif _JOB.search(line):
            rest = "\n".join(source.lines[number - 1 : number + 30])
            listed = _LIST.search(rest)
            name = clean(listed[1], 200) if listed else "?"
            records.append(NodeState(name, "NODE_FAIL", True, source.place(number, line)))
    return records


def _columns(line: str) -> list[str]:
    return [name.strip() for name in (line.split("|") if "|" in line else line.split())]


def _job_failed(source: Source, number: int, line: str, columns: list[str]) -> NodeState:
    cells = [cell.strip() for cell in (line.split("|") if "|" in line else line.split())]
    row = dict(zip(columns, cells, strict=False))
    name = clean(row.get("NodeList") or row.get("FailedNode") or "?", 200)
    return NodeState(name, "NODE_FAIL", True, source.place(number, line))
