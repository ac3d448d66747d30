"""The state of each step of the workflow, and one sentence about the run. Pure."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.paths import RunPaths
from shakedown.core.verdict import Finding, Verdict
from shakedown.report import jobs, text
from shakedown.report.view import JobView, RunView, ServerView, StageState, StageView

_OUTCOMES: Mapping[str, StageState] = {
    "completed": "PASS",
    "hung": "FAIL",
    "failed": "FAIL",
    "interrupted": "UNKNOWN",
}
_FILES = RunPaths(Path())  # relative to the run, as in `RunView.unreadable`
_WORST_FIRST = ("fail", "error", "warn", "skip", "pass")
_STATES_WORST_FIRST: Sequence[StageState] = (
    *("FAIL", "UNKNOWN", "RUNNING", "PENDING"),
    *("WARN", "NOT RUN", "PASS"),
)


@dataclass(frozen=True)
class WorkflowStep:
    """One step of the workflow; `stage` is the training stage it belongs to, if any."""

    name: str
    state: StageState
    sentence: str
    anchor: str
    stage: StageView | None = None
    verdict: Verdict | None = None

    @property
    def title(self) -> str:
        return f"{self.stage.name}: {self.name}" if self.stage else self.name


@dataclass(frozen=True)
class Headline:
    """The headline: the state, the culprit, the remedy, the next command."""

    state: StageState
    title: str
    sentence: str
    culprit: str = ""
    remedy: str = ""
    next: str = ""
    anchor: str = ""


def workflow_steps(view: RunView) -> list[WorkflowStep]:
    """All steps in the order of a run."""
    steps = [_judged(view, "preflight", view.preflight)]
    steps += [_server(view, server) for server in view.servers]
    if not view.servers:
        steps.append(WorkflowStep("serve", "NOT RUN", "", "serve"))
    steps.append(_judged(view, "agents", view.agents))
    steps.append(_judged(view, "consistency", view.consistency))
    # A run of only commands has no server, agents or comparison still to come.
    if view.stages and all(stage.algorithm == "command" for stage in view.stages):
        steps = [step for step in steps if step.title == "preflight" or step.state != "NOT RUN"]
    for stage in view.stages:
        steps += _stage(view, stage)
    return steps


def headline(view: RunView, steps: Sequence[WorkflowStep]) -> Headline:
    """The headline of the first failed step; else of the first that could not be judged; else of
    what runs or waits in Slurm's queue; else of the end."""
    for state in _SPEAKERS:
        for step in steps:
            if step.state == state:
                return _SPEAKERS[state](view, step)
    done = [step for step in steps if step.state != "NOT RUN"]
    # A stage run on its own leaves gaps before it: only later steps are still to come.
    ahead = steps[steps.index(done[-1]) + 1 :] if done else steps
    if not ahead:
        return _finished(view, steps)
    last = f"{done[-1].title} is the last stage with a result" if done else "no stage has a result"
    if view.snakemake:
        sentence = f"{view.snakemake} is running; {last}."
        return Headline("RUNNING", "Running: the workflow", sentence, next=_watch(view))
    if not done:
        sentence = "No stage of this run has written a result yet."
        return Headline("NOT RUN", "Not started", sentence, next=view.further)
    sentence = f"{last}; {ahead[0].title} has not run."
    title = f"Stopped before {ahead[0].title}"
    return Headline("NOT RUN", title, sentence, next=view.further, anchor=ahead[0].anchor)


def worst(states: Sequence[StageState]) -> StageState:
    """The overall state: the worst of the parts; NOT RUN only if no part has run."""
    if all(state == "NOT RUN" for state in states):
        return "NOT RUN"
    return next(s for s in _STATES_WORST_FIRST if s in states and s != "NOT RUN")


def sort_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Fail, error, warn, skip, pass; in the given order within each."""
    return sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.status))


def culprits(verdict: Verdict | None) -> str:
    """The culprits of a diagnosis, as `rank 1`, `ranks 1, 3 on node n2`; empty if none."""
    diagnosis = verdict.extra.get("diagnosis") if verdict else None
    named = diagnosis.get("culprits") if isinstance(diagnosis, Mapping) else None
    if not isinstance(named, Mapping):
        return ""
    parts = [
        _listed(noun, named.get(key))
        for key, noun in (("ranks", "rank"), ("roles", "role"), ("nodes", "node"))
    ]
    return ", ".join(part for part in parts if part)


def accuracy_change(stage: StageView) -> tuple[float, float] | None:
    """Held-out sampled accuracy (0..1) before and after a stage."""
    told = stage.outcome.metrics if stage.outcome else {}
    if "sampled_accuracy_start" in told and "sampled_accuracy_end" in told:
        return told["sampled_accuracy_start"], told["sampled_accuracy_end"]
    measured = [row.sampled for row in stage.evaluations if row.sampled is not None]
    return (measured[0], measured[-1]) if len(measured) > 1 else None


def _judged(view: RunView, name: str, verdict: Verdict | None) -> WorkflowStep:
    state: StageState
    file = f"{name}/{_FILES.preflight.verdict.name}"
    if verdict is not None:
        state, sentence = verdict.status, verdict.summary
    elif any(item.path == file for item in view.unreadable):
        state, sentence = "UNKNOWN", f"{file} cannot be read"
    else:
        state, sentence = "NOT RUN", ""
    job = view.jobs.get(name)
    state, sentence = jobs.with_job(state, sentence, job, view.now)
    return WorkflowStep(name, state, sentence, name, verdict=None if _is_live(job) else verdict)


def _is_live(job: JobView | None) -> bool:
    """Whether the files are from the previous job."""
    return job is not None and (job.waits or job.runs)


def _server(view: RunView, server: ServerView) -> WorkflowStep:
    name = "serve" if len(view.servers) == 1 else f"serve {server.name}"
    job = view.jobs.get(f"serve/{server.name}")
    state, sentence = _server_state(server)
    # The job lives as long as the server: it says nothing new about an ended one.
    if server.phase != "ended" and job is not None:
        if job.runs and state in ("PASS", "WARN"):
            sentence = f"{sentence}; job {job.job_id} on {job.told.nodes if job.told else ''}"
        else:
            state, sentence = jobs.with_job(state, sentence, job, view.now)
    return WorkflowStep(name, state, sentence, f"serve-{server.name}")


def _server_state(server: ServerView) -> tuple[StageState, str]:
    ended = f"; {server.reason}" if server.phase == "ended" and server.reason else ""
    gone = f"; {server.gone}; steps that need it will restart it" if server.gone else ""
    if server.verdict is not None:
        state: StageState = (
            "WARN" if gone and server.verdict.status == "PASS" else server.verdict.status
        )
        return state, f"{server.verdict.summary}{gone}"
    if server.endpoint:
        url = text.shorten(server.endpoint.get("base_url"))
        state = "WARN" if gone or (server.phase == "ended" and server.crashed) else "PASS"
        return state, f"answered a real request at {url}{ended}{gone}"
    if server.phase == "ended" or server.gone:
        return "UNKNOWN", f"ended before it answered{ended or f'; {server.gone}'}"
    if server.phase:
        return "RUNNING", "starting: it has not answered a request yet"
    return "NOT RUN", ""


def _stage(view: RunView, stage: StageView) -> list[WorkflowStep]:
    anchor = f"stage-{stage.name}"
    job = view.jobs.get(f"stages/{stage.name}")
    state, sentence = _train(stage, job, view.now)
    steps = [WorkflowStep("train", state, sentence, anchor, stage)]
    files = _FILES.stage(stage.name)
    broken = {item.path for item in view.unreadable}
    for name, verdict, file in (
        ("diagnose", stage.diagnosis, files.diagnosis),
        ("accept", stage.accepted, files.accepted),
    ):
        if _is_live(job):
            steps.append(WorkflowStep(name, "NOT RUN", "", anchor, stage))
        elif verdict is not None:
            steps.append(
                WorkflowStep(name, verdict.status, verdict.summary, anchor, stage, verdict)
            )
        elif file.as_posix() in broken:
            sentence = f"{file.name} cannot be read"
            steps.append(WorkflowStep(name, "UNKNOWN", sentence, anchor, stage))
        else:
            steps.append(WorkflowStep(name, "NOT RUN", "", anchor, stage))
    return steps


def _train(stage: StageView, job: JobView | None, now: float) -> tuple[StageState, str]:
    state, sentence = _by_files(stage, now)
    # Cut off according to its files, although Slurm has not ended the job.
    if job and job.runs and stage.newest and stage.outcome is None and state == "UNKNOWN":
        return state, f"{sentence}, although its job {job.job_id} is still running"
    return jobs.with_job(state, sentence, job, now)


def _by_files(stage: StageView, now: float) -> tuple[StageState, str]:
    attempt, outcome = stage.newest, stage.outcome
    if attempt is None:
        return "NOT RUN", ""
    if outcome is None:
        return _without_outcome(stage, attempt.number, now)
    state = _OUTCOMES.get(outcome.state, "UNKNOWN")
    if outcome.sentence:
        return state, outcome.sentence
    if outcome.state == "unreadable":
        return state, f"the outcome of attempt {attempt.number} cannot be read"
    return state, f"attempt {attempt.number} {outcome.state}"


def _without_outcome(stage: StageView, number: int, now: float) -> tuple[StageState, str]:
    if stage.gone:
        return "UNKNOWN", f"attempt {number} was cut off: {stage.gone}"
    if stage.last_sign is None:
        return "RUNNING", f"attempt {number} is starting"
    silence = _silence(stage, now)
    if silence > stage.cut_off_after:
        return "UNKNOWN", (
            f"attempt {number} was cut off: it has no outcome and wrote nothing for "
            f"{text.duration(silence)}"
        )
    return "RUNNING", f"attempt {number} is running, {_progress(stage)}"


def _silence(stage: StageView, now: float) -> float:
    """Seconds without a sign of life from the newest attempt; 0 before its first."""
    return 0.0 if stage.last_sign is None else max(0.0, now - stage.last_sign)


def _progress(stage: StageView) -> str:
    if stage.step is None:
        return "before its first step"
    total = f" of {stage.planned_steps:,}" if stage.planned_steps else ""
    return f"step {stage.step:,}{total}"


def _trouble(view: RunView, step: WorkflowStep) -> Headline:
    if step.stage is not None:
        return _stage_trouble(view, step, step.stage)
    word = "failed" if step.state == "FAIL" else "could not be judged"
    bad = _bad_findings(step.verdict)
    return Headline(
        step.state,
        f"{step.title} {word}",
        step.sentence,
        culprit=_listed("", [f.subject for f in bad if f.subject]),
        remedy=next((f.remedy for f in bad if f.remedy), ""),
        next=step.verdict.next if step.verdict else "",
        anchor=step.anchor,
    )


def _stage_trouble(view: RunView, step: WorkflowStep, stage: StageView) -> Headline:
    """The diagnosis knows more than the outcome, and the gate repeats both."""
    outcome = stage.outcome
    judges = [v for v in (stage.diagnosis, stage.accepted) if v and v.status in ("FAIL", "UNKNOWN")]
    judge = judges[0] if judges else None
    words = {"hung": "hung", "failed": "failed", "interrupted": "was interrupted"}
    default = "failed" if step.state == "FAIL" else "could not be judged"
    without = "is silent" if _is_live(view.jobs.get(f"stages/{stage.name}")) else "was cut off"
    word = words.get(outcome.state, default) if outcome else without
    told = outcome if outcome and outcome.explained else None
    bad = [*_bad_findings(judge), *_worst_of(told.findings if told else ())]
    remedy = next((f.remedy for f in bad if f.remedy), "")
    # As in the gate: the stage's own advice comes before its processes' evidence.
    asked = [told.next if told else "", *(verdict.next for verdict in judges)]
    following = next(filter(None, asked), "") or _default_next(view, stage)
    return Headline(
        step.state,
        f"{stage.name} {word}{_where(stage)}",
        _why(step, judge),
        culprit=culprits(stage.diagnosis) or (outcome.failed_component if outcome else ""),
        remedy="" if remedy == following else remedy,
        next=following,
        anchor=step.anchor,
    )


def _why(step: WorkflowStep, judge: Verdict | None) -> str:
    """A diagnosis with a cause stands alone; one without a cause is added to the outcome."""
    if judge is None or not judge.summary or judge is step.verdict:
        return step.sentence
    if judge.status == "FAIL" or not step.sentence:
        return judge.summary
    return f"{step.sentence}; {judge.summary}"


def _where(stage: StageView) -> str:
    told = stage.outcome if stage.outcome and stage.outcome.state != "unreadable" else None
    reached = told.steps if told else stage.step
    if reached is None:
        return ""
    total = f" of {stage.planned_steps:,}" if stage.planned_steps else ""
    return f" at step {reached:,}{total}"


def _default_next(view: RunView, stage: StageView) -> str:
    if stage.diagnosis is not None or stage.outcome is None or stage.outcome.state == "interrupted":
        return stage.again
    newest = RunPaths(view.root).stage(stage.name).latest
    return f"shakedown hang analyze {shlex.quote(str(newest))}"


def _running(view: RunView, step: WorkflowStep) -> Headline:
    stage = step.stage
    where = f", {_progress(stage)}" if stage else ""
    beat = ""
    if stage and stage.last_sign is not None:
        beat = f"; last write {text.duration(_silence(stage, view.now))} before this"
    return Headline(
        "RUNNING",
        f"Running: {stage.name if stage else step.name}{where}",
        f"{step.sentence}{beat}.",
        next=_watch(view),
        anchor=step.anchor,
    )


def _pending(view: RunView, step: WorkflowStep) -> Headline:
    name = step.stage.name if step.stage else step.name
    return Headline(
        "PENDING", f"Waiting in Slurm's queue: {name}", f"{step.sentence}.", next=_watch(view)
    )


def _watch(view: RunView) -> str:
    return f"shakedown status {shlex.quote(str(view.root))} --watch 5"


# States that come before the run's end, in order of precedence.
_SPEAKERS: Mapping[StageState, Callable[[RunView, WorkflowStep], Headline]] = {
    "FAIL": _trouble,
    "UNKNOWN": _trouble,
    "RUNNING": _running,
    "PENDING": _pending,
}


def _finished(view: RunView, steps: Sequence[WorkflowStep]) -> Headline:
    warned = [step for step in steps if step.state == "WARN"]
    changes = [change for stage in view.stages if (change := accuracy_change(stage))]
    learned = ""
    if changes:
        before, after = changes[0][0], changes[-1][1]
        learned = f"Held-out sampled accuracy: {before:.3f} before, {after:.3f} after."
    gaps = any(step.state == "NOT RUN" for step in steps)
    title = "Every stage that ran passed" if gaps else "Every stage passed"
    if not warned:
        return Headline("PASS", title, learned or "Nothing was found wrong.")
    return Headline(
        "WARN",
        f"{title}, {text.plural(len(warned), 'warning')}",
        f"{learned} {warned[0].title}: {warned[0].sentence}".strip(),
        remedy=next((f.remedy for f in _bad_findings(warned[0].verdict) if f.remedy), ""),
        next=warned[0].verdict.next if warned[0].verdict else "",
        anchor=warned[0].anchor,
    )


def _bad_findings(verdict: Verdict | None) -> list[Finding]:
    return _worst_of(verdict.findings if verdict else ())


def _worst_of(findings: Sequence[Finding]) -> list[Finding]:
    found = sort_findings(findings)
    return [finding for finding in found if finding.status in ("fail", "error", "warn")]


def _listed(noun: str, values: object, limit: int = 6) -> str:
    """`rank 1`, `ranks 1, 3 and 9 more`; each value once, in the given order."""
    if not isinstance(values, list) or not values:
        return ""
    unique = list(dict.fromkeys(text.shorten(value, 60) for value in values))
    shown = ", ".join(unique[:limit])
    more = f" and {len(unique) - limit:,} more" if len(unique) > limit else ""
    head = f"{noun}{'s' if len(unique) > 1 else ''} " if noun else ""
    return f"{head}{shown}{more}"
