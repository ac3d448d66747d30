"""Run preflight over the nodes: probes, pair rounds, judgement, files."""

import contextlib
import random
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shakedown.cluster.nodes import node_addresses, write_bad_nodes
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
from shakedown.preflight.checks.network import PORT_RANGE
from shakedown.preflight.checks.storage import marker_folder
from shakedown.preflight.judge import bad_nodes, judge
from shakedown.preflight.launch import Answers, Launcher, Message
from shakedown.preflight.model import NetworkReport, NodeReport, ProbeRequest
from shakedown.preflight.network_run import check_network
from shakedown.preflight.settings import Settings

_START_SECONDS = 30.0  # python's start on a cold shared file system, srun's own delay
_SINGLE_STEPS = 16  # srun commands at once when nodes are asked one by one


@dataclass(frozen=True)
class Checked:
    """What a run found. The verdict is known also where it cannot be written."""

    reports: Mapping[str, NodeReport]
    network: NetworkReport
    verdict: Verdict

    def write(self, out: Path) -> None:
        """Write `nodes/`, `pairs.json` and `bad_nodes.txt` atomically.

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


def run_preflight(settings: Settings) -> Checked:
    """Check the nodes; the caller writes the result.

    Raises:
        StorageError: the results folder cannot be written from here.
        LaunchError: srun is missing.
    """
    watch = Stopwatch()
    _prepare(settings)
    request = _request(settings)
    try:
        with Launcher(slurm=settings.slurm, srun_args=settings.srun_args) as launcher:
            settings.say(f"asking {len(settings.nodes)} node(s)")
            reports, silent = probe_nodes(launcher, settings, request)
            settings.say(f"{len(reports)} answered; network")
            network = check_network(launcher, settings, request.addresses, reports)
            findings = judge(
                settings.nodes,
                reports,
                network,
                settings.want,
                command=local_environment(),
                silent=silent,
            )
            verdict = _verdict(settings, findings, network, watch)
            _keep_logs(launcher, settings.out, needed=verdict.status != "PASS")
    finally:
        shutil.rmtree(marker_folder(request), ignore_errors=True)
    return Checked(reports, network, verdict)


def _prepare(settings: Settings) -> None:
    """Results of an earlier run must not be taken for this one's."""
    paths = PreflightPaths(settings.out)
    try:
        for old in (paths.verdict, paths.pairs, paths.bad_nodes, *paths.nodes.glob("*.json")):
            old.unlink(missing_ok=True)
        shutil.rmtree(paths.logs, ignore_errors=True)
        make_folders(paths.nodes)
    except OSError as error:
        raise StorageError(
            f"cannot write the results folder {settings.out}: {error.strerror}",
            hint="choose another with --out",
        ) from error


def _request(settings: Settings) -> ProbeRequest:
    nodes = list(settings.nodes)
    # below Linux's range of outgoing ports (from 32768); nodes of a test cluster share a host
    room = max(1, 32_768 - 15_000 - PORT_RANGE * min(len(nodes), 200))
    return ProbeRequest(
        addresses=node_addresses(nodes) if settings.slurm else dict.fromkeys(nodes, "127.0.0.1"),
        out=str(settings.out.resolve()),
        token=uuid.uuid4().hex[:12],
        # At random: two runs on one machine shall not ask for the same ports.
        port_base=15_000 + random.randrange(room),
        ports=settings.ports,
        paths=settings.paths,
        limit=settings.limit,
        faults=settings.faults,
    )


def probe_nodes(
    launcher: Launcher, settings: Settings, request: ProbeRequest
) -> tuple[dict[str, NodeReport], dict[str, str]]:
    """(node -> report, node -> why there is none).

    One srun asks all nodes. It may fail as a whole because of one dead node, so those without
    an answer are asked once more, each alone.
    """
    reports, silent = _ask_nodes(launcher, settings, request, [list(settings.nodes)])
    missing = [node for node in settings.nodes if node not in reports]
    if settings.slurm and missing and len(settings.nodes) > 1:
        settings.say(f"no answer from {', '.join(missing)}: asking each alone")
        for begin in range(0, len(missing), _SINGLE_STEPS):
            some = [[node] for node in missing[begin : begin + _SINGLE_STEPS]]
            more, why = _ask_nodes(launcher, settings, request, some)
            reports |= more
            silent |= why
    ordered = {node: reports[node] for node in settings.nodes if node in reports}
    return ordered, {node: why for node, why in silent.items() if node not in reports}


def _ask_nodes(
    launcher: Launcher,
    settings: Settings,
    request: ProbeRequest,
    groups: Sequence[Sequence[str]],
) -> tuple[dict[str, NodeReport], dict[str, str]]:
    asked = {node for nodes in groups for node in nodes}
    file = PreflightPaths(settings.out.resolve()).node("{node}")
    answers = launcher.ask(
        "shakedown.preflight.probe",
        ["--request", request.to_text(), "--out", str(file)],
        groups,
        seconds=_START_SECONDS + settings.limit,
        enough=lambda messages: {m.get("node") for m in messages} >= asked,
    )
    reports = {
        report.node: report
        for message in answers.messages
        if (report := _report(message, answers)) is not None and report.node in asked
    }
    tail = next(iter(answers.tails.values()), "")
    return reports, {n: answers.tails.get(n, answers.tails.get(f"{n}#0", tail)) for n in asked}


def _report(message: Message, answers: Answers) -> NodeReport | None:
    try:
        report = json_as(NodeReport, message, unknown="ignore")
    except ValueError:  # another program's or version's message
        return None
    return replace(report, reply=answers.window)


def _keep_logs(launcher: Launcher, out: Path, *, needed: bool) -> None:
    """What the probes printed, where something is wrong; a full disk keeps no logs."""
    if not needed:
        return
    with contextlib.suppress(OSError):
        logs = PreflightPaths(out).logs
        make_folders(logs)
        for log in launcher.logs:
            shutil.copyfile(log, logs / log.name)


def _verdict(
    settings: Settings, findings: Sequence[Finding], network: NetworkReport, watch: Stopwatch
) -> Verdict:
    bad = bad_nodes(findings, settings.nodes)
    status = status_of(findings)
    speeds = sorted(pair.mb_per_s for pair in network.pairs if pair.ok)
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
        summary=summarize(findings, settings.nodes, settings.want.tier),
        findings=findings,
        metrics=metrics,
        started=watch.started,
        seconds=watch.seconds,
        versions=installed_versions("torch"),
        next=_next(settings, bad, status),
        extra={"tier": settings.want.tier, "bad_nodes": bad},
    )


def summarize(findings: Sequence[Finding], nodes: Sequence[str], tier: str) -> str:
    """One sentence: what is wrong where, else how many nodes were checked; and how many checks."""
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


def _next(settings: Settings, bad: Sequence[str], status: str) -> str:
    if status in ("PASS", "WARN"):
        return "snakemake"
    if bad and settings.slurm:
        return f"sbatch --exclude={','.join(bad)} JOB"
    return f"shakedown verdict {PreflightPaths(settings.out).verdict}"
