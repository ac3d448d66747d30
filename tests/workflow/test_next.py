"""Every command that is printed as the next one of a run goes on with that run."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.cli import main
from shakedown.core.paths import RunPaths
from tests.workflow.helpers import ROOT, Run, read_json
from tests.workflow.test_workflow import snakemake

pytestmark = pytest.mark.slow


def test_every_next_command_of_a_run_plans_that_run(
    run_workflow: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    files = overlays(tmp_path)
    given = ["--cores", "1", "--configfile", *files]
    paths = RunPaths(tmp_path / "results" / "mine")

    first = run_workflow(str(paths.preflight.accepted), *given)
    commands = [*printed(paths, capsys), read_json(paths.preflight.verdict)["next"]]
    assert first.returncode == 0
    failed = run_workflow(*given)
    assert failed.returncode == 1
    commands += printed(paths, capsys)
    commands += [read_json(paths.stage("lab").verdict)["next"]]
    commands += re.findall(r"next: (.*)", (paths.logs / "accept_lab.log").read_text())
    main(["lint", *files])
    commands += re.findall(r"next: (.*)", capsys.readouterr().out)

    expected = shlex.join(given)
    assert len(commands) >= 6
    for told in set(commands):
        command = told.rpartition("then: ")[2]
        assert command.endswith(shlex.join(["--configfile", *files])), told
        planned = snakemake("-n", *shlex.split(command)[1:])
        output = planned.stdout + planned.stderr
        assert planned.returncode == 0, output
        assert str(paths.root) in output
        assert "results/demo" not in output
    assert any(told.endswith(expected) for told in commands)


def overlays(folder: Path) -> list[str]:
    """Two files: the stage, and over it a command that fails."""
    stage: dict[str, Any] = {"algorithm": "command", "launch": "none", "steps": 1}
    stage |= {"command": "true", "progress": {"pattern": r"step (?P<step>\d+)"}}
    bodies = (
        {"run": "mine", "results": str(folder / "results"), "stages": {"lab": stage}},
        {"stages": {"lab": {"command": f"{sys.executable} -c 'raise SystemExit(3)'"}}},
    )
    files = []
    for name, body in zip(("z.yaml", "a.yaml"), bodies, strict=True):
        (folder / name).write_text(yaml.safe_dump(body), encoding="utf-8")
        files.append(str(folder / name))
    return files


def printed(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `status` says is next, and what stands in the page."""
    capsys.readouterr()
    assert main(["status", str(paths.root), "--json", "--no-probe"]) == 0
    told: str = json.loads(capsys.readouterr().out)["next"]
    assert main(["report", str(paths.root)]) == 0
    page = paths.report.read_text(encoding="utf-8")
    assert told.rpartition("/")[2] in page
    return [told]
