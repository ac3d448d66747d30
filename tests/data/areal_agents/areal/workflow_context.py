"""Stands in for AReaL's own `areal.workflow_context`."""


def stat_scope() -> str:
    return "rollout"
