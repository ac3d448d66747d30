"""Stages that are a command: what its launcher, its nodes and its progress say together."""

import shlex
from collections.abc import Iterator

from shakedown.core.verdict import Finding
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

# What a launcher that is given already would be asked to run as a script.
_LAUNCHERS = frozenset({"torchrun", "accelerate", "python", "python3", "srun", "mpirun", "ray"})
_OF_SCRIPTS = frozenset({"torchrun", "accelerate"})
_SPREADS = frozenset({"torchrun", "accelerate", "srun"})


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
    """A command of several nodes knows them, and one of several GPUs has a rank for each."""
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
            remedy = "nothing says how many steps are done"
            yield advice("progress", f"{key}.steps", stage.steps, expected, remedy)
