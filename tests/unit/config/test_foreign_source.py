"""Names of keys of AReaL and prime-rl are those of the version that the user has, read from it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.config.foreign import judge_foreign, source
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding

SOURCE = Path(__file__).parents[2] / "data" / "foreign_source"
AREAL = """
actor: {backend: "fsdp:d1", kl_ctl: 0}
rollout: {}
train_dataset: {batch_size: 1}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _told(path: Path, text: str, given: Path | None = SOURCE) -> list[Finding]:
    path.write_text(text)
    verdict = judge_foreign([path], given)
    assert verdict is not None
    return [
        f for f in verdict.findings if f.check in ("unknown_key", "choice", "reference", "source")
    ]


# A config of AReaL or prime-rl -> what is told of its names, and in which words.
NAMES = {
    "actor: {dtype: float32, loss_type: ipo, place: colocation, extra: {any: 1}}": (),
    "actor: {place: shared}\nrollout: {engines: [{path: x}, {pth: y}]}": (
        "fail unknown_key rollout.engines.1.pth: did you mean 'path'?",
    ),
    "actor: {loss_type: sigmod}": ("fail choice actor.loss_type: did you mean 'sigmoid'?",),
    "actor: {weight_update_mode: disc}": (
        "fail choice actor.weight_update_mode: did you mean 'disk'?",
    ),
    "actor: {place: xyz}": ("fail choice actor.place: ",),
    "rollout: {max_head_offpolicynes: 2}": (
        "fail unknown_key rollout.max_head_offpolicynes: did you mean 'max_head_offpolicyness'?",
    ),
    "actor: {behav_imp_weight_cap: 2}": (
        "fail unknown_key actor.behav_imp_weight_cap: "
        "removed: write rejection_sampling: {metric: ratio, upper: X}",
    ),
    "actor: {path: a}\ntokenizer_pth: x\nmine: {own: 1}": (
        "warn unknown_key tokenizer_pth: did you mean 'tokenizer_path'?",
    ),
    "actor: {path: '${actor.dtype}'}\ntokenizer_path: ${actor.pth}": (
        "fail reference tokenizer_path: did you mean 'actor.path'?",
    ),
    "[orchestrator]\nbatch_size = 4\ngroup = 4\nbatches = 4\nenv = {any = 1}": (),
    "[orchestrator.sampling]\ntemperature = 0.5\nlevel = 'debug'": (),
    "[orchestrator.sampling]\ntemprature = 0.5": (
        "fail unknown_key orchestrator.sampling.temprature: did you mean 'temperature'?",
    ),
    "[orchestrator]\nregistry = 1": ("fail unknown_key orchestrator.registry: ",),
    "[orchestrator]\nrollouts_per_example = 8": (
        "fail unknown_key orchestrator.rollouts_per_example: renamed to group_size",
    ),
    "[orchestrator]\nlevel = 'inf'": ("fail choice orchestrator.level: did you mean 'info'?",),
    "[orchestrator]\nlevel = 'None'": (),
    "[orchestrator]\n[weight_broadcast]\ntype = 'nccl'\nport = 1\n[ckpt]\ninterval = 1": (),
    "[orchestrator]\n[weight_broadcast]\ntype = 'nixl'": ("fail choice weight_broadcast.type: ",),
    "[orchestrator]\n[[stages]]\nlevel = 'info'\n[[stages]]\nlvl = 1": (
        "fail unknown_key stages.1.lvl: did you mean 'level'?",
    ),
    "[orchestrator]\n[ckpt]\n[free]\nany = 1\n[tags]\nmine = 'x'": (),
    "[orchestrator]\n[lenient]\nknow = 1": (
        "warn unknown_key lenient.know: did you mean 'known'?",
    ),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_that_the_version_does_not_know_is_a_fault_and_its_version_is_named(
    tmp_path: Path, text: str
) -> None:
    suffix = ".toml" if text.startswith("[") else ".yaml"

    found = _told(tmp_path / f"config{suffix}", text)

    assert [f"{f.status} {f.check} {f.subject}: {f.remedy}" for f in found] == [*NAMES[text]]
    project = "prime-rl" if suffix == ".toml" else "AReaL"
    assert all(f"{project} 9.8.7" in f.expected for f in found if f.check != "reference")


def test_a_default_is_the_one_of_the_version(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("[orchestrator]\nbatch_size = 6\n")  # its group_size is 4, not the newest's 1

    verdict = judge_foreign([path], SOURCE)

    assert verdict
    assert [f.subject for f in verdict.findings] == ["orchestrator.batch_size"]


def test_without_a_source_names_are_not_judged_and_the_verdict_says_how_to_give_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_installed", lambda _layout: iter(()))

    (finding,) = _told(tmp_path / "rl.toml", "[orchestrator]\nbatch_sise = 4\n", None)

    assert (finding.status, finding.measured) == ("warn", "no installed prime-rl was found")
    assert "--source PATH" in finding.remedy


@pytest.mark.parametrize("packed", [False, True])
def test_a_config_in_a_checkout_is_compared_with_that_checkout(
    tmp_path: Path, packed: bool
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(SOURCE, checkout)
    (checkout / ".git" / "refs" / "heads").mkdir(parents=True)
    (checkout / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    name = "packed-refs" if packed else "refs/heads/main"
    (checkout / ".git" / name).write_text(f"{COMMIT} refs/heads/main\n" if packed else COMMIT)
    (checkout / "examples").mkdir()

    (finding,) = _told(checkout / "examples" / "a.yaml", "actor: {pth: x}", None)

    assert finding.expected == f"a key of AReaL 9.8.7 (commit {COMMIT[:9]})"


@pytest.mark.parametrize("editable", [False, True])
def test_the_package_of_the_users_own_python_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool
) -> None:
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    info = site / "prime_rl-1.2.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prime-rl\nVersion: 1.2.3\n")
    if editable:
        url = {"url": SOURCE.resolve().as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(url))
    else:
        shutil.copytree(SOURCE / "src" / "prime_rl", site / "prime_rl")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))

    (finding,) = _told(tmp_path / "rl.toml", "[orchestrator]\nbatch_sise = 4\n", None)

    assert finding.expected.startswith("a key of prime-rl 1.2.3")


DEEP = "x: " + "list[" * 3000 + "int" + "]" * 3000


@pytest.mark.parametrize(
    "text",
    [
        "class PPOConfig(:\n",
        "\0",
        "(" * 100_000,
        "-" * 200_000 + "1",
        "x = 1" + "+1" * 100_000,
        f"@dataclass\nclass PPOConfig:\n    {DEEP}\n",
        "A = B\nB = A\nclass PPOConfig:\n    a: A\n",
        "A = list[A]\nclass PPOConfig:\n    a: A\n",
        "".join(f"class C{n}:\n    a: C{n + 1}\n" for n in range(3000))
        + "class PPOConfig:\n    a: C0\n",
        "class A(B): pass\nclass B(A): pass\nclass PPOConfig(A):\n    a: int = 1\n",
        "from .cli_args import PPOConfig\n",
        "class PPOConfig:\n    a: int = 1\n" + "#" * 2_000_000,
    ],
    ids=lambda text: f"{text[:20]}.{len(text)}",
)
@pytest.mark.timeout(60)
def test_a_source_that_nobody_can_read_ends_with_a_sentence_and_in_time(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "areal" / "api").mkdir(parents=True)
    (tmp_path / "areal" / "api" / "cli_args.py").write_text(text)
    (tmp_path / "a.yaml").write_text(AREAL)

    code = main(["lint", str(tmp_path / "a.yaml")])
    given = main(["lint", str(tmp_path / "a.yaml"), "--source", str(tmp_path)])

    # Some odd classes can be read, and then have not the file's keys or take any.
    assert {code, given} <= {0, 2}
    said = capsys.readouterr()
    assert "lint: " in said.out
    assert "Traceback" not in said.out + said.err


def test_a_link_out_of_the_tree_and_a_pipe_are_no_source(tmp_path: Path) -> None:
    (tmp_path / "tree" / "areal" / "api").mkdir(parents=True)
    place = tmp_path / "tree" / "areal" / "api" / "cli_args.py"
    place.symlink_to(SOURCE.resolve() / "areal" / "api" / "cli_args.py")
    path = tmp_path / "a.yaml"
    path.write_text(AREAL)

    with pytest.raises(UsageError, match="cannot be read as AReaL's source"):
        judge_foreign([path], tmp_path / "tree")
    place.unlink()
    place.write_text("from .here import PPOConfig\n")
    (place.parent / "here.py").symlink_to("here.py")
    with pytest.raises(UsageError, match="cannot be read as AReaL's source"):
        judge_foreign([path], tmp_path / "tree")
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(UsageError, match="no AReaL there"):
        judge_foreign([path], tmp_path / "tree")


def test_a_source_of_another_project_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AREAL)

    codes = [
        main(["lint", str(path), "--source", str(tmp_path)]),
        main(["lint", "config/examples/hang.yaml", "--source", str(SOURCE)]),
    ]

    assert codes == [2, 2]
    said = capsys.readouterr()
    assert "no AReaL there" in said.err + said.out
    assert "--source is for configs of AReaL and prime-rl" in said.err + said.out
