"""Captions of `snakemake --report`: valid Jinja and reStructuredText for the shipped config."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jinja2 import StrictUndefined, Template

ROOT = Path(__file__).parents[3]
CAPTIONS = sorted((ROOT / "workflow" / "report").glob("*.rst"))
RULES = [*(ROOT / "workflow" / "rules").glob("*.smk"), ROOT / "workflow" / "Snakefile"]


def render(caption: Path) -> str:
    """The caption as Snakemake renders it: Jinja first, then reStructuredText to HTML."""
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text(encoding="utf-8"))
    snakemake = SimpleNamespace(config=config, wildcards=SimpleNamespace(stage="grpo"))
    # Snakemake's own settings.
    template = Template(
        caption.read_text(encoding="utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    publish = importlib.import_module("docutils.core").publish_parts
    strict = {"halt_level": 2, "report_level": 5}
    parts = publish(template.render(snakemake=snakemake), writer="html", settings_overrides=strict)
    return str(parts["body"])


@pytest.mark.parametrize("caption", CAPTIONS, ids=lambda path: path.stem)
def test_caption_is_valid(caption: Path) -> None:
    assert "<p>" in render(caption)


def test_captions_tell_what_they_are_about() -> None:
    folder = ROOT / "workflow" / "report"
    assert "<strong>sft, grpo</strong>" in render(folder / "workflow.rst")
    assert "<strong>grpo</strong>" in render(folder / "diagnosis.rst")


def test_every_caption_is_used_and_every_used_one_is_there() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in RULES)
    used = {word.split(".rst")[0] for word in text.split("report/")[1:] if ".rst" in word}
    assert {name for name in used if name.isidentifier()} == {path.stem for path in CAPTIONS}
