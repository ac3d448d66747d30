"""`shakedown assets`: the demo's files, and clear errors for a user's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.cli import main
from shakedown.training.demo import addition_rows, write_model, write_rows


def _config(folder: Path, **changes: Any) -> Path:
    body: dict[str, Any] = {
        "run": "test",
        "model": {"source": "demo"},
        "data": {"train": "demo", "heldout": "demo", "train_size": 50, "heldout_size": 10},
        "agents": {"target": "a.py:A"},
        "stages": {
            "sft": {
                "algorithm": "sft",
                "allocation": "fsdp:d1",
                "steps": 1,
                "batch_size": 1,
                "optimizer": {"lr": 0.001},
            }
        },
    }
    for key, value in changes.items():
        section, name = key.split("__")
        body[section][name] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


def _run(folder: Path, **changes: Any) -> int:
    config = _config(folder, **changes)
    return main(["assets", "--config", str(config), "--out", str(folder / "assets")])


def _verdict(folder: Path) -> Any:
    return json.loads((folder / "assets" / "verdict.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    write_model(folder, seed=0)
    return folder


def test_the_demo_is_written_and_named_in_assets_json(tmp_path: Path) -> None:
    assert _run(tmp_path) == 0

    assets = json.loads((tmp_path / "assets" / "assets.json").read_text(encoding="utf-8"))
    assert (Path(assets["model"]) / "model.safetensors").is_file()
    assert len(Path(assets["train"]).read_text(encoding="utf-8").splitlines()) == 50
    assert len(Path(assets["heldout"]).read_text(encoding="utf-8").splitlines()) == 10
    assert _verdict(tmp_path)["status"] == "PASS"


def test_a_second_run_writes_the_same_bytes(tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        kept = {"verdict.json", ".lease"}  # they tell of each run
        files = (path for path in (tmp_path / "assets").rglob("*") if path.is_file())
        return {p.name: p.read_bytes() for p in files if not kept & {p.name, p.parent.name}}

    assert _run(tmp_path) == 0
    first = contents()
    assert _run(tmp_path) == 0

    assert contents() == first


def test_own_model_and_data_are_checked_and_named(tmp_path: Path, model: Path) -> None:
    train, heldout = addition_rows(train_size=20, heldout_size=5, seed=0)
    write_rows(tmp_path / "a.jsonl", train)
    write_rows(tmp_path / "b.jsonl", heldout)

    code = _run(
        tmp_path,
        model__source=str(model),
        data__train=str(tmp_path / "a.jsonl"),
        data__heldout=str(tmp_path / "b.jsonl"),
    )

    assets = json.loads((tmp_path / "assets" / "assets.json").read_text(encoding="utf-8"))
    assert code == 0
    assert assets["model"] == str(model)
    assert assets["train"] == str(tmp_path / "a.jsonl")


def test_heldout_rows_that_are_trained_on_are_a_warning(tmp_path: Path, model: Path) -> None:
    rows, _ = addition_rows(train_size=20, heldout_size=5, seed=0)
    write_rows(tmp_path / "a.jsonl", rows)
    write_rows(tmp_path / "b.jsonl", rows[:3])

    code = _run(
        tmp_path,
        model__source=str(model),
        data__train=str(tmp_path / "a.jsonl"),
        data__heldout=str(tmp_path / "b.jsonl"),
    )

    finding = next(f for f in _verdict(tmp_path)["findings"] if f["check"] == "disjoint")
    assert code == 0
    assert (finding["status"], finding["measured"]) == ("warn", 3)


def test_a_bad_row_is_named_with_its_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = addition_rows(train_size=2, heldout_size=1, seed=0)
    write_rows(tmp_path / "a.jsonl", [*rows, {"messages": rows[0]["messages"]}])

    code = _run(tmp_path, model__source=str(model), data__train=str(tmp_path / "a.jsonl"))

    assert code == 2
    assert "a.jsonl, line 3: no `answer`" in capsys.readouterr().err
    assert not (tmp_path / "assets" / "assets.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__source": "./nothing"}, "does not exist"),
        ({"data__train": "nothing.jsonl"}, "nothing.jsonl: No such file"),
        ({"data__train_size": 9999}, "10000 problems"),
    ],
)
def test_what_is_missing_is_said_with_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    assert _run(tmp_path, **changes) == 2

    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()

    assert _run(tmp_path, model__source=str(tmp_path / "empty")) == 2

    assert "config.json is missing" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "assets").write_text("a file stands in the way", encoding="utf-8")

    assert _run(tmp_path) == 3

    assert "cannot write" in capsys.readouterr().err


DATASETS = Path(__file__).parents[2] / "data" / "datasets"


def test_raw_rows_of_a_known_data_set_are_read_with_a_format(tmp_path: Path, model: Path) -> None:
    place = DATASETS / "gsm8k.jsonl"

    code = _run(
        tmp_path,
        model__source=str(model),
        data__train=str(place),
        data__format="gsm8k",
        data__reward="gsm8k",
    )

    assets = json.loads((tmp_path / "assets" / "assets.json").read_text(encoding="utf-8"))
    assert code == 0
    assert assets["train"] == f"gsm8k={place}"
    assert _verdict(tmp_path)["metrics"]["train_rows"] == 3


def test_problems_with_images_are_a_warning(tmp_path: Path, model: Path) -> None:
    place = f"clevr_count={DATASETS / 'clevr_count.jsonl'}"

    code = _run(tmp_path, model__source=str(model), data__train=place)

    finding = next(f for f in _verdict(tmp_path)["findings"] if f["check"] == "images")
    assert code == 0
    assert (finding["status"], finding["subject"]) == ("warn", place)
