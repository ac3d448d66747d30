"""The demo's model and a few rows of its task, as `shakedown assets` writes them."""

import json
from pathlib import Path

from shakedown.training.assets import SCHEMA
from shakedown.training.demo import addition_rows, write_model, write_rows


def write_assets(folder: Path, *, train_size: int = 40, heldout_size: int = 4) -> Path:
    """`model`, `train.jsonl`, `heldout.jsonl` and `assets.json` in a folder that is there."""
    write_model(folder / "model", seed=0)
    train, heldout = addition_rows(train_size=train_size, heldout_size=heldout_size, seed=0)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "heldout.jsonl", heldout)
    places = {name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
    body = {"schema": SCHEMA, "model": str(folder / "model"), **places}
    (folder / "assets.json").write_text(json.dumps(body), encoding="utf-8")
    return folder
