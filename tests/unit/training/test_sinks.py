"""Where a stage's numbers go beside metrics.jsonl: event files, refusals, sinks that fail."""

import json
import stat
from pathlib import Path
from typing import Any, get_args

import pytest

from shakedown.config import OptimizerConfig, StageConfig
from shakedown.core.errors import ConfigError
from shakedown.training.metrics.record import MetricsRecord
from shakedown.training.metrics.sinks import SINKS, open_sink, require_sinks
from shakedown.training.metrics.sinks.events import group
from shakedown.training.metrics.sinks.wandb_run import run_id
from shakedown.training.stage.job import StageJob
from tests.event_files import points

WANDB = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL")


def make_job(root: Path, *sinks: Any) -> StageJob:
    config = StageConfig(
        algorithm="sft",
        allocation="fsdp:d1",
        steps=8,
        batch_size=8,
        sinks=list(sinks),
        optimizer=OptimizerConfig(lr=0.001),
    )
    attempt = str(root / "attempts" / "001")
    return StageJob("sft", config, "", "float32", "", "", "", 0, 1, str(root), attempt)


def rows(first: int, last: int, loss: float) -> list[dict[str, float]]:
    return [{"step": s, "loss": loss + s, "wait_seconds": 0.5} for s in range(first, last + 1)]


def test_the_config_knows_the_sinks_of_the_registry() -> None:
    annotation: Any = StageConfig.model_fields["sinks"].annotation

    assert list(get_args(get_args(annotation)[0])) == list(SINKS)


def test_a_resumed_attempt_leaves_neither_gap_nor_double_point(tmp_path: Path) -> None:
    folder = make_job(tmp_path).paths.tensorboard
    killed = open_sink("tensorboard", make_job(tmp_path))
    killed.begin(0)
    for row in rows(1, 6, loss=0.0):
        killed.append(row)
    before = points(folder, "train/loss")
    resumed = open_sink("tensorboard", make_job(tmp_path))
    resumed.begin(4)
    for row in rows(5, 8, loss=0.25):
        resumed.append(row)
    resumed.close()

    assert before == [(s, float(s)) for s in range(1, 7)], "each row is there before the kill"
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.25), (6, 6.25), (7, 7.25), (8, 8.25)]
    assert points(folder, "train/loss") == expected
    assert len(points(folder, "seconds/wait_seconds")) == 8
    killed.close()


def test_a_stage_that_starts_anew_shows_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    for loss in (0.0, 0.5):
        sink = open_sink("tensorboard", make_job(tmp_path))
        sink.begin(0)
        for row in [{"step": 0, "sampled_accuracy": loss}, *rows(1, 2, loss)]:
            sink.append(row)
        sink.close()

    folder = make_job(tmp_path).paths.tensorboard
    assert points(folder, "train/loss") == [(1, 1.5), (2, 2.5)]
    assert points(folder, "train/sampled_accuracy") == [(0, 0.5)]


@pytest.mark.parametrize(
    ("column", "section"),
    [("loss", "train"), ("sync_seconds", "seconds"), ("rollout_batch_seconds", "rollout")],
)
def test_a_column_stands_in_a_section(column: str, section: str) -> None:
    assert group(column) == section


def test_a_sink_that_fails_is_said_once_and_the_rows_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, "tensorboard")
    job.paths.tensorboard.write_text("a file where the folder should be")
    record = MetricsRecord(job)
    record.begin(0, {})
    for row in rows(1, 3, loss=0.0):
        record.append(row)
    record.close()

    printed = capsys.readouterr().out
    assert printed.count("sink tensorboard failed and is left out from here") == 1
    assert len(job.paths.metrics.read_text().splitlines()) == 3
    assert "step 1/8" in printed


def test_without_sinks_nothing_but_the_metrics_and_what_they_are_of_is_written(
    tmp_path: Path,
) -> None:
    record = MetricsRecord(make_job(tmp_path))
    record.begin(0, {})
    record.append(rows(1, 1, loss=0.0)[0])
    record.plot({"step": 0, "sampled_accuracy": 0.5})
    record.close()

    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "provenance.jsonl"}


@pytest.mark.parametrize("name", SINKS)
def test_a_package_that_is_not_installed_is_named_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(ConfigError, match=f"{name} needs the package {name}") as refused:
        require_sinks([name])

    assert f"pip install 'slurm-shakedown[{name}]'" in str(refused.value)


@pytest.fixture
def with_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the package was there, with nothing configured; returns the netrc that is read."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    for name in WANDB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_wandb_without_a_key_is_refused_before_anything_starts(with_wandb: Path) -> None:
    with pytest.raises(ConfigError, match=r"no key for api\.wandb\.ai") as refused:
        require_sinks(["wandb"])

    assert "WANDB_MODE=offline" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_MODE", "offline"), ("WANDB_API_KEY", "x" * 40)]
)
def test_wandb_is_taken_offline_or_with_a_key(
    name: str, value: str, with_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError):
        require_sinks(["wandb"])
    monkeypatch.setenv(name, value)

    require_sinks(["wandb"])


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        ("machine wandb.example login user password secret-of-mine\n", True),
        ("machine other.example login user password secret-of-mine\n", False),
        ("machine wandb.example login\nbroken secret-of-mine", False),
    ],
)
def test_wandb_is_taken_with_a_key_in_netrc_which_no_message_repeats(
    content: str, taken: bool, with_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8443")
    with_wandb.write_text(content)
    with_wandb.chmod(stat.S_IRUSR | stat.S_IWUSR)
    if taken:
        require_sinks(["wandb"])
        return

    with pytest.raises(ConfigError, match=r"no key for wandb\.example") as refused:
        require_sinks(["wandb"])

    assert "secret-of-mine" not in str(refused.value)


@pytest.mark.parametrize("damage", [None, "{", '{"id": "../../etc"}', '{"id": 7}', "[]"])
def test_the_id_of_a_run_is_kept_for_a_resume_and_damage_gives_a_new_one(
    damage: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "wandb.json"
    first = run_id(path, fresh=True)
    if damage is not None:
        path.write_text(damage)

    again = run_id(path, fresh=False)

    assert (again == first) == (damage is None)
    assert json.loads(path.read_text()) == {"id": again}
    assert run_id(path, fresh=True) != again, "a stage that starts anew is another run"
