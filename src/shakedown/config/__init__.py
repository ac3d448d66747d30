"""Typed, strict configuration; imports without torch."""

from shakedown.config.base import SupervisedStage
from shakedown.config.command import CommandStage
from shakedown.config.load import (
    WORKFLOW_CONFIG,
    Written,
    dump_config,
    layers,
    load_config,
    merge,
    parse_config,
    write_resolved,
)
from shakedown.config.own_stage import (
    DriftConfig,
    FaultConfig,
    GrpoConfig,
    OptimizerConfig,
    ProfileConfig,
    StageConfig,
)
from shakedown.config.schema import (
    AgentsConfig,
    ClusterConfig,
    Config,
    ConsistencyConfig,
    DataConfig,
    ModelConfig,
    PreflightConfig,
    ServeConfig,
)

__all__ = [
    "WORKFLOW_CONFIG",
    "AgentsConfig",
    "ClusterConfig",
    "CommandStage",
    "Config",
    "ConsistencyConfig",
    "DataConfig",
    "DriftConfig",
    "FaultConfig",
    "GrpoConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PreflightConfig",
    "ProfileConfig",
    "ServeConfig",
    "StageConfig",
    "SupervisedStage",
    "Written",
    "dump_config",
    "layers",
    "load_config",
    "merge",
    "parse_config",
    "write_resolved",
]
