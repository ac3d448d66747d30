"""Whether nodes see each other's files in the results folder."""

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from shakedown.core.private import make_folders
from shakedown.core.verdict import Blame, FindingStatus
from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.checks.files import marker_folder
from shakedown.preflight.datatypes import NodeFacts, ProbeRequest

# Represents the machine that the command runs on; no node can have this name.
COMMAND = "@command"


def measure(request: ProbeRequest, node: str) -> NodeFacts:
    """Write a file, then wait until all nodes' files, including this one, can be read.

    Every node runs this at the same time. `listed`: nodes whose file appeared only after the folder
    was listed (a cached "no such file", as on NFS).
    """
    folder = marker_folder(request)
    make_folders(folder)
    leave_file(folder, node, request.token)
    return _look(folder, {*request.addresses, node, COMMAND}, request)


def leave_own(request: ProbeRequest) -> None:
    """Write the file of the command's machine, before the nodes look for it."""
    folder = marker_folder(request)
    # On a full disk the nodes' own checks report the fault; let them run.
    with contextlib.suppress(OSError):
        make_folders(folder)
        leave_file(folder, COMMAND, request.token)


def look_from_here(request: ProbeRequest, answered: Collection[str]) -> NodeFacts:
    """The nodes' files as seen by the command's machine, after the nodes answered."""
    names = {*answered, COMMAND}
    try:
        return _look(marker_folder(request), names, request)
    except OSError:  # a folder that cannot be listed shows no files
        return {"missing": sorted(names), "listed": []}


def _look(folder: Path, names: Collection[str], request: ProbeRequest) -> NodeFacts:
    begin = time.monotonic()
    missing = set(names)
    listed: set[str] = set()
    # Not the whole limit, or the check would be ended without an answer.
    while missing and time.monotonic() - begin < request.limit * 0.75:
        missing -= {name for name in missing if _reads(folder / f"seen-{name}", request.token)}
        # Not immediately, as listing the folder clears NFS's cached "no such file", which must be
        # found.
        if missing and time.monotonic() - begin > request.limit / 4:
            present = os.listdir(folder)
            listed |= {name for name in missing if f"seen-{name}" in present}
        time.sleep(0.05 if missing else 0)
    return {"missing": sorted(missing), "listed": sorted(listed - missing)}


def _reads(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def leave_file(folder: Path, name: str, token: str) -> None:
    """Write one node's file atomically."""
    temporary = folder / f".seen-{name}"
    temporary.write_text(token)
    temporary.replace(folder / f"seen-{name}")


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Which node does not see whose file. Nodes without a report are left out."""
    facts = fleet.facts("visibility")
    if fleet.sees:
        facts[COMMAND] = fleet.sees
    unseen = {n: [m for m in row["missing"] if m in facts] for n, row in facts.items()}
    unseen_by = {m: [n for n in unseen if m in unseen[n]] for m in facts}
    others = len(facts) - 1
    found = {}
    for node, row in facts.items():
        hidden = node in unseen_by[node] or 0 < others == len(unseen_by[node])
        # not seeing a node that nobody sees is the other node's fault
        blind = [m for m in unseen[node] if len(unseen_by[m]) < others or hidden]
        name = _CALLED if node == COMMAND else node
        found[name] = _judged(unseen_by[node] if hidden else [], blind, row["listed"])
    return found


_CALLED = "the submitting machine"


def _judged(unseen_by: list[str], blind: list[str], late: list[str]) -> CheckJudgement:
    status: FindingStatus = "pass"
    blame: Blame = "node"
    measured, remedy = "sees all", "is the results folder on the shared file system?"
    if unseen_by:
        status, measured = "fail", f"its file is not visible on {_listed(unseen_by)}"
    elif blind:
        status, measured = "fail", f"cannot see the files of {_listed(blind)}"
    elif late:
        status, blame, measured = "warn", "environment", f"only after `ls`: {_listed(late)}"
        remedy = "mount with lookupcache=positive, or run with Snakemake's latency-wait"
    expected = "every node's file is visible on all"
    return CheckJudgement(status, measured, expected, "", blame, remedy if status != "pass" else "")


def _listed(names: list[str]) -> str:
    return ", ".join(_CALLED if name == COMMAND else name for name in names)


VISIBILITY = Check(
    "visibility",
    "a file written by one node, or the submitting machine, is not visible on another; warns: "
    "it appears only after a listing (NFS)",
    measure,
    compare=compare,
    limit="three quarters of `--timeout`",
    source="Snakemake's issues 39, 153, 775 and 2739: outputs invisible until someone runs `ls`",
)
