"""Rules of `shakedown lint` over several keys of a config: one pure function per rule.

A new rule is a function in the module of its subject and one row in `RULES`. It fails a config
only where the run cannot work; what is merely suspicious is a warning, which stops nothing.
"""

from collections.abc import Callable, Iterable, Iterator

from shakedown.core.verdict import Finding
from shakedown.training.lint_rules import (
    data,
    lengths,
    model,
    nodes,
    server,
    steps,
    times,
)
from shakedown.training.lint_rules.inputs import Inputs, read_inputs

__all__ = ["RULES", "Inputs", "apply_rules", "read_inputs"]

LintRule = Callable[[Inputs], Iterable[Finding]]

RULES: tuple[LintRule, ...] = (
    data.rows_can_be_read,
    data.roles_are_known,
    data.heldout_is_apart,
    data.reward_can_be_earned,
    data.reward_of_another_data_set,
    data.template_of_agents,
    model.folder_is_complete,
    model.server_heads,
    model.server_layers,
    model.trained_weights,
    model.trainer_cuts,
    model.router_loss,
    model.grade_of_experts,
    steps.memory,
    lengths.server_length,
    lengths.trained_length,
    lengths.comparison_length,
    lengths.comparison_temperature,
    lengths.prompt_length,
    lengths.values_of_the_demo,
    server.own_options,
    server.memory_share,
    server.gemma3_attention,
    server.agent_engine,
    times.trainer_waits,
    times.start_up,
    times.lease,
    steps.warm_up,
    steps.checkpoints,
    steps.batches,
    steps.engine_options,
    steps.sinks,
    steps.evaluation,
    steps.faults,
    steps.demo_problems,
    nodes.launched_once,
    nodes.nodes_are_used,
    nodes.steps_are_read,
    nodes.results_without_wildcards,
    nodes.shared_between_nodes,
)


def apply_rules(inputs: Inputs) -> Iterator[Finding]:
    """The findings of all rules, in their order."""
    for rule in RULES:
        yield from rule(inputs)
