"""Several nodes: paths that each has to see, and how a command is launched on them."""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from shakedown.agents.rewards import is_own
from shakedown.core.verdict import Finding
from shakedown.data_sources import parse_source
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

# A node's own on most clusters; a site may share any of them, hence a warning.
_NODE_LOCAL = re.compile(
    r"/(tmp|var/tmp|dev/shm|run|raid|ssd|nvme|local|(mnt|media|scratch|data)/(local|nvme|ssd))"
    r"([_-]?(scratch|tmp|disk)|\d+)?(?=/|$)"
)
# Launchers that a command would start as the script of another launcher.
_LAUNCHERS = frozenset({"torchrun", "accelerate", "python", "python3", "srun", "mpirun", "ray"})
_OF_SCRIPTS = frozenset({"torchrun", "accelerate"})
_SPREADS = frozenset({"torchrun", "accelerate", "srun"})


def results_without_wildcards(inputs: Inputs) -> Iterator[Finding]:
    """The path of the results has no braces, which Snakemake takes for wildcards."""
    results = inputs.config.results
    if "{" in results or "}" in results:
        yield fault("results", "results", results, "a path without { and }")


def shared_between_nodes(inputs: Inputs) -> Iterator[Finding]:
    """With jobs on other nodes, no path is on a file system that is local to each node.

    Only whole paths are judged: relative ones lie where the user works.
    """
    cluster = inputs.config.cluster
    if cluster.nodes == 1 and cluster.launcher == "local":
        return
    for key, text in _places(inputs):
        found = _node_local(Path(text), inputs.memory_folders)
        if found:
            expected = "a file system that all nodes share"
            remedy = f"on most clusters each node has a {found} of its own"
            yield advice("shared", key, text, expected, remedy)


def _node_local(path: Path, memory_folders: Iterable[Path]) -> str:
    """The folder above a whole path that each node has for itself, or an empty string."""
    if not path.is_absolute():
        return ""
    for each in (path, path.resolve()):
        named = _NODE_LOCAL.match(str(each))
        if named:
            return named[0]
        for folder in memory_folders:
            if each.is_relative_to(folder):
                return str(folder)
    return ""


def _places(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Keys with the path that each names; what names none is left out."""
    config, data = inputs.config, inputs.config.data
    yield "results", config.results
    yield "model.source", config.model.source
    for key, text in (("data.train", data.train), ("data.heldout", data.heldout)):
        source = parse_source(text, form=data.format)
        if not source.hub:
            yield key, source.place
    if is_own(data.reward):
        yield "data.reward", data.reward.rpartition(":")[0]
    yield "agents.target", config.agents.target.rpartition(":")[0]
    for key, stage in inputs.stages:
        if stage.grpo and stage.grpo.agent:
            yield f"{key}.grpo.agent", stage.grpo.agent.rpartition(":")[0]


def launched_once(inputs: Inputs) -> Iterator[Finding]:
    """The command is what its launcher is given, not the launcher again."""
    for key, stage in inputs.commands:
        first = shlex.split(stage.command)[0].rpartition("/")[2]
        if stage.launch in _OF_SCRIPTS and first in _LAUNCHERS:
            expected = f"what {stage.launch} is given: its options, then a script"
            remedy = f"leave {first} out, or set launch: none"
            yield fault("launch", f"{key}.command", stage.command, expected, remedy)
        elif stage.launch == "srun" and first == "srun":
            expected = "what srun is given: a program and its arguments"
            yield fault("launch", f"{key}.command", stage.command, expected, "leave srun out")


def nodes_are_used(inputs: Inputs) -> Iterator[Finding]:
    """A command for several nodes uses their names, and one for several GPUs has a rank each."""
    gpus = inputs.config.cluster.gpus_per_node
    for key, stage in inputs.commands:
        told = stage.placeholders & {"hosts", "head", "nodes"}
        if stage.launch == "none" and stage.nodes > 1 and not told:
            expected = "1, or a command with {hosts}, {head} or {nodes}"
            remedy = "the line runs on the first node alone"
            yield advice("nodes", f"{key}.nodes", stage.nodes, expected, remedy)
        if stage.launch in _SPREADS and stage.ranks_per_node == 1 < gpus:
            expected = f"{gpus}, cluster.gpus_per_node"
            yield advice("gpus", f"{key}.ranks_per_node", 1, expected, "a GPU for each rank")


def steps_are_read(inputs: Inputs) -> Iterator[Finding]:
    """Steps that are planned are read from somewhere."""
    for key, stage in inputs.commands:
        if stage.steps and stage.progress is None:
            expected = "null, or `progress: {pattern: ...}`"
            remedy = "nothing shows how many steps are done"
            yield advice("progress", f"{key}.steps", stage.steps, expected, remedy)
