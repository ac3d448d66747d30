"""A run's model and data: the demo's are written, given ones are checked and recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shakedown.config import Config
from shakedown.core.errors import UsageError
from shakedown.core.files import read_json_as, write_json
from shakedown.core.paths import AssetsPaths
from shakedown.core.verdict import (
    Finding,
    Stopwatch,
    Verdict,
    installed_versions,
    status_of,
)
from shakedown.data_sources import Conversation, iter_conversations, load_rows, parse_source
from shakedown.training.demo import addition_rows, write_model, write_rows

SCHEMA = "shakedown/assets/1"
DEMO = "demo"


@dataclass(frozen=True)
class Assets:
    """Resolved: a model folder, and two sources of rows as `shakedown.data_sources` names them."""

    model: str
    train: str
    heldout: str


def prepare_assets(config: Config, out: Path) -> Verdict:
    """Write the demo's model and data or fetch the given ones, check them, write `assets.json`.

    Raises:
        UsageError: model, tokenizer or data cannot be used; says where.
        StorageError: `out` cannot be written.
    """
    clock = Stopwatch()
    paths = AssetsPaths(out.absolute())
    assets = Assets(_model(config, paths), *_data(config, paths))
    findings, metrics = _check(config, assets)
    # After the check: later stages take assets.json for model and data that can be used.
    write_json(paths.file, {"schema": SCHEMA, **vars(assets)})
    return Verdict(
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


def read_assets(path: Path) -> Assets:
    """Read what `shakedown assets` wrote.

    Raises:
        UsageError: missing, not JSON, or not of this schema.
    """
    hint = f"shakedown assets --config CONFIG --out {path.parent}"
    return read_json_as(Assets, path, "assets", schema=SCHEMA, hint=hint)


def needs_train_answers(config: Config) -> bool:
    """Whether a stage judges answers to train rows; SFT trains on conversations, too."""
    return any(stage.grpo for stage in config.own_stages.values())


def needs_heldout_answers(config: Config) -> bool:
    """Whether a stage judges answers to held-out rows."""
    return any(stage.eval_samples for stage in config.own_stages.values())


def model_source(config: Config, assets: Path | None) -> str:
    """The run's model: that of the given `assets.json`, else the config's; the demo's is written.

    Raises:
        UsageError: as `read_assets`.
    """
    if assets is None and config.model.source != DEMO:
        return config.model.source
    return read_assets(assets or config.paths.assets.file).model


def heldout_source(config: Config) -> str:
    """The held-out rows of a run; the demo's are where `shakedown assets` wrote them.

    Raises:
        UsageError: the demo's rows were not written yet.
    """
    if config.data.heldout != DEMO:
        return _resolved_source(config, config.data.heldout, heldout=True)
    return read_assets(config.paths.assets.file).heldout


def _model(config: Config, paths: AssetsPaths) -> str:
    """The model's folder; the demo's is written, a hub name's is fetched.

    Raises:
        UsageError: there is no such model.
    """
    source = config.model.source
    if source == DEMO:
        write_model(paths.model, seed=config.seed)
        return str(paths.model)
    folder = Path(source)
    if folder.is_dir() or not _is_hub_name(source):
        return str(folder.absolute())
    return _fetched(source)


def _is_hub_name(source: str) -> bool:
    """`owner/name`; anything that starts like a path is one."""
    return source.count("/") == 1 and not source.startswith((".", "/"))


def _fetched(name: str) -> str:
    from huggingface_hub import snapshot_download  # a local model needs none of it

    try:
        # Left out: second copies of the weights in forms that nothing here reads, such as Llama's
        # own .pth files in `original/` and llama.cpp's GGUF.
        folder: str = snapshot_download(name, ignore_patterns=["*.pth", "*.gguf", "original/*"])
    # Errors of huggingface_hub, of its HTTP client or of the file system: for the user all mean
    # that there is no model.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"model.source {name!r} is not a local folder and could not be fetched: {reason}",
            hint="give the path of a Hugging Face folder, or check name, network and token",
        ) from error
    return folder


def _data(config: Config, paths: AssetsPaths) -> tuple[str, str]:
    """Train and held-out data; the demo's are written."""
    given = (config.data.train, config.data.heldout)
    places = [paths.train, paths.heldout]
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
        str(place) if source == DEMO else _resolved_source(config, source, heldout=number == 1)
        for number, (source, place) in enumerate(zip(given, places, strict=True))
    )
    return train, heldout


def _resolved_source(config: Config, source: str, *, heldout: bool) -> str:
    """A source with its format, split and whole path, readable from any folder.

    Raises:
        UsageError: `data.format` is not known.
    """
    parsed = parse_source(source, form=config.data.format, heldout=heldout)
    if parsed.hub:
        return str(parsed)
    return str(replace(parsed, place=str(Path(parsed.place).absolute())))


def _check(config: Config, assets: Assets) -> tuple[list[Finding], dict[str, float]]:
    """Read everything once as the stages will.

    Raises:
        UsageError: model, tokenizer or data cannot be used; says where.
    """
    # Later stages only read the file: these load transformers.
    from shakedown.models import huggingface
    from shakedown.models.chat import encode_row

    train: Sequence[Conversation] = (
        load_rows(assets.train)
        if needs_train_answers(config)
        else [*iter_conversations(assets.train)]
    )
    heldout: Sequence[Conversation] = (
        load_rows(assets.heldout)
        if needs_heldout_answers(config)
        else [*iter_conversations(assets.heldout)]
    )
    model_config = huggingface.read_config(Path(assets.model))
    tokenizer = huggingface.read_tokenizer(Path(assets.model))
    longest = encode_row(
        tokenizer,
        max(train, key=_length),
        stops=huggingface.stop_tokens(Path(assets.model), tokenizer),
        template_kwargs=config.data.chat_template_kwargs,
    )
    findings = [
        Finding("model", "pass", "config", assets.model, measured=model_config.model_type),
        Finding("data", "pass", "config", assets.train, measured=len(train), unit="rows"),
        Finding("data", "pass", "config", assets.heldout, measured=len(heldout), unit="rows"),
        _disjoint(train, heldout, assets.heldout),
        *_without_images(assets),
    ]
    metrics = {
        "train_rows": len(train),
        "heldout_rows": len(heldout),
        "longest_row": len(longest.tokens),
    }
    return findings, {name: float(value) for name, value in metrics.items()}


def _without_images(assets: Assets) -> list[Finding]:
    """A warning for problems with images, which the model is not shown and can only guess."""
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
        for source in dict.fromkeys((assets.train, assets.heldout))  # once where both are the same
        if (known := parse_source(source).format) and known.images
    ]


def _disjoint(
    train: Sequence[Conversation], heldout: Sequence[Conversation], subject: str
) -> Finding:
    """A finding for held-out problems that are also trained on: those measure memory."""
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


def _length(row: Conversation) -> int:
    """Length in characters: good enough to find the longest row without encoding all."""
    return sum(len(message["content"]) for message in row.messages)
