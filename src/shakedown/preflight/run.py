"""Run preflight over the nodes: probes, pair rounds, judgement, files."""

import contextlib
import secrets
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shakedown.cluster.nodes import write_bad_nodes
from shakedown.core.errors import StorageError
from shakedown.core.files import json_as, write_json
from shakedown.core.paths import PreflightPaths
from shakedown.core.private import make_folders
from shakedown.core.verdict import (
    Finding,
    Stopwatch,
    Verdict,
    counted,
    installed_versions,
    status_of,
)
from shakedown.preflight.checks.environment import local_environment
from shakedown.preflight.checks.files import marker_folder
from shakedown.preflight.checks.visibility import leave_own, look_from_here
from shakedown.preflight.datatypes import NodeReport, PreflightSettings, ProbeRequest
from shakedown.preflight.history import NodeLook
from shakedown.preflight.judge import bad_nodes, concerns, judge, usable_nodes
from shakedown.preflight.launch import Launcher, ProgramMessage
from shakedown.preflight.network_run import check_network
from shakedown.preflight.observed import NetworkReport
from shakedown.preflight.slurm_messages import blamed_by_srun
from shakedown.slurm.nodes import node_addresses, slurm_nodes

_START_SECONDS = 30.0  # for python's start on a cold shared file system and srun's own delay
_LAGGARD_SECONDS = 5.0
_SINGLE_STEPS = 16  # parallel srun commands when nodes are asked one by one


@dataclass(frozen=True)
class Checked:
    """The result of a run. The verdict is known even if it cannot be written."""

    reports: Mapping[str, NodeReport]
    network: NetworkReport
    verdict: Verdict

    def write(self, out: Path) -> None:
        """Write `nodes/`, `pairs.json`, `bad_nodes.txt` and `good_nodes.txt` atomically.

        Raises:
            StorageError: the results folder is full or gone.
        """
        paths = PreflightPaths(out)
        for node, report in self.reports.items():
            body = report.to_json()
            body["findings"] = [asdict(f) for f in self.verdict.findings if f.subject == node]
            write_json(paths.node(node), body)
        pairs = {"schema": "shakedown/preflight-pairs/1", **asdict(self.network)}
        write_json(paths.pairs, pairs)
        write_bad_nodes(paths.bad_nodes, self.verdict.extra["bad_nodes"])
        write_bad_nodes(paths.good_nodes, self.verdict.extra["good_nodes"])

    def looks(self, run: str) -> list[NodeLook]:
        """The judgements for the nodes' history: every good node, and the failures of bad ones."""
        now = time.time()
        good = [NodeLook(now, run, node, ok=True) for node in self.verdict.extra["good_nodes"]]
        failed: dict[str, list[str]] = {node: [] for node in self.verdict.extra["bad_nodes"]}
        for finding in self.verdict.findings:
            if finding.subject in failed and finding.status in ("fail", "error"):
                failed[finding.subject].append(finding.check)
        bad = [NodeLook(now, run, n, ok=False, reason=", ".join(why)) for n, why in failed.items()]
        return [*good, *bad]


def run_preflight(settings: PreflightSettings) -> Checked:
    """Check the nodes; the caller writes the result.

    Raises:
        StorageError: the results folder cannot be written from here.
        LaunchError: srun is missing.
    """
    watch = Stopwatch()
    _prepare(settings)
    request = _request(settings)
    try:
        leave_own(request)
        with Launcher.opened(slurm=settings.slurm, srun_args=settings.srun_args) as launcher:
            settings.say(f"asking {len(settings.nodes)} node(s)")
            reports, silent = probe_nodes(launcher, settings, request)
            settings.say(f"{len(reports)} answered; network")
            addresses = {node: request.addresses[node] for node in reports}
            network = check_network(launcher, settings, addresses, secrets.token_hex(16))
            findings = judge(
                settings.nodes,
                reports,
                network,
                settings.want,
                command=local_environment(),
                sees=look_from_here(request, reports),
                silent=silent,
            )
            verdict = _verdict(settings, findings, network, watch)
            _keep_logs(launcher, settings.out, needed=verdict.status != "PASS")
    finally:
        shutil.rmtree(marker_folder(request), ignore_errors=True)
    return Checked(reports, network, verdict)


def _prepare(settings: PreflightSettings) -> None:
    """Remove an earlier run's results, so that they are not taken for this one's."""
    paths = PreflightPaths(settings.out)
    try:
        results = (paths.verdict, paths.pairs, paths.bad_nodes, paths.good_nodes)
        for old in (*results, *paths.nodes.glob("*.json")):
            old.unlink(missing_ok=True)
        shutil.rmtree(paths.logs, ignore_errors=True)
        make_folders(paths.nodes)
    except OSError as error:
        raise StorageError(
            f"cannot write the results folder {settings.out}: {error.strerror}",
            hint="choose another with --out",
        ) from error


def _request(settings: PreflightSettings) -> ProbeRequest:
    nodes = list(settings.nodes)
    return ProbeRequest(
        addresses=node_addresses(nodes) if settings.slurm else dict.fromkeys(nodes, "127.0.0.1"),
        out=str(settings.out.resolve()),
        token=uuid.uuid4().hex[:12],
        ports=settings.ports,
        want=settings.want,
        limit=settings.limit,
        faults=settings.faults,
    )


def probe_nodes(
    launcher: Launcher, settings: PreflightSettings, request: ProbeRequest
) -> tuple[dict[str, NodeReport], dict[str, str]]:
    """(node -> report, node -> why there is no report).

    One srun asks all nodes that the controller has not lost. One dead node can end that srun for
    all, so nodes without an answer are asked again: together if nobody blames them, each alone if
    srun does, and finally each alone.
    """
    said = slurm_nodes(settings.nodes) if settings.slurm else {}
    lost = {node: row.lost for node, row in said.items() if row.lost}
    reports: dict[str, NodeReport] = {}
    silent: dict[str, str] = {}
    blamed: dict[str, str] = {}
    for turn in range(3 if settings.slurm else 1):
        missing = [n for n in settings.nodes if n not in reports.keys() | lost.keys()]
        groups = _groups(missing, blamed, turn)
        if turn and groups:
            settings.say(f"no answer from {', '.join(missing)}: retrying")
        for begin in range(0, len(groups), _SINGLE_STEPS):
            some = groups[begin : begin + _SINGLE_STEPS]
            more, why, words = _ask_nodes(launcher, settings, request, some)
            # If srun ended a step because of one node, it may have ended a check of another.
            reports |= {n: r for n, r in more.items() if turn > 1 or not words or _complete(r)}
            silent |= why
            blamed |= words
    silent |= {**blamed, **lost}
    ordered = {node: reports[node] for node in settings.nodes if node in reports}
    return ordered, {node: why for node, why in silent.items() if node not in reports}


def _complete(report: NodeReport) -> bool:
    return not any(row.error for row in report.checks.values())


def _groups(missing: Sequence[str], blamed: Mapping[str, str], turn: int) -> list[list[str]]:
    """The groups of nodes asked in the first, second and third turn, one srun per group."""
    together = [node for node in missing if node not in blamed]
    if turn > 1:  # a node blamed twice is not asked a third time
        return [[node] for node in together]
    return [group for group in [together, *([n] for n in missing if n in blamed)] if group]


def _ask_nodes(
    launcher: Launcher,
    settings: PreflightSettings,
    request: ProbeRequest,
    groups: Sequence[Sequence[str]],
) -> tuple[dict[str, NodeReport], dict[str, str], dict[str, str]]:
    """(node -> report, node -> the end of its srun's log, node -> why srun blames it)."""
    asked = {node for nodes in groups for node in nodes}
    # A node that waits for others' files must not wait for one that is not asked.
    addresses = {node: request.addresses[node] for node in settings.nodes if node in asked}
    only = replace(request, addresses=addresses)
    file = PreflightPaths(settings.out.resolve()).node("{node}")
    arguments = ["--request", only.to_text(), "--out", str(file)]
    with launcher.step("shakedown.preflight.probe", arguments, groups) as step:
        most = _START_SECONDS + settings.limit
        step.wait(_reporting, asked, least=_LAGGARD_SECONDS, most=most)
        got = time.time()  # nodes read their clocks before this; see `judge._clocks`
        tails, words = step.tails(), blamed_by_srun(step.words())
        window = (step.started, got)
        reports = {
            report.node: report
            for message in step.messages()
            if (report := _report(message, window)) is not None and report.node in asked
        }
    tail = next(iter(tails.values()), "")
    ends = {node: tails.get(node, tails.get(f"{node}#0", tail)) for node in asked}
    return reports, ends, {node: why for node, why in words.items() if node in asked}


def _reporting(messages: Sequence[ProgramMessage]) -> set[str]:
    return {str(message.get("node")) for message in messages}


def _report(message: ProgramMessage, window: tuple[float, float]) -> NodeReport | None:
    try:
        report = json_as(NodeReport, message, unknown="ignore")
    except ValueError:  # a message of another program or version
        return None
    return replace(report, reply=window)


def _keep_logs(launcher: Launcher, out: Path, *, needed: bool) -> None:
    """Save the probes' output if something is wrong; a full disk keeps no logs."""
    if not needed:
        return
    with contextlib.suppress(OSError):
        logs = PreflightPaths(out).logs
        make_folders(logs)
        for log in launcher.logs:
            shutil.copyfile(log, logs / log.name)


def _verdict(
    settings: PreflightSettings,
    findings: Sequence[Finding],
    network: NetworkReport,
    watch: Stopwatch,
) -> Verdict:
    bad = bad_nodes(findings, settings.nodes)
    good = usable_nodes(findings, settings.nodes, network)
    left_out = [node for node in settings.nodes if node not in good]
    enough = 0 < len(left_out) <= settings.spares
    counting = [f for f in findings if concerns(f, good)] if enough else findings
    status = status_of(counting)
    if enough and status == "PASS":
        status = "WARN"
    speeds = sorted(pair.speed for pair in network.pairs if pair.ok)
    metrics = {
        "nodes": float(len(settings.nodes)),
        "bad_nodes": float(len(bad)),
        "all_reduce_seconds": network.all_reduce_seconds,
    }
    if speeds:
        metrics["pair_mb_per_s_median"] = speeds[len(speeds) // 2]
    return Verdict(
        stage="preflight",
        status=status,
        summary=summarize(counting, settings.nodes, settings.want.tier)
        + (f"; continuing without {', '.join(left_out)}" if enough else ""),
        findings=findings,
        metrics=metrics,
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions("torch"),
        next=_next(settings, bad, status),
        extra={"tier": settings.want.tier, "bad_nodes": bad, "good_nodes": good},
    )


def summarize(findings: Sequence[Finding], nodes: Sequence[str], tier: str) -> str:
    """One sentence: the faults by node, or the number of nodes checked; and the number of
    checks."""
    worst = [f for f in findings if f.status in ("fail", "error")]
    if not worst:
        warned = sorted({f.check for f in findings if f.status == "warn"})
        remark = f" ({', '.join(warned)})" if warned else ""
        number = f"{len(nodes)} node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        return f"{number}, {tier} tier: {counted(findings)}{remark}"
    by_subject: dict[str, list[str]] = {}
    for finding in worst:
        checks = by_subject.setdefault(finding.subject or finding.scope, [])
        label = f"{finding.check} could not run" if finding.status == "error" else finding.check
        if label not in checks:
            checks.append(label)
    listed = [f"{subject}: {', '.join(checks)}" for subject, checks in by_subject.items()]
    more = f"; and {len(listed) - 5} more" if len(listed) > 5 else ""
    return f"{'; '.join(listed[:5])}{more} ({counted(findings)})"


def _next(settings: PreflightSettings, bad: Sequence[str], status: str) -> str:
    if status in ("PASS", "WARN"):
        return settings.after
    if bad and settings.slurm:
        return f"sbatch --exclude={','.join(bad)} JOB"
    return f"shakedown verdict {PreflightPaths(settings.out).verdict}"
