"""Slurm's view: `scontrol show node`, `scontrol show job`, `sacct`, `squeue`, `sinfo`."""

import re
from itertools import chain

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, LogEvent, NodeState, Record, SourceRef, clean

_NODE = re.compile(r"(?:^|\s)NodeName=(\S{1,80})")
_STATE = re.compile(r"(?:^|\s)State=(\S{1,120})")
_JOB_ID = re.compile(r"(?:^|\s)JobId=(\S{1,40})")
_JOB = re.compile(r"(?:^|\s)JobState=([A-Z_]{1,40})\b")
_LIST = re.compile(r"(?:^|\s)NodeList=(\S{1,200})")
_TABLE_HEAD = re.compile(r"^\s*(?:JobI[dD]\b.*\bState|JOBID\b.*\b(?:ST|STATE))\b")
# Slurm appends `*` to the state of a node that does not respond: `IDLE*`.
_DOWN = re.compile(r"DOWN|FAIL|NOT_RESPONDING|NO_RESPOND|\*")
# sacct cuts its columns: `OUT_OF_ME+`, `CANCELLED+`
_JOB_STATES = re.compile(
    r"^(PENDING|RUNNING|COMPLETING|COMPLETED|FAILED|TIMEOUT|CANCELLED|OUT_OF_ME|PREEMPTED|NODE_FAIL"
    r"|BOOT_FAIL|DEADLINE|SUSPENDED)"
)
# squeue shows these jobs alone unless it is asked for others.
_SHORT = {"R": "RUNNING", "PD": "PENDING", "CG": "COMPLETING", "S": "SUSPENDED"}


def parse(source: EvidenceFile) -> list[Record]:
    """Node and job states; a job's NODE_FAIL is reported for its whole node list."""
    if not any(word in source.text for word in ("NodeName=", "JobState=", "JobI", "JOBID")):
        return []
    records: list[Record] = []
    rows: dict[
        str, list[Record]
    ] = {}  # of a table by job: sacct's `--duplicates` lists a requeued one again
    node, job, in_table, columns = "", "", False, list[str]()
    for number, line in enumerate(source.lines, start=1):
        if match := _NODE.search(line):
            node = clean(match[1], 80)
        if match := _JOB_ID.search(line):
            job = clean(match[1], 40)
        if node and (match := _STATE.search(line)):
            down = _DOWN.search(match[1]) is not None
            place = source.place(number, line)
            records.append(NodeState(node, clean(match[1], 80), down, place))
            # One state a node: what follows on further lines belongs to something else.
            node = ""
        if _TABLE_HEAD.match(line):
            in_table, columns = True, _cells(line)
        elif in_table:
            cells = _cells(line)
            if found := _row(columns, cells, source.place(number, line)):
                rows[cells[0]] = found
        elif match := _JOB.search(line):
            # `scontrol show job` writes NodeList some lines below JobState.
            rest = "\n".join(source.lines[number - 1 : number + 30])
            listed = _LIST.search(rest)
            row = {"JobID": job, "State": match[1], "NodeList": listed[1] if listed else ""}
            records += _job(row, source.place(number, line))
    return [*records, *chain.from_iterable(rows.values())]


def _cells(line: str) -> list[str]:
    # `sacct -P` separates columns by bars, plain sacct by blanks.
    return [name.strip() for name in (line.split("|") if "|" in line else line.split())]


def _row(columns: list[str], cells: list[str], place: SourceRef) -> list[Record]:
    """A row of sacct or squeue; the steps of a job repeat what its own row says."""
    row = dict(zip(columns, cells, strict=False))
    job = cells[0] if cells else ""
    row["State"] = row.get("State") or row.get("STATE") or _SHORT.get(row.get("ST", ""), "")
    if not _JOB_STATES.match(row["State"]):  # a name with blanks shifts the columns
        named = (_SHORT.get(cell, cell) for cell in cells[1:])
        row["State"] = next((state for state in named if _JOB_STATES.match(state)), "")
    if not job[:1].isdigit() or "." in job or not row["State"]:
        return []
    return _job({**row, "JobID": job}, place)


def _job(row: dict[str, str], place: SourceRef) -> list[Record]:
    match = _JOB_STATES.match(row["State"])
    if match is None:
        return []
    if match[1] == "NODE_FAIL":
        name = clean(row.get("NodeList") or row.get("FailedNode") or "?", 200)
        return [NodeState(name, "NODE_FAIL", True, place)]
    state = "OUT_OF_MEMORY" if match[1] == "OUT_OF_ME" else match[1]
    job = clean(row["JobID"], 40)
    detail = {"job": job, "state": state, "nodes": clean(row.get("NodeList", ""), 200)}
    return [LogEvent("job", Identity(), f"job {job} is {state}", place, (), detail)]
