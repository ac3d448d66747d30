"""`shakedown assets`: write the demo's model and data, or check those that the config names.

Writes OUT/assets.json (`model`, `train`, `heldout`: what later stages are given) and a verdict.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.config import Config, load_config
from shakedown.core.errors import UsageError
from shakedown.core.files import write_json
from shakedown.core.verdict import (
    Finding,
    Stopwatch,
    Verdict,
    finish,
    installed_versions,
    status_of,
)
from shakedown.data_sources import parse_source

if TYPE_CHECKING:
    from shakedown.data_sources import Row

SCHEMA = "shakedown/assets/1"
DEMO = "demo"


@dataclass(frozen=True)
class Assets:
    """Resolved: a model folder, and two sources of rows as `shakedown.data_sources` names them."""

    model: str
    train: str
    heldout: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="YAML files")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--strict", action="store_true", help="exit 1 on warnings")


def run(args: argparse.Namespace) -> int:
    clock = Stopwatch()
    config = load_config(*args.config)
    out: Path = args.out.absolute()
    assets = Assets(_model(config, out), *_data(config, out))
    findings, metrics = _check(assets)
    write_json(out / "assets.json", {"schema": SCHEMA, **vars(assets)})
    verdict = Verdict(
        stage="assets",
        status=status_of(findings),
        summary=f"model and data can be read ({metrics['train_rows']:.0f} train rows, "
        f"{metrics['heldout_rows']:.0f} held out)",
        findings=findings,
        metrics=metrics,
        started=clock.started,
        seconds=clock.seconds,
        versions=installed_versions("torch", "transformers", "datasets"),
    )
    return finish(verdict, out / "verdict.json", strict=args.strict)


def _model(config: Config, out: Path) -> str:
    """The model's folder; the demo's is written, a hub name's is fetched.

    Raises:
        UsageError: there is no such model.
    """
    source = config.model.source
    if source == DEMO:
        from shakedown.training.demo import write_model

        write_model(out / "model", seed=config.seed)
        return str(out / "model")
    folder = Path(source).expanduser()
    if folder.is_dir() or not _is_hub_name(source):
        return str(folder.absolute())
    return _fetched(source)


def _is_hub_name(source: str) -> bool:
    """`owner/name`; anything that starts like a path is one."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


def _fetched(name: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(name, ignore_patterns=["*.pth", "*.gguf", "original/*"])
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"model.source {name!r} is no local folder and could not be fetched: {reason}",
            hint="give the path of a Hugging Face folder, or check name, network and token",
        ) from error
    return folder


def _data(config: Config, out: Path) -> tuple[str, str]:
    """Train and held-out data; the demo's are written."""
    from shakedown.training.demo import addition_rows, write_rows

    given = (config.data.train, config.data.heldout)
    places = [out / "train.jsonl", out / "heldout.jsonl"]
    if DEMO in given:
        rows = addition_rows(
            train_size=config.data.train_size,
            heldout_size=config.data.heldout_size,
            seed=config.seed,
        )
        for source, place, part in zip(given, places, rows, strict=True):
            if source == DEMO:
                write_rows(place, part)
    train, heldout = (
        str(place) if source == DEMO else resolved_source(config, source, heldout=number == 1)
        for number, (source, place) in enumerate(zip(given, places, strict=True))
    )
    return train, heldout


def resolved_source(config: Config, source: str, *, heldout: bool) -> str:
    """A source with its format, split and whole path, readable from any folder.

    Raises:
        UsageError: `data.format` is not known.
    """
    parsed = parse_source(source, form=config.data.format, heldout=heldout)
    if parsed.hub:
        return str(parsed)
    return str(replace(parsed, place=str(Path(parsed.place).expanduser().absolute())))


def _check(assets: Assets) -> tuple[list[Finding], dict[str, float]]:
    """Read everything once as the stages will.

    Raises:
        UsageError: model, tokenizer or data cannot be used; says where.
    """
    from shakedown.data_sources import load_rows
    from shakedown.models import huggingface
    from shakedown.models.chat import encode_prompt

    train, heldout = load_rows(assets.train), load_rows(assets.heldout)
    model_config = huggingface.read_config(Path(assets.model))
    tokenizer = huggingface.read_tokenizer(Path(assets.model))
    longest = len(encode_prompt(tokenizer, max(train, key=_length).messages))
    findings = [
        Finding("model", "pass", "config", assets.model, measured=model_config.model_type),
        Finding("data", "pass", "config", assets.train, measured=len(train), unit="rows"),
        Finding("data", "pass", "config", assets.heldout, measured=len(heldout), unit="rows"),
        _disjoint(train, heldout, assets.heldout),
        *_without_images(assets),
    ]
    metrics = {"train_rows": len(train), "heldout_rows": len(heldout), "longest_prompt": longest}
    return findings, {name: float(value) for name, value in metrics.items()}


def _without_images(assets: Assets) -> list[Finding]:
    """Questions about an image that the model is not shown can only be guessed."""
    return [
        Finding(
            "images",
            "warn",
            "config",
            source,
            measured="text only",
            expected="the problems' images, which stages do not read",
            blame="user",
            remedy="choose a data set without images",
        )
        for source in dict.fromkeys((assets.train, assets.heldout))
        if (known := parse_source(source).format) and known.images
    ]


def _disjoint(train: "list[Row]", heldout: "list[Row]", subject: str) -> Finding:
    """Held-out problems that are trained on measure memory, not learning."""
    known = {tuple(message["content"] for message in row.messages) for row in train}
    shared = sum(tuple(m["content"] for m in row.messages) in known for row in heldout)
    return Finding(
        "disjoint",
        "warn" if shared else "pass",
        "config",
        subject,
        measured=shared,
        expected=0,
        unit="rows also in the train set",
        blame="user" if shared else "none",
        remedy="take them out of the train set" if shared else "",
    )


def _length(row: "Row") -> int:
    return sum(len(message["content"]) for message in row.messages)
