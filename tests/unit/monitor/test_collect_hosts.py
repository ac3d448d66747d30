"""Hosts without Slurm: the collector by ssh, over real sshd daemons on loopback."""

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.cluster.nodes import free_port
from shakedown.core.errors import UsageError
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.monitor.collect import archive, from_pattern, hosts
from shakedown.monitor.collect.writer import Writer
from tests.containers import command, unshares
from tests.ssh_hosts import SSHD, Hosts, private_hosts

needs_sshd = pytest.mark.skipif(SSHD is None, reason="needs sshd (openssh-server)")

RANK = """
import time
def waits_here():
    print("ready", flush=True)
    time.sleep(600)
waits_here()
"""
ODD = "it's $(touch {place}) `touch {place}` \"; touch {place} #\n-x"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """`localhost` and `127.0.0.1` are one daemon's; nobody listens for `gone`."""
    with private_hosts(tmp_path_factory.mktemp("ssh")) as made:
        made.start("localhost", "127.0.0.1")
        made.add("gone", port=free_port())
        yield made


@pytest.fixture
def ssh(known: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("PATH", f"{known.bin}:{os.environ['PATH']}")
    return known


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """In the command line of a rank; it holds what a shell would run or take apart."""
    text = ODD.format(place=tmp_path_factory.mktemp("odd") / "ran") + str(os.getpid())
    rank = start([sys.executable, "-c", RANK, text], RANK="3")
    yield text
    end(rank)


def start(command: list[str], **environment: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def collect(names: str, out: Path, *options: str) -> int:
    arguments = [f"--hosts={names}", "--out", str(out), "--rounds", "1", *options]
    return main(["hang", "collect", *arguments])


def said(out: Path) -> dict[str, str]:
    nodes: dict[str, str] = json.loads((out / "collected-hosts.json").read_text())["nodes"]
    return nodes


@needs_sshd
def test_evidence_of_every_host_comes_back_and_one_that_is_not_reached_is_missed(
    ssh: Hosts, mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "localhost,gone,127.0.0.1"
    assert collect(names, tmp_path, f"--match={re.escape(mark)}") == 0
    printed = capsys.readouterr().out
    assert "3 host(s): 2 of 2 processes read on 2 of 3 nodes" in printed
    assert said(tmp_path)["localhost"] == said(tmp_path)["127.0.0.1"] == "read"
    assert re.fullmatch(r"not read: ssh: .*Connection refused", said(tmp_path)["gone"])
    for name in ("localhost", "127.0.0.1"):
        assert (tmp_path / name / "round1/pyspy-trainer-rank3.json").is_file()
    assert not (tmp_path / "gone").exists()
    (ran,) = re.findall(r"touch (\S+/ran)\)", mark)
    assert not Path(ran).exists()


@needs_sshd
def test_host_that_is_not_reached_is_never_called_dead(
    ssh: Hosts, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    words = "ssh: connect to host n7 port 22: No route to host"
    program.write_text(f'#!/bin/sh\ncase "$*" in *" n7 "*) echo "{words}" >&2; exit 255;; esac\n'
                       f'exec {ssh.bin}/ssh "$@"\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    out = tmp_path / "out"
    assert collect("localhost,n7", out, f"--match={re.escape(mark)}") == 0
    assert said(out)["n7"] == f"not read: {words}"
    evidence = read_paths([out])
    assert not build_facts(evidence.records).nodes
    assert diagnose_paths([out]).extra["diagnosis"]["culprits"]["nodes"] == []


@needs_sshd
def test_nothing_of_the_users_own_ssh_settings_reaches_the_host(
    known: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{known.bin}:{os.environ['PATH']}")
    seen = tmp_path / "seen"
    known.start("prying", settings=f'ForceCommand env > {seen}; eval "$SSH_ORIGINAL_COMMAND"\n')
    agent = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    (place,), (pid,) = re.findall(r"SOCK=([^;]+)", agent), re.findall(r"PID=(\d+)", agent)
    monkeypatch.setenv("SSH_AUTH_SOCK", place)
    try:
        collect("prying", tmp_path / "out", "--match=nobody is called so")
    finally:
        os.kill(int(pid), 15)
    assert said(tmp_path / "out") == {"prying": "read"}
    assert "SSH_CONNECTION=" in seen.read_text()
    assert "SSH_AUTH_SOCK" not in seen.read_text()
    assert not (known.folder / "local").exists()


@needs_sshd
def test_what_a_login_prints_is_no_part_of_the_evidence(ssh: Hosts, tmp_path: Path) -> None:
    noise = "echo Welcome; echo; printf 'and no end'"
    ssh.start("chatty", settings=f'ForceCommand {noise}; eval "$SSH_ORIGINAL_COMMAND"\n')
    assert collect("chatty", tmp_path, "--match=nobody is called so") == 0
    assert said(tmp_path) == {"chatty": "read"}


@needs_sshd
def test_host_of_an_unknown_key_is_not_believed(ssh: Hosts, tmp_path: Path) -> None:
    ssh.start("stranger")
    ssh.configure("Host stranger\n  HostKeyAlias nobody-knows-it\n")
    assert collect("stranger", tmp_path, "--match=x") == 0
    assert said(tmp_path) == {"stranger": "not read: Host key verification failed."}


@needs_sshd
def test_host_without_shakedown_says_what_it_lacks(ssh: Hosts, tmp_path: Path) -> None:
    options = ["--match=x", "--remote-python", "/no/such python"]
    assert collect("localhost", tmp_path, *options) == 0
    # As shells put it: `not found`, or `No such file or directory`.
    assert re.search(r"/no/such python: (not found|No such)", said(tmp_path)["localhost"])


@needs_sshd
def test_host_that_never_answers_is_given_up_at_the_limit(
    ssh: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "STEP_SECONDS", 1.0)
    ssh.start("stuck", settings="ForceCommand exec sleep 20\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ssh.add("silent", port=silent.getsockname()[1])
        assert collect("stuck,silent", tmp_path, "--match=x") == 0
    assert said(tmp_path) == dict.fromkeys(("stuck", "silent"), "not read: no answer in 1 s")


@needs_sshd
def test_archive_of_a_hostile_host_stays_in_its_folder(
    ssh: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = tmp_path / "sent.tar"
    with tarfile.open(sent, "w") as tar:
        for name in ("../evil", "/evil", "a/../../evil", "./evil", "deep" + "/x" * 50, "good.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"text"))
        for kind, target in ((tarfile.SYMTYPE, "/etc"), (tarfile.LNKTYPE, "/etc/passwd")):
            member = tarfile.TarInfo(f"link{kind.decode()}")
            member.type, member.linkname = kind, target
            tar.addfile(member)
            inside = tarfile.TarInfo(f"link{kind.decode()}/evil")
            tar.addfile(inside)
        device = tarfile.TarInfo("device")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    follows = "echo shakedown evidence follows"
    ssh.start("hostile", settings=f"ForceCommand {follows}; cat {sent}\n")
    out = tmp_path / "out"
    assert collect("hostile", out, "--match=x") == 0
    assert said(out) == {"hostile": "not read: no table of what was read came back"}
    assert "8 entries of its archive not taken" in capsys.readouterr().out
    assert not list(tmp_path.glob("evil")) + list(Path("/").glob("evil"))
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    below = ["good.txt", "link1/evil", "link2/evil"]
    assert found == ["collected-hosts.json", *(f"hostile/{name}" for name in below)]


def test_collector_that_asks_other_hosts_is_no_process_of_the_job() -> None:
    words = ["shakedown", "hang", "collect", "--match", f"asks-others-{os.getpid()}"]
    asks = start([sys.executable, "-c", RANK, *words])
    try:
        assert from_pattern(words[-1]) == []
    finally:
        end(asks)


def packed(*files: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, body in files:
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "empty file"),
        (b"x" * 99_999, "truncated header|invalid header|file could not be opened"),
        (packed(("a", b"x" * 90_000))[:50_000], "unexpected end of data"),
        (packed(*((f"{n}", b"") for n in range(11))), "more than 10 files"),
        (packed(("a", b"x" * 150_000), ("b", b"x" * 150_000)), "more than 200000 bytes"),
    ],
    ids=["nothing", "no archive", "cut off", "many", "large"],
)
def test_archive_that_is_none_or_beyond_the_limits_is_refused(
    sent: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 200_000)
    monkeypatch.setattr(archive, "MAX_FILES", 10)
    with pytest.raises((OSError, ValueError, tarfile.TarError), match=why):
        archive.unpack(io.BytesIO(sent), Writer(tmp_path))


def test_files_of_any_name_pass_an_archive(tmp_path: Path) -> None:
    given, got = tmp_path / "given", Writer(tmp_path / "got")
    names = [
        "collected-n1.json",
        "round1/a.json",
        "logs/" + os.fsdecode(b"\xff\n.log"),
        "logs/" + "ü" * 100,
    ]
    for name in names:
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_text(name, errors="surrogateescape")
    stream = io.BytesIO()
    archive.pack(given, stream)
    stream.seek(0)
    archive.unpack(stream, got)
    assert sorted(got.files) == sorted(names)
    assert got.files[-1] == "collected-n1.json"
    for name in names:
        assert (got.out / name).read_bytes() == (given / name).read_bytes()


def test_evidence_on_standard_output_is_what_tar_takes(tmp_path: Path) -> None:
    collector = [sys.executable, "-m", "shakedown.cli", "hang", "collect", "--rounds=1"]
    line = f"{shlex.join(collector)} --pid {os.getpid()} --out - | tar x -C {tmp_path}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert list(tmp_path.glob("collected-*.json"))
    assert "hang collect: " in done.stderr


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2.cluster.org,n1,10.0.0.7", ["n1", "n2.cluster.org", "10.0.0.7"]),
        ("n[1-3],m1", ["n1", "n2", "n3", "m1"]),
        ("@", ["a", "b", "c"]),
    ],
)
def test_hosts_are_named_in_a_list_or_a_file(text: str, names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# workers\na slots=8\n\n  b   # the second\nc slots=4 max_slots=4\na\n")
    assert hosts.parse_hosts(f"@{file}" if text == "@" else text) == names


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "n1,", "-oProxyCommand=x", "n1,-v", "n1;id", "n1 n2", "$(id)", "u@n1", "::1",
        "n1\n", "@", "@/nowhere/hosts", "@n1 rm -r /", "@-oProxyCommand=x", "@\xff",
    ],
)  # fmt: skip
def test_host_that_could_be_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    if text.startswith("@") and "/nowhere" not in text:
        (tmp_path / "hosts").write_bytes(text[1:].encode("latin-1"))
        text = f"@{tmp_path}/hosts"
    with pytest.raises(UsageError, match="--hosts "):
        hosts.parse_hosts(text)
    assert collect(text, tmp_path / "out", "--match=x") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0 or not unshares(), reason="sshd in a namespace takes root")
@needs_sshd
def test_ranks_on_two_hosts_are_told_apart_where_their_process_ids_are_equal(
    ssh: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, ranks = f"two-hosts-{os.getpid()}", []
    for number in (0, 1):
        name = f"box{number}"
        ssh.start(name, inside=command(name))
        rank = [sys.executable, "-c", RANK, mark]
        line = f"exec env RANK={number} {shlex.join(rank)}"
        own = ["ssh", "-oRemoteCommand=none", name, line]
        ranks.append(start(own))
    try:
        collect("box0,box1", tmp_path, "--match", mark)
    finally:
        for process in ranks:
            end(process)
    assert (
        "hang collect: PASS: 2 host(s): 2 of 2 processes read on 2 of 2" in capsys.readouterr().out
    )
    facts = build_facts(read_paths([tmp_path]).records)
    assert {rank: row.host for rank, row in facts.ranks.items()} == {0: "box0", 1: "box1"}
    assert all(row.path[-1].function == "waits_here" for row in facts.ranks.values())
