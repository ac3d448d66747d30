"""The executor as a plugin: found by Snakemake, its settings checked, a world of its own."""

import ast
from pathlib import Path
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

import snakemake_executor_plugin_submitit as plugin

PACKAGE = Path(plugin.__file__).parent


def test_snakemake_finds_the_plugin_and_its_settings() -> None:
    found = ExecutorPluginRegistry().get_plugin("submitit")

    assert found.settings_cls is plugin.ExecutorSettings
    assert found.common_settings.non_local_exec


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("folder", ""),
        ("array_size", -1),
        ("patience", -1),
        ("requeue_limit", -1),
        ("log_lines", -1),
        ("qos", "a\nb"),
        ("reservation", "a\\"),
        ("jobname_prefix", "a b"),
        ("jobname_prefix", "x" * 51),
        ("jobname_prefix", "é"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_options_name(option: str, value: Any) -> None:
    with pytest.raises(WorkflowError, match=f"--submitit-{option.replace('_', '-')}"):
        plugin.ExecutorSettings(**{option: value})


def test_settings_that_are_resources_are_their_defaults() -> None:
    settings = plugin.ExecutorSettings(qos="low", no_requeue=True, jobname_prefix="my_run-1")

    assert settings.resource_defaults == {"qos": "low", "reservation": "", "requeue": False}
    assert "requeue" not in plugin.ExecutorSettings().resource_defaults


def test_the_executor_and_shakedown_do_not_import_each_other() -> None:
    for source in PACKAGE.glob("*.py"):
        assert "shakedown" not in imported(source)
    for source in (PACKAGE.parent / "shakedown").rglob("*.py"):
        assert "snakemake_executor_plugin_submitit" not in imported(source)


def imported(source: Path) -> set[str]:
    """Top-level names of the packages that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
