"""Hostile evidence costs `hang analyze` bounded time and memory, and leads it nowhere else."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths, diagnose_stage
from shakedown.diagnosis.read import budget, read_paths
from shakedown.diagnosis.read.fence import Fence
from shakedown.diagnosis.read.source import read_source
from tests.hang_inputs import CASE, EVIL
from tests.security.hostile_archives import bombs
from tests.security.hostile_pickles import colliding_tuples, crafted_pickles
from tests.security.hostile_texts import texts

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SECRET = "ValueError: the-secret-of-another-user"


@pytest.mark.parametrize(("kind", "count"), [("pickles", 81), ("bombs", 30), ("texts", 70)])
def test_hostile_inputs_get_an_answer_within_a_minute_and_a_gigabyte(kind: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.examine", kind],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *rows, last = map(json.loads, done.stdout.splitlines())
    assert len(rows) == count
    for row in rows:
        assert row["code"] in (0, 1, 2, 3), row
        assert row["said"].strip(), row
        assert "internal error" not in row["said"], row
        assert "Traceback" not in row["said"] or kind == "texts", row
        assert row["seconds"] < 60, row
        assert not row["controls"], row
        assert not [t for t in row["tags"] if "zz" in t or t == "script" or t[:2] == "on"], row
    assert last["peak"] < 10**9


def test_corpora_hold_as_many_inputs_as_they_say() -> None:
    assert (len(crafted_pickles("")), len(bombs()), len(texts())) == (81, 30, 70)
    assert len({hash(pair) for pair in colliding_tuples(100)}) == 1


# --- the budget over all inputs


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("BYTES", 6000, "for all inputs are used up"),
        ("READING", 0, "the 0 s of CPU time for reading all inputs are used up"),
    ],
)
def test_verdict_says_what_the_budget_left_out(
    limit: str, value: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-first.log").write_text("step 1\n")
    monkeypatch.setattr(budget, limit, value)
    evidence = read_paths([tmp_path, CASE])
    assert [s for s in evidence.skipped if reason in s.reason]
    assert reason in evidence.notes[0]
    if evidence.records:
        verdict = diagnose_paths([tmp_path, CASE])
        assert verdict.summary.endswith(evidence.notes[0])
        assert evidence.notes[0] in [f.measured for f in verdict.findings if f.check == "note"]


def test_memory_that_is_used_up_leaves_the_other_inputs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"rank{number}.log").write_text(f"step {number} \n" * 200_000)
    spaces = iter([0, 10**12])
    monkeypatch.setattr(budget, "_address_space", lambda: next(spaces))
    evidence = read_paths([tmp_path])
    assert list(evidence.formats) == [f"{tmp_path.name}/rank0.log"]
    assert "MB of memory for all inputs are used up" in evidence.notes[0]
    assert evidence.notes[0].startswith("2 of 3 inputs were not read")


def test_one_slow_file_leaves_the_others_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.log").write_bytes(b"Thread (idle):\n" + b"x y\n" * 2_000_000)
    shutil.copytree(CASE, tmp_path / "b")
    monkeypatch.setattr(budget, "ONE_FILE", 0.3)
    verdict = diagnose_paths([tmp_path])
    (note,) = [f.measured for f in verdict.findings if f.check == "note"]
    assert note.endswith("takes more than 0.3 s of CPU time")
    assert verdict.extra["diagnosis"]["culprits"]["ranks"] == [0, 1]


def test_ranks_whose_files_were_left_out_are_not_named_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 3, "record_id": 2}
        config = {"0": {"desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
        body = {"version": "2.9", "entries": [entry], "pg_config": config, "rank": rank}
        (tmp_path / f"_dump_{rank}").write_text(json.dumps(body))
    size = (tmp_path / "_dump_0").stat().st_size
    (tmp_path / "_dump_3").unlink()
    alone = diagnose_paths([tmp_path]).extra["diagnosis"]["culprits"]["ranks"]
    (tmp_path / "_dump_3").write_text("{}" + " " * size)
    monkeypatch.setattr(budget, "BYTES", 3 * size)
    cut = diagnose_paths([tmp_path]).extra["diagnosis"]["culprits"]["ranks"]
    assert (alone, cut) == ([3], [])


def test_more_entries_than_are_listed_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        (tmp_path / f"folder{number}").mkdir()
    (tmp_path / "a.log").write_text("Broken pipe\n")
    monkeypatch.setattr("shakedown.diagnosis.read.source.MAX_ENTRIES", 20)
    (skipped,) = read_paths([tmp_path]).skipped
    assert skipped.reason == "not all of it was listed: more than 20 files and folders"


# --- Ctrl-C

PHASES = {
    # one call of the JSON parser, and one text of a million lines
    "json": lambda: b'[{"frames":[' + b"{}," * 9_000_000 + b"{}]}]",
    "lines": lambda: b"Thread (idle):\n" + b"x y\n" * 2_500_000,
    # as many ranks as one file can name: the time goes into judging them
    "judging": lambda: b"".join(
        b'Process %d: python\nThread %d (idle): "MainThread"\n    f (a.py:%d)\n' % (n, n, n % 9)
        for n in range(1, 60_000)
    ),
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_is_obeyed_within_a_second_whatever_is_being_done(
    phase: str, tmp_path: Path
) -> None:
    (tmp_path / "trainer.log").write_bytes(PHASES[phase]())
    took = []
    for used in (0.2, 0.6, 1.2):  # CPU seconds of the child before Ctrl-C comes
        took.append(_interrupted(tmp_path, used))
        if took[-1] < 1:
            break
    # On a machine where all cores are taken one process may wait for a second.
    assert min(took) < 1, took


def _interrupted(folder: Path, used: float) -> float:
    """Seconds between SIGINT to the command's own process and its end."""
    command = [sys.executable, "-m", "shakedown.cli", "hang", "analyze", str(folder)]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True)
    child = 0
    while not child or _cpu(child) < used:
        time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be interrupted"
        child = child or _child(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    seconds = time.monotonic() - began
    assert (process.returncode, said) == (130, "shakedown: interrupted\n")
    # It was killed; on a busy machine init takes its time to collect what is left of it.
    end = time.monotonic() + 10
    while (collected := Path(f"/proc/{child}")).exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not collected.exists()
    return seconds


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split(" ")[0] or 0)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- links


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can write, below folders that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="shakedown-shared-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def secret() -> Iterator[Path]:
    """A log that its owner alone can read, outside of all evidence."""
    folder = Path(tempfile.mkdtemp(prefix="shakedown-private-"))
    folder.chmod(0o755)
    path = folder / "trainer-rank0.log"
    head = 'Traceback (most recent call last):\n  File "/srv/a.py", line 1, in f\n'
    path.write_text(f"{head}{SECRET}\n")
    path.chmod(0o600)
    yield path
    shutil.rmtree(folder)


def _as_neighbour(*command: str) -> None:
    """Run a command as another user."""
    if os.getuid() != 0:
        pytest.skip("acting as another user needs root")
    setpriv = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    subprocess.run([*setpriv, *command], check=True)


def _answer(*paths: Path) -> tuple[str, dict[str, str]]:
    """All that the command prints, and what it skipped."""
    command = [sys.executable, "-m", "shakedown.cli", "hang", "analyze", "--json", "-"]
    done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, check=False)
    body: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    rows = [f for f in body.get("findings", ()) if f["check"] == "read"]
    return done.stdout + done.stderr, {Path(r["subject"]).name: r["measured"] for r in rows}


def test_link_that_a_neighbour_leaves_in_the_evidence_is_listed_and_not_followed(
    shared: Path, secret: Path
) -> None:
    (shared / "job.log").write_text("Broken pipe\n")
    _as_neighbour("ln", "-s", str(secret), str(shared / "rank3.log"))
    _as_neighbour("ln", "-s", str(secret.parent), str(shared / "folder"))
    said, skipped = _answer(shared)
    assert SECRET not in said
    assert set(skipped) == {"rank3.log", "folder"}
    assert all("outside of what was given: not followed" in r for r in skipped.values())


def test_link_that_is_itself_given_or_stays_within_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rank0.log").write_text("Broken pipe\n")
    (tmp_path / "a" / "z.log").symlink_to("rank0.log")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c.log").symlink_to("a/rank0.log")
    assert list(read_paths([tmp_path / "a"]).formats) == ["a/rank0.log"]
    assert list(read_paths([tmp_path / "b"]).formats) == ["b/rank0.log"]
    assert list(read_paths([tmp_path / "c.log"]).formats) == [str(tmp_path / "c.log")]
    other = tmp_path / "d"
    other.mkdir()
    (other / "rank0.log").symlink_to(tmp_path / "a" / "rank0.log")
    assert not read_paths([other]).formats
    assert list(read_paths([other, tmp_path / "a"]).formats) == ["d/rank0.log"]


@pytest.mark.parametrize("name", ["logs", "evidence/logs", "evidence/stacks.log"])
def test_attempt_whose_folders_became_links_is_not_left(
    name: str, tmp_path: Path, secret: Path
) -> None:
    attempt = tmp_path / "stage" / "attempts" / "001"
    for folder in ("heartbeat", "evidence"):
        (attempt / folder).mkdir(parents=True)
    (attempt / "evidence" / "job.log").write_text("Broken pipe\n")
    is_file = name.endswith(".log")
    (attempt / name).symlink_to(secret if is_file else secret.parent)
    for verdict in (diagnose_paths([attempt]), diagnose_stage(attempt, None)):
        body = json.dumps(verdict.to_json())
        assert SECRET not in body
        assert "outside of what was given: not followed" in body


def test_file_that_becomes_a_link_after_it_was_listed_is_not_read(
    tmp_path: Path, secret: Path
) -> None:
    (tmp_path / "logs").mkdir()
    fence = Fence([tmp_path / "logs"])
    (tmp_path / "logs" / "rank0.log").symlink_to(secret)
    (tmp_path / "logs" / "inner").symlink_to(secret.parent)
    for name in ("rank0.log", f"inner/{secret.name}"):
        with pytest.raises(ValueError, match="outside of what was given"):
            read_source(tmp_path / "logs" / name, name, fence)


def test_hard_link_to_a_private_file_in_a_folder_of_all_is_not_read(
    shared: Path, secret: Path
) -> None:
    # By root, as most kernels (fs.protected_hardlinks) refuse it to others.
    os.link(secret, shared / "rank0.log")
    (shared / "job.log").write_text("Broken pipe\n")
    said, skipped = _answer(shared)
    assert SECRET not in said
    assert skipped["rank0.log"].startswith("a hard link in a folder that others can write")
    secret.chmod(0o644)
    assert SECRET in _answer(shared)[0]


@pytest.mark.parametrize("name", ["link.tar", "hardlink.tar", "up.tar", "up.zip", "link.tar.gz"])
def test_members_of_an_archive_are_not_unpacked(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bombs()[name]())
    (skipped,) = read_paths([tmp_path]).skipped
    assert "unpack it first" in skipped.reason or skipped.reason == "unknown format"
    assert sorted(tmp_path.iterdir()) == [tmp_path / name]


def test_reason_that_names_a_hostile_path_is_fit_for_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to(f"/{EVIL.replace('/', '')}")
    (skipped,) = read_paths([tmp_path]).skipped
    assert "not followed" in skipped.reason
    assert "\x1b" not in skipped.reason


def test_of_thousands_of_named_ranks_the_first_get_a_finding_and_all_are_culprits(
    tmp_path: Path,
) -> None:
    text = "#0-0 (aa) INCOMPLETE\nThe missing ranks: 1-5000\n"
    (tmp_path / "trainer-rank0.log").write_text(text, encoding="utf-8")

    verdict = diagnose_paths([tmp_path])

    assert len(verdict.extra["diagnosis"]["culprits"]["ranks"]) == 5000
    assert sum(f.check == "missing_rank" for f in verdict.findings) == 1000
    assert "4000 more ranks" in verdict.findings[1000].measured
