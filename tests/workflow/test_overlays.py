"""What `shakedown lint` says of overlays and what the workflow makes of them is the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.cli import main
from tests.workflow.helpers import ROOT
from tests.workflow.test_workflow import snakemake


def _whole_grpo() -> str:
    """A whole run of one stage that names no order."""
    body: dict[str, Any] = yaml.safe_load(
        (ROOT / "config" / "config.yaml").read_text(encoding="utf-8")
    )
    body |= {"run": "whole", "order": [], "stages": {"only": body["stages"]["grpo"]}}
    return yaml.safe_dump(body)


@pytest.mark.parametrize(
    ("overlay", "stages"),
    [
        ("order: [grpo]\n", {"grpo"}),
        ("order: [sft]\n", {"sft"}),
        ("order: [grpo]\nstages: {grpo: {steps: 3, optimizer: {warmup_steps: 1}}}\n", {"grpo"}),
        ("run: both\n", {"sft", "grpo"}),
        (_whole_grpo(), {"only"}),
    ],
    ids=["grpo", "sft", "changed grpo", "both", "a whole run"],
)
def test_a_config_that_lint_passes_is_planned_with_its_stages_alone(
    tmp_path: Path, overlay: str, stages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "overlay.yaml"
    path.write_text(overlay, encoding="utf-8")

    linted = main(["lint", str(path)])
    planned = snakemake("-n", "--configfile", str(path), "--config", f"results={tmp_path}")

    output = planned.stdout + planned.stderr
    assert (linted, planned.returncode) == (0, 0), output
    assert set(re.findall(r"stage=(\w+)", output)) == stages


@pytest.mark.parametrize(
    "fault",
    [
        "serve: {lease: 3.0}\n",
        "serve: {extra_args: [--port=1]}\n",
        "run: a\nrun: b\n",
        "order: [sft, grp]\n",
        "stages: {sft: null}\n",
        "stages: {sft: {allocation: 'fsdp:t4'}}\n",
        "agents: {target: 'config/examples/my_agent.py:NoAgent'}\n",
    ],
)
def test_a_config_that_lint_refuses_is_refused_at_the_same_place(
    tmp_path: Path,
    fault: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "overlay.yaml"
    path.write_text(f"results: {tmp_path}\n{fault}", encoding="utf-8")

    linted = main(["lint", str(path)])
    planned = snakemake("-n", "--configfile", str(path))

    assert (linted, planned.returncode) == (2, 1)
    told = capsys.readouterr()
    place = re.search(r"overlay\.yaml(:\d+:\d+)?", (told.out + told.err).split("fault", 1)[-1])
    assert place is not None
    assert place[0] in planned.stdout + planned.stderr
