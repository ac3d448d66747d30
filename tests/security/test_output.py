"""What others wrote steers no terminal and ends no command in a traceback."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.config import load_config
from shakedown.core.errors import ConfigError
from shakedown.core.files import write_json, write_text
from shakedown.core.lease import Holder
from shakedown.core.outcome import Outcome
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import Finding, Verdict
from shakedown.core.visible import masked
from shakedown.inference.folder import ServerState
from shakedown.report.text import page_environment
from shakedown.slurm.hostlist import node_name
from shakedown.training.metrics.record import MetricsLog
from shakedown.training.stage.results import damage_findings, stage_metrics

ROOT = Path(__file__).parents[2]
CASE = ROOT / "tests" / "data" / "hang_dumps" / "b_cond"
# A window's title, bold by a C1 control, text in reverse order, an isolate, and a width of nothing.
HOSTILE = "\x1b]0;owned\x07\x9b1m\u202egnp\u2066\u200b\x7f"
SHOWN = "\\x1b]0;owned\\x07\\x9b1m\\u202egnp\\u2066\\u200b\\x7f"


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose folder, files and logs hold what steers a terminal."""
    paths = RunPaths(tmp_path / f"run{HOSTILE}")
    write_text(paths.config, 'run: demo\nstages: {grpo: {algorithm: "\\e[2Jgrpo", steps: 150}}\n')
    failed = Finding(f"c{HOSTILE}", "fail", "node", f"n{HOSTILE}", f"m{HOSTILE}", remedy=HOSTILE)
    Verdict("agents", "FAIL", HOSTILE, [failed], next=HOSTILE).write(paths.agents.verdict)
    write_json(paths.server("policy").endpoint, {"base_url": HOSTILE, "engine": HOSTILE})
    attempt = paths.stage("grpo").new_attempt()
    write_text(attempt.log("trainer-rank0"), f"step\t1 {HOSTILE}\n")
    write_text(attempt.log(f"rank{HOSTILE}"), f"{HOSTILE}\n")
    write_text(paths.stage("sft").diagnosis, f"[{HOSTILE}")
    (tmp_path / f"dump{HOSTILE}").write_bytes(b"\0")
    return paths


def commands(run: RunPaths) -> dict[str, list[str]]:
    root, agents = str(run.root), str(run.agents.verdict)
    missing = f"{root}/missing{HOSTILE}"
    return {
        "status": ["status", root, "--no-probe"],
        "logs": ["logs", root, "--stage", "grpo"],
        "logs of no stage": ["logs", root, "--stage", HOSTILE],
        "report": ["report", root],
        "verdict": ["verdict", agents],
        "accept": ["accept", agents],
        "accept of no file": ["accept", missing],
        "lint": ["lint", str(run.config)],
        "lint of no file": ["lint", missing],
        "analyze": ["hang", "analyze", str(run.root.parent), "--full"],
        "analyze of nothing": ["hang", "analyze", missing],
        "serve status": ["serve", "status", missing],
        "collect": ["hang", "collect", "--match", f"({HOSTILE}", "--out", missing],
        "an unknown option": ["status", root, HOSTILE],
        "an unknown command": [HOSTILE],
    }


NAMES = list(commands(RunPaths(Path("run"))))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_command_prints_of_hostile_names_and_files_steers_no_terminal(
    name: str, run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        main(commands(run)[name])

    out, err = capsys.readouterr()
    assert out + err == masked(out + err)
    assert "Traceback" not in err
    assert out + err


def test_an_error_shows_the_very_characters_of_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["verdict", os.fsdecode(os.path.join(os.fsencode(tmp_path), HOSTILE.encode() + b"\xff"))])

    assert f"{tmp_path}/{SHOWN}\\xff" in capsys.readouterr().err


def test_logs_keep_their_tabs_as_space(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    main(["logs", str(run.root), "--stage", "grpo", "--component", "trainer-rank0"])

    assert f"| step    1 {masked(HOSTILE)}" in capsys.readouterr().out


def test_json_on_standard_output_is_the_exact_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / f"run{HOSTILE}"
    RunPaths(root).stages.mkdir(parents=True)

    assert main(["status", str(root), "--json", "--no-probe"]) == 0

    printed = capsys.readouterr().out
    assert json.loads(printed)["run"] == root.name
    assert printed.isascii()


def test_a_terminal_gets_no_sequence_but_our_own_colours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shutil.copytree(CASE, tmp_path / "case")
    write_text(tmp_path / "case" / "a.log", f"Traceback\nValueError: {HOSTILE}\n")
    terminal = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)

    main(["hang", "analyze", str(tmp_path / "case"), "--full"])

    plain = re.sub(r"\x1b\[(31;1|1|0)m", "", terminal.getvalue())
    assert plain != terminal.getvalue()
    assert plain == masked(plain)


def test_a_page_shows_the_marks_that_reorder_text(run: RunPaths) -> None:
    page = (
        page_environment()
        .from_string("<b>{{ text }}</b>{{ path }}")
        .render(text=f"<{HOSTILE}", path=Path(HOSTILE))
    )
    main(["report", str(run.root)])

    assert page == f"<b>&lt;{SHOWN}</b>{SHOWN}"
    report = run.report.read_text(encoding="utf-8")
    assert report == masked(report)


@pytest.fixture
def read_only(tmp_path: Path) -> list[str]:
    """A command in front of a program, for which the folder `disk` is a read-only file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -o bind,ro {disk} {disk} 2>/dev/null && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.getuid() or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a read-only file system")
    return command


def test_on_a_read_only_file_system_every_command_says_so_and_exits_3(
    tmp_path: Path, read_only: list[str]
) -> None:
    disk = tmp_path / "disk"
    bad, good = disk / "bad.json", disk / "good.json"
    Verdict("preflight", "FAIL", "no GPU", [Finding("gpus", "fail")]).write(bad)
    Verdict("preflight", "PASS", "all well", [Finding("gpus", "pass")]).write(good)
    RunPaths(disk / "run").stage("sft").new_attempt()
    model = tmp_path / "model"
    write_json(model / "config.json", {})
    write_json(model / "tokenizer.json", {})
    commands = [
        ["accept", str(good), "--out", str(disk / "accepted.json")],
        ["accept", str(bad), "--remove-on-fail", str(good)],
        ["report", str(disk / "run")],
        ["hang", "analyze", str(CASE), "--json", str(disk / "d.json")],
        ["hang", "analyze", str(CASE), "--html", str(disk / "d.html")],
        ["hang", "collect", "--pid", str(os.getpid()), "--rounds", "1", "--out", str(disk / "e")],
        ["hang", "diagnose", "--stage", str(disk / "run" / "stages" / "sft")],
        ["serve", "start", "--engine", "vllm", "--model", str(model), "--out", str(disk / "s")],
        ["serve", "stop", str(disk / "run")],
        ["preflight", "--out", str(disk / "p"), "--min-free-disk-gb", "0"],
    ]
    program = """
    import json, sys
    from shakedown.cli import main
    for arguments in json.loads(sys.argv[1]):
        print("===", *arguments[:2], main(arguments), file=sys.stderr)
    """

    done = subprocess.run(
        [*read_only, sys.executable, "-c", textwrap.dedent(program), json.dumps(commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )

    codes = re.findall(r"^=== .* (\d+)$", done.stdout, re.MULTILINE)
    assert codes == ["3"] * len(commands), done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("Read-only file system") >= len(commands)


@pytest.mark.parametrize("status", ["PASS", "WARN"])
def test_a_good_status_over_failing_findings_is_not_accepted(
    status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, accepted = tmp_path / "verdict.json", tmp_path / "accepted.json"
    body = Verdict("preflight", "FAIL", "no GPU", [Finding("gpus", "fail", "node", "n1")])
    write_json(path, {**body.to_json(), "status": status})

    assert main(["accept", str(path), "--out", str(accepted)]) == 2

    assert not accepted.exists()
    assert f"its status is {status}, but its findings make it FAIL" in capsys.readouterr().err


def test_a_pass_over_a_check_that_could_not_run_is_not_accepted_and_a_warning_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "verdict.json"
    body = Verdict("hang collect", "WARN", "one missed", [Finding("collect", "error")])
    body.write(path)
    assert main(["accept", str(path)]) == 0
    replace(body, status="PASS").write(path)
    assert main(["accept", str(path)]) == 2


@pytest.mark.parametrize("name", ["verdict.json", "outcome.json"])
def test_seconds_given_as_text_are_named_and_not_counted_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    Verdict("preflight", "PASS", "all well").write(tmp_path / "verdict.json")
    Outcome("sft", 1, "completed", "30 steps").write(tmp_path / "outcome.json")
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "seconds": "12"})

    assert main(["accept", str(path)]) == 2

    assert "seconds: Input should be a valid number, got '12'" in capsys.readouterr().err


def test_damaged_metrics_rows_cost_a_stage_neither_its_outcome_nor_its_next_start(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path).stage("sft")
    write_text(paths.metrics, "[" * 100_000 + '\n{"step": "x", "seconds": "12", "loss": 0.5}\n')

    assert stage_metrics(paths) == (0, {})
    assert [found.measured for found in damage_findings(paths)] == ["2 lines are not rows, first 1"]
    assert MetricsLog(paths.metrics).keep_until(3) == 2


@pytest.mark.parametrize("pid", [-1, 0])
@pytest.mark.parametrize("action", ["status", "stop"])
def test_a_lease_of_an_impossible_process_is_refused_and_nobody_is_signalled(
    action: str, pid: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ServerState("running", node_name(), os.getpid()).write(tmp_path / "state.json")
    holder = asdict(Holder.here("the daemon"))
    write_json(tmp_path / "daemon" / ".lease" / "1", {**holder, "pid": pid})

    assert main(["serve", action, str(tmp_path)]) == 2

    assert f"no process has the id {pid}" in capsys.readouterr().err


def test_a_tilde_is_the_home_folder_in_options_and_in_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    Verdict("preflight", "PASS", "all well").write(home / "verdict.json")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    own = "results: ~/results\nmodel: {source: ~/m}\ndata: {train: gsm8k=~/t, heldout: ~/h}\n"
    write_text(home / "own.yaml", own)

    assert main(["accept", "~/verdict.json", "--out=~/accepted.json"]) == 0
    config = load_config(ROOT / "config" / "config.yaml", home / "own.yaml")

    assert (home / "accepted.json").exists()
    assert config.results == f"{home}/results"
    assert config.model.source == f"{home}/m"
    assert (config.data.train, config.data.heldout) == (f"gsm8k={home}/t", f"{home}/h")
    assert list(work.iterdir()) == []
    with pytest.raises(SystemExit):
        main(["accept", "~nobody-of-that-name/verdict.json"])
    assert "no home folder is known for '~nobody-of-that-name'" in capsys.readouterr().err
    write_text(home / "own.yaml", "results: ~nobody-of-that-name/results\n")
    with pytest.raises(ConfigError, match=r"results: .*no home folder is known"):
        load_config(ROOT / "config" / "config.yaml", home / "own.yaml")


@pytest.mark.parametrize("name", ["evidence.tgz", "evidence.tar.gz"])
def test_a_packed_archive_is_listed_with_what_to_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / name, "w:gz") as archive:
        archive.add(CASE, "case")

    assert main(["hang", "analyze", str(tmp_path / name)]) == 2

    assert "a tar archive, packed by gz: unpack it first" in capsys.readouterr().err


def test_a_dump_packed_by_gz_is_read_under_any_name(tmp_path: Path) -> None:
    for dump in CASE.iterdir():
        if dump.is_file():
            (tmp_path / f"{dump.name}.gz").write_bytes(gzip.compress(dump.read_bytes()))

    assert main(["hang", "analyze", str(tmp_path)]) == 1
